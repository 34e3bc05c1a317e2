"""What is raised about a configuration."""


class ConfigError(ValueError):
    """A mistake in the configuration; each line of the message names an option."""
