"""Defines how a contained part of the environment reports that it will not do something."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


class RefusedRequest(Exception):
    """An agent may not do something. ``rule`` is the refusal rule shown in the observation."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule
        self.message = message


Refuse = Callable[[str, str], NoReturn]
"""Records a refusal (rule, message) and raises RefusedRequest."""


def refuse(rule: str, message: str) -> NoReturn:
    """Raise RefusedRequest; a ``Refuse`` that records nothing."""
    raise RefusedRequest(rule, message)
