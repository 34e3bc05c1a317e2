"""``report.html``: the page about a run as a single file, which can be opened without a server and
sent to others.

python -m realhf.view report RUN_DIR writes it for any run, including runs that are in progress or
were killed.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import realhf
from realhf.base.files import write_atomic
from realhf.monitor.trace import merge_traces
from realhf.view.run import PARTS, Run
from realhf.view.run_folder import MARKS, finished_state, is_run, read_json

REPORT_FILE = "report.html"
"""Name of the report in the run's folder."""
MAX_STEPS = 5_000
"""Maximum number of steps in a report; for longer runs only evenly spaced steps are kept."""
MAX_SPANS = 20_000
"""Maximum number of spans in a report; the last ones are kept."""
MAX_ROLLOUTS = 20_000
"""Maximum number of rollouts in the table of a report; the last ones are kept."""
ROLLOUT_BYTES = 6 * 2**20
"""Maximum bytes of conversations and tokens in a report, as JSON; compressed, they take about a
fifth of this in the file."""


def write_report(run_dir: Path, rollout_bytes: int = ROLLOUT_BYTES) -> Path:
    """Write ``report.html`` from the files of a run and return its path. For long runs it contains
    a subset of evenly spaced steps, and the last spans and rollouts. Raises OSError."""
    run = Run(run_dir, "/".join(run_dir.resolve().parts[-2:]))
    path = run_dir / REPORT_FILE
    write_atomic(
        path, build_page(run.name, _replace_nonfinite(_collect_answers(run, rollout_bytes)))
    )
    return path


def _collect_answers(run: Run, rollout_bytes: int) -> dict[str, Any]:
    """Return the answers that the server would give about the run, by path."""
    about = {"number": 0, **run.describe(), "folder": run.folder.name}
    summary = read_json(run.folder / "summary.json")
    # The launcher may still hold the lock, so the run would seem to be in progress.
    if isinstance(summary, dict) and summary.get("steps") == about["steps"]:
        ended = finished_state(about["steps"])
        about |= {"state": ended.kind, "text": ended.text}
    metrics, every = _thin_out(run.metrics.columns(0, 0))
    if every > 1:
        about["text"] += f" This report has one of every {every} steps."
    table, details = run.rollouts.extract(MAX_ROLLOUTS, rollout_bytes)
    prefix = "/api/runs/0"
    return {
        "/api/runs": {"follow": False, "runs": [about], "left_off": 0, "one_left_off": ""},
        "/api/changes": {
            "seen": "",
            "runs": {"0": dict.fromkeys(PARTS, "kept")},
            "states": {"0": about},
        },
        f"{prefix}/metrics": metrics,
        f"{prefix}/evaluations": run.evaluations(),
        f"{prefix}/advisories": run.advisories(),
        f"{prefix}/about": run.about(),
        f"{prefix}/spans": base64.b64encode(run.spans.pack(0, 0, MAX_SPANS)).decode(),
        f"{prefix}/rollouts": base64.b64encode(table).decode(),
        f"{prefix}/rollout": details,
    }


def _thin_out(metrics: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return (columns with every n-th step, n), with n chosen such that at most ``MAX_STEPS``
    remain. The last step is always kept."""
    steps = metrics["steps"]
    every = max(1, math.ceil(len(steps) / MAX_STEPS))
    kept_steps = slice((len(steps) - 1) % every, None, every) if steps else slice(None)
    columns = {name: values[kept_steps] for name, values in metrics["columns"].items()}
    return metrics | {"steps": steps[kept_steps], "columns": columns}, every


def _replace_nonfinite(value: Any) -> Any:
    """Return a value in which numbers that standard JSON cannot represent are replaced by None."""
    if isinstance(value, dict):
        return {name: _replace_nonfinite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_IMPORT = re.compile(r'^import (?:\* as (\w+)|\{ ([^}]*) \}) from "\./(\w+)\.js";$', re.MULTILINE)
"""Import statement of a module of the page."""
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) ([\w$]+))", re.MULTILINE)
"""The word ``export`` before a function, class or constant."""
_LINK = re.compile(r'<link rel="stylesheet" href="/static/([\w.]+)">\n')
"""Link to a style sheet in index.html."""
_SCRIPT = re.compile(r'<script( type="module")? src="/static/([\w.]+)"></script>\n')
"""Link to a script in index.html."""


def static_files() -> dict[str, Traversable]:
    """Return the page's own files and those shared with other pages, sorted by name."""
    folders = (
        resources.files("realhf.view").joinpath("static"),
        resources.files("realhf.base").joinpath("look"),
    )
    files = {file.name: file for folder in folders for file in folder.iterdir() if file.is_file()}
    return dict(sorted(files.items()))


def build_page(title: str, answers: Mapping[str, Any]) -> str:
    """Return the page as one HTML string, including everything that it would otherwise load from a
    server.

    answers: the server's answer for each path. The content security policy in the head allows only
    these scripts and styles, and no requests.
    """
    texts = {name: file.read_text("utf-8") for name, file in static_files().items()}
    page = texts["index.html"]
    styles = [texts[name] for name in _LINK.findall(page)]
    scripts = [
        _bundle_modules(texts, name) if module else texts[name]
        for module, name in _SCRIPT.findall(page)
    ]
    policy = (
        f"default-src 'none'; script-src {_policy_sources(scripts)}; style-src "
        f"{_policy_sources(styles)}; "
        f"img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    head += "".join(f"<style>{style}</style>\n" for style in styles)
    packed = base64.b64encode(gzip.compress(json.dumps(answers).encode(), mtime=0)).decode()
    body = "<noscript>This report is drawn by JavaScript, which is off here.</noscript>\n"
    body += f'<script type="application/octet-stream" id="answers">{packed}</script>\n'
    body += "".join(f"<script>{script}</script>\n" for script in scripts)
    icon = f"data:image/svg+xml;base64,{base64.b64encode(texts['icon.svg'].encode()).decode()}"
    page = _SCRIPT.sub("", _LINK.sub("", page)).replace("/static/icon.svg", icon)
    page = page.replace("<title>", f"{head}<title>", 1).replace("</body>", f"{body}</body>")
    return page.replace("<title>realhf view</title>", f"<title>{escape(title)}</title>")


def _policy_sources(texts: list[str]) -> str:
    """Return the sources for a content security policy that allows these texts."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _bundle_modules(texts: Mapping[str, str], name: str) -> str:
    """Return a module and all its imports as one script, because a page opened from a file cannot
    load modules from other files. Each module becomes a function that returns its exports, placed
    after the modules that it imports."""
    bundled: dict[str, str] = {}

    def add(module: str) -> None:
        text = texts[f"{module}.js"]
        for _, _, imported in _IMPORT.findall(text):
            if imported not in bundled:
                add(imported)
        exports = ", ".join(_EXPORT.findall(text))
        body = _EXPORT.sub("", _IMPORT.sub(_replace_import, text))
        bundled[module] = (
            f"const of_{module} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();\n"
        )

    add(name.removesuffix(".js"))
    return '"use strict";\n(() => {\n' + "".join(bundled.values()) + "})();\n"


def _replace_import(match: re.Match[str]) -> str:
    """Return the declaration that replaces an import statement."""
    namespace, names, module = match.groups()
    return f"const {namespace or '{ ' + names.replace(' as ', ': ') + ' }'} = of_{module};"


def report_command(arguments: Sequence[str]) -> int:
    """Run the command ``report`` with its arguments: write ``trace.json`` and the report of a run
    folder.

    Return the exit code: 0, or 1 after printing one line about the mistake. Raises OSError.
    """
    parser = argparse.ArgumentParser(
        prog="python -m realhf.view report",
        description="Write trace.json and report.html, the page over a run in one file that can be "
        "sent around.",
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--no-rollouts", action="store_true", help="leave out conversations and tokens"
    )
    options = parser.parse_args(arguments)
    if not is_run(options.run_dir):
        print(
            f"error: {options.run_dir} is not a run: it has none of {', '.join(MARKS)}",
            file=sys.stderr,
        )
        return 1
    merge_traces(options.run_dir)
    print(write_report(options.run_dir, 0 if options.no_rollouts else ROLLOUT_BYTES))
    return 0
