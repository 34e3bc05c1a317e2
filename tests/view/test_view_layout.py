"""What a person reads of a label is the whole label, on a wide window and on a telephone, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.view.made_up_run import MadeUpRun
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.view.page import PAGES, shows
from tests.view.runs import served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=ABSENT)]
CLIPPED = """
    (() => {
        const pen = document.createElement('canvas').getContext('2d');
        const wanted = (one) => {
            const style = getComputedStyle(one);
            if (one.matches('select')) {
                const copy = one.cloneNode(true);
                copy.removeAttribute('id');
                Object.assign(copy.style, { position: 'absolute', width: 'max-content', maxWidth: 'none' });
                Object.assign(copy.style, { padding: style.padding, font: style.font });
                document.body.append(copy);
                const width = copy.getBoundingClientRect().width;
                copy.remove();
                return width;
            }
            pen.font = style.font;
            const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
            return pen.measureText(one.placeholder).width + padding;
        };
        const fields = [...document.querySelectorAll('select, input[placeholder]')].filter((one) => one.offsetParent);
        const said = [...document.querySelectorAll('button, label, summary, th')].filter((one) => one.offsetParent);
        return [
            fields.length,
            fields.filter((one) => one.getBoundingClientRect().width < wanted(one) - 0.5).map((one) => one.id),
            said.filter((one) => one.clientWidth && one.scrollWidth > one.clientWidth).map((one) => one.innerText),
        ];
    })()"""
FIELDS = {"overview": 0, "rollouts": 6, "tokens": 1, "tasks": 3}


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_label_is_clipped(chromium: Chromium, tmp_path: Path, width: int, scheme: str):
    """The longest choice of each filter fits: the ways of splitting used to lose their last word."""
    run = MadeUpRun(tmp_path / "run", failing=0.4)
    run.add_step(8)
    run.close()
    with served(tmp_path / "run", follow=False) as url:
        chromium.look(width, 800, scheme)
        chromium.open(url + "/")
        for key, name in enumerate(PAGES, start=1):
            chromium.press(str(key))
            shows(chromium, name)
            count, fields, said = chromium.js(CLIPPED)
            assert (name, count >= FIELDS.get(name, 0), fields, said) == (name, True, [], [])
            assert chromium.js("document.documentElement.scrollWidth") <= width
        chromium.look(1280, 800)
        chromium.open("about:blank")
        assert chromium.problems == []
