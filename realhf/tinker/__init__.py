"""A server that training loops written for the client ``tinker`` use as theirs (docs/tinker.md)."""
