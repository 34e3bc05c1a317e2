"""The playground's pictures in ``docs/images``, taken of the real page: ``make screenshots`` (needs
Chromium)."""

import time
from contextlib import closing
from pathlib import Path

from realhf.aws.server.program import EnvServerProcess
from realhf.aws.tasks.captures import resolve
from realhf.aws.tasks.loader import instantiate
from tests.chromium import Chromium

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
TASK = 301
SEED = 3
IDLE = "!document.body.hasAttribute('aria-busy')"
_SETTLED_S = 0.5
"""For the progress bar, which moves."""


def main() -> None:
    """Plays a task of several services and photographs it light, dark, solved and in a replay."""
    IMAGES.mkdir(exist_ok=True)
    with EnvServerProcess(1, "--web-ministack-port", "0") as server, closing(Chromium()) as page:
        page.look(1360, 850)
        page.open(server.url + "/web")
        page.wait("document.documentElement.dataset.ready")
        page.js(
            f"document.getElementById('seed').value = '{SEED}'; "
            f"document.getElementById('chaos').checked = false"
        )
        page.js(f"""document.querySelector('[data-id="{TASK}"]').click()""")
        page.wait(f"document.body.dataset.mode === 'live' && {IDLE}")
        solution = instantiate(TASK, SEED).solution
        run(page, f"aws iam create-role --role-name {instantiate(TASK, SEED).params['name']}")
        run(page, "aws help --task-hint")
        outputs = [run(page, command) for command in solution[:3]]
        page.write(resolve(solution[3], outputs))
        picture(page, "playground-light.png")
        page.look(1360, 850, "dark")
        picture(page, "playground-dark.png")
        run(page, "")
        run(page, solution[4])
        page.look(1360, 850)
        page.press("Escape")
        page.press("p")
        for _ in range(3):
            page.press("ArrowRight")
        picture(page, "playground-replay.png")
        if page.problems:
            raise SystemExit(f"the page complained: {page.problems}")


def run(page: Chromium, command: str) -> str:
    """Type a command after what stands there already and wait for its answer; returns its
    output."""
    count = page.js("document.querySelectorAll('.entry').length")
    page.write(command)
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.entry').length === {count + 1} && {IDLE}")
    return page.js("fetch('/web/state').then((reply) => reply.json())")["log"]["steps"][-1][
        "command_output"
    ]


def picture(page: Chromium, name: str) -> None:
    """Write one image, once everything stands still."""
    time.sleep(_SETTLED_S)
    page.screenshot(IMAGES / name)
    print(f"{IMAGES / name}: {(IMAGES / name).stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
