"""Answers of the simulator that are not XML: it writes names into its XML as they were given.

A policy may call a user ``<|x|>`` or put a control character into a name. AWS escapes the one and refuses the other;
the simulator's answer would be readable neither to the AWS CLI nor to the grader, for the rest of the episode.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.parsers import expat

_TAG = re.compile(r'<(/?)([A-Za-z_][\w.:-]*)(?:\s+[\w.:-]+="[^"<]*")*\s*(/?)>|<\?xml[^>]*\?>')
_AMPERSAND = re.compile(r"&(?!(?:amp|lt|gt|quot|apos|#\d+|#x[0-9a-fA-F]+);)")
_NO_CHARACTER = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass
class _Piece:
    """A tag or the text between two."""

    text: str
    markup: bool


def well_formed(body: bytes) -> bool:
    try:
        expat.ParserCreate().Parse(body, True)
    except expat.ExpatError:
        return False
    return True


def repaired(body: bytes) -> bytes:
    """The body if it is XML. Otherwise with what does not belong to a pair of tags escaped and what XML has no
    character for replaced by U+FFFD; as it was where that does not help."""
    if well_formed(body):
        return body
    text = _NO_CHARACTER.sub("\ufffd", body.decode("utf-8", "replace"))
    pieces = _paired(_pieces(text))
    whole = "".join(piece.text if piece.markup else _escaped(piece.text) for piece in pieces).encode()
    return whole if well_formed(whole) else body


def _pieces(text: str) -> list[_Piece]:
    pieces, end = [], 0
    for match in _TAG.finditer(text):
        pieces += [_Piece(text[end : match.start()], False), _Piece(match[0], True)]
        end = match.end()
    return [*pieces, _Piece(text[end:], False)]


def _paired(pieces: list[_Piece]) -> list[_Piece]:
    """Tags without their counterpart become text."""
    opened: list[tuple[str, _Piece]] = []
    for piece in pieces:
        match = _TAG.fullmatch(piece.text) if piece.markup else None
        if match is None or match[2] is None or match[3]:
            continue
        if not match[1]:
            opened.append((match[2], piece))
        elif match[2] in [name for name, _ in opened]:
            while opened[-1][0] != match[2]:
                opened.pop()[1].markup = False
            opened.pop()
        else:
            piece.markup = False
    for _, piece in opened:
        piece.markup = False
    return pieces


def _escaped(text: str) -> str:
    return _AMPERSAND.sub("&amp;", text).replace("<", "&lt;").replace(">", "&gt;")
