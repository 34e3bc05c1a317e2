"""Turns bytes into groups and back: groups are validated once when they arrive, then spliced and never encoded
twice."""
