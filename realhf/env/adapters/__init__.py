"""Plays environments of others: an OpenEnv server by its address, ``verifiers`` packages, Gymnasium
environments."""
