"""Storage of the server's state and payloads: one module per medium behind the interface of
``base``."""
