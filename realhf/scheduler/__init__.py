"""Schedulers: starting, supervising and stopping worker processes."""
