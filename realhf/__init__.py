"""Reinforcement learning for tool-using agents: a dataflow of model calls, environments and a trajectory server."""

__version__ = "0.1.0"
"""The one place that says the version: packaging and every ``--version`` read it here."""
