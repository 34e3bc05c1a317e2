"""Loader of users' own environments: a class with tools, a class with messages, or a data set with
a verifier."""
