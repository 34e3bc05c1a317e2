"""Keeps the server's state and payloads: one module per medium behind the protocol of ``base``."""
