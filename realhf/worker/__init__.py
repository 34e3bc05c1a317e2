"""Command that joins a host to a run: ``python -m realhf.worker --join``."""
