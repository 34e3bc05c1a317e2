"""What tests ask of the page in a browser, and how they walk it by keys."""

from __future__ import annotations

import json

from tests.chromium import Chromium

PAGES = ("overview", "advisories", "timeline", "rollouts", "rollout", "tokens", "tasks")
"""In the order of their keys, from 1."""


def text(page: Chromium, selector: str) -> str:
    """Return what all elements show, an element a line."""
    return page.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText).join('\\n')")


def shows(page: Chromium, name: str) -> None:
    """Wait until this page is shown and drawn: what was not drawn yet has no text (``content-visibility``)."""
    page.wait(f"document.documentElement.dataset.page === {json.dumps(name)}")
    page.js("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def follow_advisory(page: Chromium, name: str, *, patience_s: float = 20.0) -> None:
    """Go from any page to the advisories, wait for this one, and follow it to its rollouts, by keys."""
    page.press("2")
    shows(page, "advisories")
    page.wait(f"document.querySelector('[data-id={name}]')", patience_s)
    for _ in range(page.js("document.querySelectorAll('.advisory').length")):
        page.press("j")
        if page.js("document.activeElement.dataset.id") == name:
            break
    page.press("Enter")
    shows(page, "rollouts")
