"""Environments that ship with the package and need no service, each in a folder of its own."""
