"""Loads an environment of one's own: a class with tools, a class with messages, or a data set with
a verifier."""
