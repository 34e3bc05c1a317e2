"""Repairs answers of the simulator that are not XML: it writes names into its XML as they were given.

A policy may call a user ``<|x|>`` or put a control character into a name. AWS escapes the one and refuses the other;
the simulator's answer would be readable neither to the AWS CLI nor to the grader, for the rest of the episode.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from xml.parsers import expat

_TAG = re.compile(r'<(/?)([A-Za-z_][\w.:-]*)(?:\s+[\w.:-]+="[^"<]*")*\s*(/?)>|<\?xml[^>]*\?>')
_AMPERSAND = re.compile(r"&(?!(?:amp|lt|gt|quot|apos|#\d+|#x[0-9a-fA-F]+);)")
_NO_CHARACTER = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass
class _Piece:
    """Is a tag or the text between two; a tag that has no counterpart is text, too."""

    text: str
    tag: re.Match[str] | None = None


def well_formed(body: bytes) -> bool:
    """Return whether the body is XML."""
    try:
        expat.ParserCreate().Parse(body, True)
    except expat.ExpatError:
        return False
    return True


def repaired(body: bytes) -> bytes:
    """Return the body if it is XML. Otherwise everything that does not belong to a pair of tags is escaped, and
    characters that XML does not have are replaced by U+FFFD; where that does not help, the body comes back as it was.
    """
    if well_formed(body):
        return body
    text = _NO_CHARACTER.sub("\ufffd", body.decode("utf-8", "replace"))
    pieces = _pieces(text)
    _unpair(pieces)
    whole = "".join(piece.text if piece.tag else _escaped(piece.text) for piece in pieces).encode()
    return whole if well_formed(whole) else body


def _pieces(text: str) -> list[_Piece]:
    pieces, end = [], 0
    for match in _TAG.finditer(text):
        pieces += [_Piece(text[end : match.start()]), _Piece(match[0], match)]
        end = match.end()
    return [*pieces, _Piece(text[end:])]


def _unpair(pieces: list[_Piece]) -> None:
    """Turn tags without their counterpart into text."""
    opened: list[tuple[str, _Piece]] = []
    depth: Counter[str] = Counter()
    for piece in pieces:
        if piece.tag is None or piece.tag[2] is None or piece.tag[3]:
            continue
        closing, name = piece.tag[1], piece.tag[2]
        if not closing:
            opened.append((name, piece))
            depth[name] += 1
        elif not depth[name]:
            piece.tag = None
        else:
            while (inner := opened.pop())[0] != name:
                inner[1].tag = None
                depth[inner[0]] -= 1
            depth[name] -= 1
    for _, piece in opened:
        piece.tag = None


def _escaped(text: str) -> str:
    return _AMPERSAND.sub("&amp;", text).replace("<", "&lt;").replace(">", "&gt;")
