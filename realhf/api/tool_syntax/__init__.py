"""Syntaxes in which models write tool calls: one module each, listed in ``table.SYNTAXES``."""
