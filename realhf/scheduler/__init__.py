"""Schedulers, which start, supervise and stop worker processes."""
