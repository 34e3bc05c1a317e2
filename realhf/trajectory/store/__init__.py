"""Where the server's state and payloads live: one module per medium behind the protocol of ``base``."""
