"""Starts, watches and stops worker processes."""
