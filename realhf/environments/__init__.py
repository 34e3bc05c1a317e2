"""Environments that ship with the package and need no service, each in its own folder."""
