"""Storage of the server's state and payloads: one module per storage medium, all implementing the
interface in ``base``."""
