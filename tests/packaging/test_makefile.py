"""The Makefile finds a Python by itself, or says in one line what is missing; the container file
uses its targets."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from realhf.aws.client.aws_env import AwsEnv
from tests.packaging.running_server import checkout_in, typed

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("python3.11", "python3.12", "python3.13", "python3")
SHOW = ("--eval=show: ; @: $(info $(PYTHON))", "show")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of what ``make install`` reads, with an empty ``path`` folder beside it, and no
    ``.venv``."""
    for name in ("Makefile", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "path").mkdir()
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make where only the programs of ``path`` are found."""
    return subprocess.run(
        [str(shutil.which("make")), *arguments],
        cwd=folder,
        env={"PATH": str(folder / "path")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def program(
    folder: Path, name: str, usable: bool = True, version: tuple[int, int] | None = None
) -> None:
    """Put a Python into ``path``: this one, one that calls itself ``version``, or one that answers
    no question."""
    code = (
        ""
        if version is None
        else f"import sys; sys.version_info = {(*version, 0)}; exec(sys.argv[2])"
    )
    runs = f'{sys.executable} -c "{code}" "$@"' if code else f'{sys.executable} "$@"'
    path = folder / "path" / name
    path.write_text(f"#!/bin/sh\nexec {runs}\n" if usable else "#!/bin/sh\nexit 1\n")
    path.chmod(0o755)


@pytest.mark.parametrize("name", NAMES)
def test_any_of_the_names_is_found(folder: Path, name: str) -> None:
    """A machine that has but one Python, under any of the names, needs no option."""
    program(folder, name)
    assert make(folder, *SHOW).stdout.strip() == name


@pytest.mark.slow
def test_one_that_is_too_old_is_passed_over(folder: Path) -> None:
    """A name that is there but does not answer (a version manager's shim, an old python3) is not
    taken."""
    program(folder, "python3.11", usable=False)
    program(folder, "python3.13")
    assert make(folder, *SHOW).stdout.strip() == "python3.13"


def test_the_one_that_is_named_wins(folder: Path) -> None:
    """``PYTHON=`` is taken as it is, whatever else is there."""
    program(folder, "python3.11")
    assert make(folder, "PYTHON=/opt/mine/python3", *SHOW).stdout.strip() == "/opt/mine/python3"


@pytest.mark.parametrize(("arguments", "named"), [((), NAMES), (("PYTHON=python3",), ("python3",))])
def test_without_a_usable_python_the_error_is_one_line(
    folder: Path, arguments: tuple[str, ...], named: tuple[str, ...]
) -> None:
    """The error says what was tried and what to do, and nothing is made."""
    program(folder, "python3", usable=False)
    done = make(folder, "install", *arguments)
    said = [line for line in done.stderr.splitlines() if "***" not in line]
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert all(name in said[0] for name in named) and "PYTHON=/path/to/python3" in said[0]
    assert not (folder / ".venv").exists()


@pytest.mark.slow
def test_one_that_is_newer_than_what_is_tested_is_taken_only_by_name(folder: Path) -> None:
    """``python3`` of 3.14 was taken without a word."""
    program(folder, "python3", version=(3, 14))
    done = make(folder, "install")
    assert done.returncode == 2 and "no Python 3.11, 3.12 or 3.13" in done.stderr
    assert "PYTHON=/path/to/python3" in done.stderr and not (folder / ".venv").exists()
    done = make(folder, "install", "PYTHON=python3")
    assert (
        "make: warning: python3 is newer than the versions that are tested, 3.11 to 3.13"
        in done.stderr
    )
    for version in ((3, 11), (3, 13)):
        program(folder, "python3", version=version)
        assert make(folder, *SHOW).stdout.strip() == "python3"


def another_checkout(folder: Path) -> Path:
    """A checkout with an environment of its own."""
    other = folder / "other"
    (other / "realhf").mkdir(parents=True)
    (other / "realhf" / "__init__.py").touch()
    (other / ".venv" / "bin").mkdir(parents=True)
    (other / ".venv" / "bin" / "python").write_text(f"#!/bin/sh\necho ran >> {other}/ran\n")
    (other / ".venv" / "bin" / "python").chmod(0o755)
    return other


@pytest.mark.parametrize("stamped", [False, True])
def test_the_environment_of_another_checkout_is_not_taken(folder: Path, stamped: bool) -> None:
    """A link to it was installed into without a word, and then the other checkout ran this one's
    code."""
    other = another_checkout(folder)
    if stamped:
        (other / ".venv" / ".installed").touch()
    (folder / ".venv").symlink_to(other / ".venv")
    done = make(folder, "install")
    said = [line for line in done.stderr.splitlines() if "***" not in line]
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert f"is a link to the environment of {other.resolve()}" in said[0] and "rm .venv" in said[0]
    assert not (other / "ran").exists()


@pytest.mark.parametrize("own", [False, True])
def test_an_environment_that_lies_elsewhere_belongs_to_what_is_installed_in_it(
    folder: Path, own: bool
) -> None:
    """A link to another disk is fine, unless another checkout is installed there."""
    other = another_checkout(folder)
    elsewhere = folder / "disk" / "environment"
    (elsewhere / "bin").mkdir(parents=True)
    (folder / "realhf").mkdir()
    (folder / "realhf" / "__init__.py").touch()
    (elsewhere / "bin" / "python").write_text(
        f"#!/bin/sh\necho {folder.resolve() if own else other.resolve()}\n"
    )
    (elsewhere / "bin" / "python").chmod(0o755)
    (elsewhere / ".installed").touch()
    (folder / ".venv").symlink_to(elsewhere)
    done = make(folder, "install")
    assert done.returncode == (0 if own else 2), done.stderr
    assert own or f"environment of {other.resolve()}" in done.stderr


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.sim
def test_make_run_starts_the_environment_with_the_sessions_of_the_variable(tmp_path: Path) -> None:
    """``AWS_RL_ENV_POOL_SIZE=2 make run`` serves two sessions, each an account of its own, and ends
    with Ctrl-C."""
    with typed("AWS_RL_ENV_POOL_SIZE=2 make run", checkout_in(tmp_path)) as (url, printed):
        assert httpx.get(f"{url}/metadata").json()["max_concurrent_envs"] == 2
        with AwsEnv(url).sync() as first, AwsEnv(url).sync() as second:
            first.reset(task_id=1, seed=1)
            second.reset(task_id=1, seed=1)
            first.step("aws s3api create-bucket --bucket only-here")
            seen = second.step(
                "aws s3api list-buckets --query Buckets[].Name"
            ).observation.command_output
    assert "only-here" not in seen
    assert not [line for line in printed if "Traceback" in line]
    assert "make run" in make(ROOT, "help").stdout


def test_the_versions_that_are_named_agree() -> None:
    """The Makefile, the package and the README name the same Pythons."""
    stated = re.search(r"^PYTHONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert stated and tuple(stated[1].split()) == NAMES
    setup = (ROOT / "setup.py").read_text()
    readme = (ROOT / "README.md").read_text()
    assert 'python_requires=">=3.11"' in setup
    for version in ("3.11", "3.12", "3.13"):
        assert f"Python :: {version}" in setup and version in readme


def test_the_container_file_runs_targets_that_exist() -> None:
    """The image installs and trains by the Makefile, on a Python that was tested, and leaves local
    folders out."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    words = " ".join(line for line in lines if not line.startswith("#"))
    assert re.search(r"FROM python:3\.1[123]-", words)
    assert "RUN make install" in words and 'CMD ["make", "train"]' in words
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^install:", makefile, re.MULTILINE) and re.search(
        r"^train:", makefile, re.MULTILINE
    )
    assert {".git", ".venv*", "runs"} <= set((ROOT / ".dockerignore").read_text().splitlines())


@pytest.mark.parametrize(
    "broken", ["", "ruff check", "pyright", "realhf.aws.tasks validate", "-m pytest"]
)
def test_make_test_fails_with_whatever_fails(folder: Path, broken: str) -> None:
    """Checks run beside the tests: the failure of either is that of make, and what checks say is in
    one piece."""
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    fails = f'case "$0 $*" in *"{broken}"*) exit 1;; esac\n' if broken else ""
    samples = 'case "$*" in *task_sample) echo --ids 101 102; exit 0;; esac\n'
    for name in ("ruff", "pyright", "python"):
        (binaries / name).write_text(f'#!/bin/sh\n{samples}echo "said: {name} $*"\n{fails}')
        (binaries / name).chmod(0o755)
    (folder / ".venv" / ".installed").touch()
    done = subprocess.run(
        [str(shutil.which("make")), "test"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(folder / "path")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == (2 if broken else 0), done.stdout + done.stderr
    said = [
        line.removeprefix("said: ")
        for line in done.stdout.splitlines()
        if line.startswith("said: ")
    ]
    [tests] = [line for line in said if "-m pytest" in line]
    assert said.index(tests) in (0, len(said) - 1) and "--dist loadfile" in tests
    said.remove(tests)
    checks = [
        "ruff check .",
        "ruff format --check --quiet .",
        "pyright ",
        "python -m realhf.aws.tasks validate --seeds 1 --ids 101 102",
    ]
    assert said == checks[: len(said)] and (len(said) == len(checks) or broken in said[-1])
    assert not list((folder / "path").iterdir()), "its notes are gone"


PLAIN = {"test-all", "test-fast", "test-freezes", "test-gpu"}
"""Targets that start more than tests, or those that every change runs."""
TARGETS = sorted(
    {*re.findall(r"^(test-[a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)} - PLAIN
)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_of_tests_selects_some(target: str) -> None:
    """A target whose tests were all marked to be left out would play none."""
    printed = subprocess.run(
        [str(shutil.which("make")), "-n", "--assume-old=install", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = printed.stdout.replace("\\\n", " ").splitlines()
    commands = [line for line in lines if "/python -m pytest " in line]
    assert commands
    for command in commands:
        arguments = shlex.split(command.partition("/python -m pytest ")[2].rstrip(";"))
        collected = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments, "--collect-only"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert collected.returncode == 0, collected.stdout[-2000:] + collected.stderr[-2000:]
