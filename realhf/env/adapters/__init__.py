"""Environments made by others: OpenEnv servers, environments of the package ``verifiers``, and
Gymnasium environments."""
