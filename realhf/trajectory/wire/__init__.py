"""Conversion of groups from and to bytes. Groups are validated once when they arrive, then spliced
and never encoded twice."""
