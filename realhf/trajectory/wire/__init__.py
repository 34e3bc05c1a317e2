"""Bytes to groups and back: validation once at the door, then spliced and never encoded twice."""
