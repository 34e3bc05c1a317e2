"""Task templates of the environment, one YAML file or folder per tier, and their loader."""
