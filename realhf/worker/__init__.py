"""Is the command that lends a host to a run: ``python -m realhf.worker --join``."""
