"""Conversion of groups from and to bytes. Groups are validated once, when they arrive; their bytes
are then copied into responses and not encoded again."""
