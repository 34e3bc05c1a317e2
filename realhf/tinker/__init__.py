"""Training server compatible with the client ``tinker`` (docs/tinker.md)."""
