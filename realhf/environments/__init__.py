"""Environments that ship beside AWS, each in a folder of its own."""
