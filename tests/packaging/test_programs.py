"""What is started with ``python -m``: all of it is listed, and a Python without the packages gets
one line."""

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
from realhf.view.__main__ import main as view

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    command.removeprefix("python -m ") for command in COMMANDS if command.startswith("python -m ")
]
BARE = (sys.executable, "-S")
"""This Python without its packages, as the one of the system is to somebody who forgets to activate
``.venv``."""


def run(*command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_package_lists_its_commands_without_any_other_package() -> None:
    """``python -m realhf`` used to be an error; it needs nothing but Python."""
    listed = run(*BARE, "-m", "realhf")
    assert listed.returncode == 0, listed.stderr
    assert [command for command in COMMANDS if f"  {command} " not in listed.stdout] == []
    assert run(*BARE, "-m", "realhf", "--version").stdout == f"realhf {realhf.__version__}\n"


def test_the_list_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Every package with a ``__main__`` and every console command is named, and whatever is named
    exists."""
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert [name for name in MODULES if find_spec(name) is None] == []
    packages = [
        path.parent.relative_to(ROOT) for path in (ROOT / "realhf").glob("*/**/__main__.py")
    ]
    assert len(packages) >= 8
    assert [
        name
        for path in packages
        if not re.search(rf"\b{(name := '.'.join(path.parts))}\b", printed)
    ] == []
    [scripts] = [
        ast.literal_eval(value)
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "console_scripts"
    ]
    assert {script.partition("=")[0] for script in scripts} == {*COMMANDS} - {
        f"python -m {name}" for name in MODULES
    }


@pytest.mark.slow
def test_a_python_without_the_packages_ends_in_one_line() -> None:
    """These were tracebacks that ended with the name of a package."""
    for module in (
        *MODULES,
        "realhf.trajectory",
        "realhf.tinker",
        "workers.env_worker",
        "workers.master_worker",
    ):
        done = run(*BARE, "-m", module, "--help")
        [line] = done.stderr.splitlines()
        assert done.returncode == 1 and line.startswith("error: "), done.stderr
        assert re.search(
            r"has no package '\w+' \(imported in \S+:\d+\)|not installed here: \w+", line
        )
        assert "activate" in line or Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()


@pytest.mark.slow
def test_the_remedy_is_what_the_checkout_has(tmp_path: Path) -> None:
    """An environment that is there is to be activated, else it is made first."""
    for name in ("realhf", "setup.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    made = run(*BARE, "-m", "realhf.env", folder=tmp_path).stderr
    activate = tmp_path / ".venv" / "bin" / "activate"
    assert made.endswith(
        f"; make install (in {tmp_path}) makes an environment with all of them; then source "
        f"{activate}\n"
    )
    activate.parent.mkdir(parents=True)
    activate.touch()
    there = run(*BARE, "-m", "realhf.env", folder=tmp_path).stderr
    assert there.endswith(f"; activate the environment of this checkout: source {activate}\n")


@pytest.mark.slow
def test_other_errors_and_programs_of_others_keep_their_tracebacks() -> None:
    """Only packages of others are explained, and only where a module of this project is the
    program."""
    code = "import sys, realhf; assert sys.excepthook is sys.__excepthook__; import no_such_package"
    assert "Traceback" in run(sys.executable, "-c", code).stderr
    code = "import sys; sys.argv = ['-m']; import realhf; import realhf.no_such_module"
    assert "Traceback" in run(sys.executable, "-c", code).stderr
    code = "import sys; sys.argv = ['-m']; import realhf; raise ValueError('x')"
    assert "Traceback" in run(sys.executable, "-c", code).stderr


def programs() -> list[str]:
    """Every module that a person may start with ``python -m`` and that reads a command line."""
    found = {path for folder in ("realhf", "workers") for path in (ROOT / folder).rglob("*.py")}
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(found)}
    reads = {
        path for path, text in texts.items() if "ArgumentParser(" in text or "run_planned(" in text
    }
    starts = {path for path, text in texts.items() if '__name__ == "__main__"' in text}
    packages = {path for path in starts if path.name == "__main__.py"}
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for path in sorted((reads & starts) | packages)
    ]


@pytest.mark.nightly
@pytest.mark.slow
def test_every_program_prints_its_version() -> None:
    """Most of them answered ``--version`` with a complaint about missing arguments. One process
    asks all of them, so that torch is imported once."""
    asked = programs()
    assert {
        "realhf.launch",
        "realhf.aws.evaluate",
        "workers.env_worker",
        "workers.model_worker",
    } <= {*asked}
    ask = (
        "import runpy, sys\n"
        "for name in sys.argv.pop(1).split():\n"
        "    sys.argv[1:] = ['--version']\n"
        "    print(name, end=' ', flush=True)\n"
        "    try:\n"
        "        runpy.run_module(name, run_name='__main__', alter_sys=True)\n"
        "    except SystemExit as ended:\n"
        "        print('' if not ended.code else f'exit code {ended.code}', flush=True)\n"
        "    else:\n"
        "        print('went on', flush=True)\n"
    )
    done = run(sys.executable, "-c", ask, " ".join(asked))
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if line]
    wrong = [
        line
        for line in answers
        if not re.fullmatch(rf"\S+ [\w-]+ {re.escape(realhf.__version__)}", line)
    ]
    assert wrong == [] and len(answers) == len(asked), done.stderr


def test_other_words_of_the_view_print_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """``export``, ``note`` and ``report`` have parsers of their own."""
    for word in ("export", "note", "report"):
        with pytest.raises(SystemExit) as ended:
            view([word, "--version"])
        assert ended.value.code == 0
        assert capsys.readouterr().out == f"realhf {realhf.__version__}\n"
