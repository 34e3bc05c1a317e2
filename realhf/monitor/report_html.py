"""Makes the few HTML elements of a report. Every text is escaped; nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --muted: light-dark(#666, #9aa4b2); --line: light-dark(#ddd, #39414d); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; }
body { background: light-dark(#fff, #12161c); color: light-dark(#222, #e3e7ee); }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; font-size: 13px; margin: .6em 0; display: block; overflow-x: auto; }
th, td { padding: .15em .8em .15em 0; text-align: right; white-space: nowrap; }
th { color: var(--muted); font-weight: 500; }
table.text td { white-space: normal; text-align: left; vertical-align: top; }
table.text th { text-align: left; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; border-radius: 6px; }
pre { background: light-dark(#f5f5f5, #1c222b); padding: .8em; overflow-x: auto; font-size: 12px; }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """Return a whole document with these parts in its body."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def heading(content: str, level: int = 2) -> str:
    """Return a heading of this level."""
    return f"<h{level}>{escape(content)}</h{level}>"


def paragraph(content: str) -> str:
    """Return a paragraph."""
    return f"<p>{escape(content)}</p>"


def text(content: str) -> str:
    """Return the text as it is, in a typewriter face."""
    return f"<pre>{escape(content)}</pre>"


def folded(label: str, content: str) -> str:
    """Return the text folded under a label that opens it."""
    return f"<details><summary>{escape(label)}</summary>{text(content)}</details>"


def sentences(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose cells hold sentences: they are broken into lines."""
    return table(columns, rows).replace("<table>", '<table class="text">', 1)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts with a row of column names."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def picture(png: bytes, label: str) -> str:
    """Return a PNG picture embedded in the page."""
    return f'<img alt="{escape(label)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def number(value: float | None) -> str:
    """Format a number with four significant digits; empty for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) and abs(value) < 1e9 else f"{value:.4g}"
