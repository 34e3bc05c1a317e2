"""Holds the task templates of the environment, one YAML file per tier, and their loader."""
