"""Makes AGENTS.md, the page for coding agents, out of CONTRIBUTING.md:

python -m tests.docs.agents_page > AGENTS.md
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "AGENTS.md"
_INTRODUCTION = """\
# For coding agents

realhf trains tool-using agents with reinforcement learning. This page is made from [CONTRIBUTING.md](CONTRIBUTING.md),
which says more, by `python -m tests.docs.agents_page > AGENTS.md`; edit that page instead.
[docs/architecture.md](docs/architecture.md) says where things are and answers "I want to change how X works".
"""
_SECTIONS = ("Set up", "The inner loop", "Rules that machines check", "Design conventions")
"""Sections of CONTRIBUTING.md that are taken over."""
_FIRST_BLOCKS = {"The inner loop": 4}
"""Of these sections only so many paragraphs and blocks of commands are taken."""


def agents_page() -> str:
    """Return the page. Raises ValueError where CONTRIBUTING.md has no such section."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    parts = [_INTRODUCTION.strip()]
    for name in _SECTIONS:
        found = re.search(
            rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
        )
        if found is None:
            raise ValueError(f"CONTRIBUTING.md has no section {name!r}")
        blocks = found[1].strip().split("\n\n")
        parts += [f"## {name}", *blocks[: _FIRST_BLOCKS.get(name, len(blocks))]]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(agents_page(), end="")
