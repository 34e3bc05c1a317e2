"""Reads and checks steps of arithmetic on given numbers, without ``eval``.

    answer  := step (separator step)*          separator: "," or a line break
    step    := sum ["=" value]
    sum     := product (("+" | "-") product)*
    product := atom (("*" | "/") atom)*
    atom    := number | "(" sum ")"
    value   := ["-"] number ["/" number]

``3*4=12, 12+5=17`` reaches 17 from 3, 4 and 5, and so does ``3*4+5``. A step takes numbers from a pool, each once, and
puts its value there if that is a whole number from 0 on, so that a later step may take it. A stated value must be
right. Values are exact fractions.

The text is hostile. Every number is taken from the pool as it is read, so no value outgrows what the given numbers
allow; length, depth and digits are bounded before anything is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

LONGEST_ANSWER = 240
"""Characters. Eight numbers with all steps written out take less."""
DEEPEST = 16
"""Parentheses within each other."""
MOST_DIGITS = 18
_DIGITS = "0123456789"
_SYMBOLS = "+-*/()=,"


class ArithmeticRefused(ValueError):
    """The text is no right arithmetic on the given numbers; the message says why."""


@dataclass(frozen=True)
class Evaluated:
    """What right steps come to: the ``value`` of the last one, and how many ``operations`` they hold."""

    value: Fraction
    operations: int


def evaluate(text: str, numbers: Iterable[int]) -> Evaluated:
    """Return what the steps in ``text`` come to. Raises ArithmeticRefused for text that is no such steps, for a number
    that is not there (any more), for a stated value that is wrong, and for a division by 0."""
    return _Reader(_tokens(text), Counter(numbers)).steps()


def _tokens(text: str) -> list[str]:
    if len(text) > LONGEST_ANSWER:
        raise ArithmeticRefused(f"the answer has more than {LONGEST_ANSWER} characters")
    found: list[str] = []
    position = 0
    while position < len(text):
        character = text[position]
        end = position + 1
        if character in _DIGITS:
            while end < len(text) and text[end] in _DIGITS:
                end += 1
            if end - position > MOST_DIGITS or (character == "0" and end - position > 1):
                raise ArithmeticRefused("a number is too long or begins with 0")
            found.append(text[position:end])
        elif character in _SYMBOLS:
            found.append(character)
        elif character == "\n":
            found += [","] if found and found[-1] != "," else []
        elif character not in " \t\r":
            raise ArithmeticRefused(f"{character!r} is not allowed")
        position = end
    return found


class _Reader:
    """Reads tokens from left to right and takes numbers from the pool as it meets them."""

    def __init__(self, tokens: list[str], pool: Counter[int]) -> None:
        self._tokens, self._at, self._pool = tokens, 0, pool
        self._depth = self._operations = 0

    def steps(self) -> Evaluated:
        """Read all steps, and return the value of the last one. Raises ArithmeticRefused."""
        value = self._step()
        while self._skip(","):
            value = self._step()
        if self._at < len(self._tokens):
            raise ArithmeticRefused(f"{self._tokens[self._at]!r} is not expected there")
        return Evaluated(value, self._operations)

    def _step(self) -> Fraction:
        value = self._sum()
        if self._skip("=") and self._value() != value:
            raise ArithmeticRefused("a step states a wrong value")
        if value.denominator == 1 and value >= 0:
            self._pool[value.numerator] += 1
        return value

    def _value(self) -> Fraction:
        sign = -1 if self._skip("-") else 1
        value = Fraction(sign * self._digits())
        return self._quotient(value, Fraction(self._digits())) if self._skip("/") else value

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._skip("+", "-"):
            term = self._product()
            value = value + term if sign == "+" else value - term
            self._operations += 1
        return value

    def _product(self) -> Fraction:
        value = self._atom()
        while sign := self._skip("*", "/"):
            factor = self._atom()
            value = value * factor if sign == "*" else self._quotient(value, factor)
            self._operations += 1
        return value

    def _atom(self) -> Fraction:
        if not self._skip("("):
            number = self._digits()
            if self._pool[number] < 1:
                raise ArithmeticRefused(f"{number} is not there, or is used up")
            self._pool[number] -= 1
            return Fraction(number)
        self._depth += 1
        if self._depth > DEEPEST:
            raise ArithmeticRefused(f"more than {DEEPEST} parentheses stand within each other")
        value = self._sum()
        if not self._skip(")"):
            raise ArithmeticRefused("a parenthesis is not closed")
        self._depth -= 1
        return value

    def _quotient(self, value: Fraction, divisor: Fraction) -> Fraction:
        if not divisor:
            raise ArithmeticRefused("a step divides by 0")
        return value / divisor

    def _digits(self) -> int:
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if not token or token[0] not in _DIGITS:
            raise ArithmeticRefused(f"a number is expected, not {token or 'the end'!r}")
        self._at += 1
        return int(token)

    def _skip(self, *wanted: str) -> str:
        """Step over the next token and return it if it is one of ``wanted``; else return ""."""
        if self._at < len(self._tokens) and self._tokens[self._at] in wanted:
            self._at += 1
            return self._tokens[self._at - 1]
        return ""
