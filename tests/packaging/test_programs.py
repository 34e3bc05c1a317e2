"""What is started with ``python -m``: all of it is listed, and a Python without the packages gets one line."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import realhf
from realhf.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
MODULES = [command.removeprefix("python -m ") for command in COMMANDS if command.startswith("python -m ")]
BARE = (sys.executable, "-S")
"""This Python without its packages, as the one of the system is to somebody who forgets to activate ``.venv``."""


def run(*command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_package_lists_its_commands_without_any_other_package() -> None:
    """``python -m realhf`` used to be an error; it needs nothing but Python."""
    listed = run(*BARE, "-m", "realhf")
    assert listed.returncode == 0, listed.stderr
    assert [command for command in COMMANDS if f"  {command} " not in listed.stdout] == []
    assert run(*BARE, "-m", "realhf", "--version").stdout == f"realhf {realhf.__version__}\n"


def test_the_list_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Every package with a ``__main__`` and every console command is named, and whatever is named exists."""
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert [name for name in MODULES if find_spec(name) is None] == []
    packages = [path.parent.relative_to(ROOT) for path in (ROOT / "realhf").glob("*/**/__main__.py")]
    assert len(packages) >= 8
    assert [name for path in packages if not re.search(rf"\b{(name := '.'.join(path.parts))}\b", printed)] == []
    [scripts] = [
        ast.literal_eval(value)
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "console_scripts"
    ]
    assert {script.partition("=")[0] for script in scripts} == {*COMMANDS} - {f"python -m {name}" for name in MODULES}


@pytest.mark.slow
def test_a_python_without_the_packages_ends_in_one_line() -> None:
    """These were tracebacks that ended with the name of a package."""
    for module in (*MODULES, "realhf.trajectory", "realhf.tinker", "workers.env_worker", "workers.master_worker"):
        done = run(*BARE, "-m", module, "--help")
        [line] = done.stderr.splitlines()
        assert done.returncode == 1 and line.startswith("error: "), done.stderr
        assert re.search(r"has no package '\w+' \(asked for in \S+:\d+\)|not installed here: \w+", line)
        assert "activate" in line or Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()


def test_the_remedy_is_what_the_checkout_has(tmp_path: Path) -> None:
    """An environment that is there is to be activated, else it is made first."""
    for name in ("realhf", "setup.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    made = run(*BARE, "-m", "realhf.env", folder=tmp_path).stderr
    activate = tmp_path / ".venv" / "bin" / "activate"
    assert made.endswith(
        f"; make install (in {tmp_path}) makes an environment with all of them; then source {activate}\n"
    )
    activate.parent.mkdir(parents=True)
    activate.touch()
    there = run(*BARE, "-m", "realhf.env", folder=tmp_path).stderr
    assert there.endswith(f"; activate the environment of this checkout: source {activate}\n")


def test_other_errors_and_programs_of_others_keep_their_tracebacks() -> None:
    """Only packages of others are explained, and only where a module of this project is the program."""
    code = "import sys, realhf; assert sys.excepthook is sys.__excepthook__; import no_such_package"
    assert "Traceback" in run(sys.executable, "-c", code).stderr
    code = "import sys; sys.argv = ['-m']; import realhf; import realhf.no_such_module"
    assert "Traceback" in run(sys.executable, "-c", code).stderr
    code = "import sys; sys.argv = ['-m']; import realhf; raise ValueError('x')"
    assert "Traceback" in run(sys.executable, "-c", code).stderr
