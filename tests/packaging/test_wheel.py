"""A wheel built from the tree carries all that the tree does, and its main job composes far from
any checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import realhf
from realhf.base.installation import DISTRIBUTION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("configs", "experiments", "realhf", "workers")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def copy_tree(tree: Path) -> None:
    """Put what is packaged into a folder."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tree / name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy, so that nothing that an earlier build left behind gets
    into it."""
    tree = tmp_path_factory.mktemp("tree")
    copy_tree(tree)
    out = tmp_path_factory.mktemp("wheel")
    options = (
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
        "--wheel-dir",
        str(out),
    )
    run(*PIP, "wheel", *options, str(tree))
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_of_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source distribution and nothing else."""
    tree = tmp_path_factory.mktemp("source_tree")
    copy_tree(tree)
    out = tmp_path_factory.mktemp("source")
    run(
        sys.executable,
        "-c",
        f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})",
        cwd=tree,
    )
    [source] = out.glob("*.tar.gz")
    options = (
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
        "--wheel-dir",
        str(out),
    )
    run(*PIP, "wheel", *options, str(source))
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel was installed into."""
    folder = tmp_path_factory.mktemp("installed")
    run(
        *PIP,
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--quiet",
        "--target",
        str(folder),
        str(wheel),
    )
    return folder


def run(*command: str, cwd: Path | None = None, pythonpath: Path | None = None) -> str:
    """What a command that must succeed printed. ``pythonpath`` is all that Python finds beside its
    own packages."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if pythonpath is not None:
        environment["PYTHONPATH"] = str(pythonpath)
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def in_tree() -> set[str]:
    """Every file of the packages, of whatever kind."""
    paths = (path for name in PACKAGES for path in (ROOT / name).rglob("*"))
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.nightly
def test_the_wheel_holds_what_the_tree_holds(wheel: Path) -> None:
    """Tasks, configurations, experiments, workers and pages are in it, each as it is, and nothing
    else is."""
    expected = in_tree()
    kinds = (
        "realhf/aws/tasks/*.yaml",
        "configs/experiment/*.yaml",
        "realhf/aws/playground/static/*.html",
    )
    for kind in (*kinds, "realhf/env/templates/*.txt"):
        assert any(Path(name).match(kind) for name in expected), f"the tree has no {kind}"
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert found == expected
        assert all(archive.read(name) == (ROOT / name).read_bytes() for name in sorted(found))


def test_the_wheel_states_version_licence_and_commands(wheel: Path) -> None:
    """What an index or an installer reads agrees with the tree."""
    with zipfile.ZipFile(wheel) as archive:
        [about] = [
            name.partition("/")[0] for name in archive.namelist() if name.endswith("/METADATA")
        ]
        text = archive.read(f"{about}/METADATA").decode()
        metadata = text.partition("\n\n")[0].splitlines()
        commands = archive.read(f"{about}/entry_points.txt").decode()
        assert archive.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert {
        f"Name: {DISTRIBUTION}",
        f"Version: {realhf.__version__}",
        "Requires-Python: >=3.11",
        "License: Apache-2.0",
        "Author: the realhf authors",
        "Description-Content-Type: text/markdown",
    } <= {*metadata}
    assert text.endswith((ROOT / "README.md").read_text()), "what an index shows"
    assert (
        "aws-env = workers.env_worker:main" in commands
        and "run-api = realhf.trajectory.http.cli:main" in commands
    )


@pytest.mark.nightly
def test_the_main_job_composes_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    """The launcher finds experiments, configurations and tasks among the installed files."""
    where = (
        "import realhf, experiments, workers; print(realhf.__file__, experiments.__file__, "
        "workers.__path__[0])"
    )
    for path in run(sys.executable, "-c", where, cwd=tmp_path, pythonpath=installed).split():
        assert Path(path).is_relative_to(installed), path
    launch = (sys.executable, "-m", "realhf.launch")
    options = (
        "experiment=grpo_aws",
        "mode=check",
        f"fileroot={tmp_path / 'runs'}",
        "trial_name=check",
    )
    printed = run(*launch, *options, cwd=tmp_path, pythonpath=installed)
    assert (
        printed.startswith("grpo_aws: ")
        and str(tmp_path / "runs" / "grpo_aws" / "check") in printed
    )
    tasks = "from realhf.aws.tasks.loader import instantiate; print(instantiate(1, 7).description)"
    assert run(sys.executable, "-c", tasks, cwd=tmp_path, pythonpath=installed).strip()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "module", ["realhf", "realhf.launch", "realhf.env", "realhf.trajectory", "workers.env_worker"]
)
def test_every_command_states_the_version_without_torch(
    module: str, installed: Path, tmp_path: Path
) -> None:
    """``--version`` prints what ``realhf/__init__.py`` says, and is quick because torch stays
    out."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{module!r}, '--version']\n"
        "try:\n"
        f"    runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    printed = run(sys.executable, "-c", code, cwd=tmp_path, pythonpath=installed)
    assert printed.split()[-1] == realhf.__version__


@pytest.mark.nightly
def test_an_environment_is_written_and_checked_outside_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    """The templates of ``init`` are among the installed files, and so is the process that a check
    plays in."""
    command = (sys.executable, "-m", "realhf.env")
    run(*command, "init", "first_game", cwd=tmp_path, pythonpath=installed)
    printed = run(
        *command, "check", "first_game.py", "--instances", "5", cwd=tmp_path, pythonpath=installed
    )
    assert printed.splitlines()[-1].startswith("FirstGame: no faults, no notes, ")


@pytest.mark.nightly
def test_the_source_distribution_holds_what_the_wheel_holds(
    wheel: Path, wheel_of_source: Path
) -> None:
    """An installer that builds from source gets the same files."""
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(wheel_of_source) as second:
        assert {*first.namelist()} == {*second.namelist()}
        names = [name for name in first.namelist() if not name.endswith("/RECORD")]
        assert [name for name in names if first.read(name) != second.read(name)] == []


@pytest.mark.nightly
def test_it_installs_into_a_fresh_environment(wheel_of_source: Path, tmp_path: Path) -> None:
    """With what it requires, in the versions of ``constraints.txt``: commands start, and the files
    of the package are found. Nothing of this environment is seen."""
    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", str(fresh))
    python = str(fresh / "bin" / "python")
    constraints = ("-c", str(ROOT / "constraints.txt"))
    run(python, "-m", "pip", "install", "--quiet", *constraints, f"{wheel_of_source}[server]")
    for command in (
        (python, "-m", "realhf"),
        (str(fresh / "bin" / "run-api"),),
        (python, "-m", "realhf.env"),
    ):
        assert run(*command, "--version", cwd=tmp_path).split()[-1] == realhf.__version__
    tasks = "from realhf.aws.tasks.loader import instantiate; print(instantiate(1, 7).description)"
    assert run(python, "-c", tasks, cwd=tmp_path).strip()
