"""What tests ask of the page in a browser, and how they walk it by keys."""

from __future__ import annotations

import json

from tests.chromium import Chromium

PAGES = ("overview", "advisories", "timeline", "rollouts", "rollout", "tokens", "tasks")
"""In the order of their keys, from 1."""


def text(page: Chromium, selector: str) -> str:
    """Return what all elements show, an element a line."""
    return page.js(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => "
        f"one.innerText).join('\\n')"
    )


def shows(page: Chromium, name: str) -> None:
    """Wait until this page is shown and drawn: what was not drawn yet has no text
    (``content-visibility``)."""
    page.wait(f"document.documentElement.dataset.page === {json.dumps(name)}")
    page.js("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def go(page: Chromium, url: str, name: str = "overview") -> None:
    """Open the server at ``url`` and wait until this page of it, perhaps with a query behind it, is
    shown."""
    page.open(f"{url}/" if name == "overview" else f"{url}/#/{name}")
    shows(page, name.partition("?")[0])


def leave(page: Chromium) -> None:
    """Leave the page, which has complained of nothing."""
    page.open("about:blank")
    assert page.problems == []


def chart(title: str) -> str:
    """Return the expression of the chart that is seen with this title."""
    seen = (
        "[...document.querySelectorAll('.chart')].find((one) => one.offsetParent && "
        "one.innerText.startsWith({}))"
    )
    return f"{seen.format(json.dumps(title))}.chart"


def ticks(axes: str, axis: int) -> str:
    """Return the expression of what stands at the ticks of an axis: 0 below a chart, 1 beside
    it."""
    return f"{axes}.plot.axes[{axis}]._values.filter(Boolean)"


def painted(axes: str, colour: str) -> str:
    """Return the expression of how many pixels of a chart have a colour of the page, given as
    ``--name``."""
    return f"""(() => {{
        const {{ plot }} = {axes};
        const wanted = {axes}.colour({json.dumps(colour)})().match(/[0-9.]+/g).map(Number);
        const {{ width, height }} = plot.ctx.canvas;
        const found = plot.ctx.getImageData(0, 0, width, height).data;
        let count = 0;
        for (let at = 0; at < found.length; at += 4) {{
            const same = [0, 1, 2].every((part) => Math.abs(found[at + part] - wanted[part]) < 3);
            if (same && found[at + 3] > 250) count++;
        }}
        return count;
    }})()"""


def drag(page: Chromium, selector: str, begin: float, end: float) -> None:
    """Drag the pointer over a part of an element, given as shares of its width."""
    page.js(f"{selector}.scrollIntoView({{block: 'center'}})")
    place = (
        f"(({{x, y, width, height}}) => [x, y + height / 2, "
        f"width])({selector}.getBoundingClientRect())"
    )
    left, middle, wide = page.js(place)
    for kind, share in (
        ("mouseMoved", begin),
        ("mousePressed", begin),
        ("mouseMoved", end),
        ("mouseReleased", end),
    ):
        point = {"x": left + share * wide, "y": middle, "button": "left", "clickCount": 1}
        page.call("Input.dispatchMouseEvent", type=kind, **point)


def follow_advisory(page: Chromium, name: str, *, patience_s: float = 20.0) -> None:
    """Go from any page to the advisories, wait for this one, and follow it to its rollouts, by
    keys."""
    page.press("2")
    shows(page, "advisories")
    page.wait(f"document.querySelector('[data-id={name}]')", patience_s)
    for _ in range(page.js("document.querySelectorAll('.advisory').length")):
        page.press("j")
        if page.js("document.activeElement.dataset.id") == name:
            break
    page.press("Enter")
    shows(page, "rollouts")
