"""The rules of the house that a machine can check: who may import whom, torch-free modules, no hidden settings."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EVERYTHING = frozenset({"api", "transport", "dataflow", "algorithms", "backends", "data", "env", "rollout",
                        "trajectory", "scheduler", "monitor"})
MAY_IMPORT: dict[str, frozenset[str]] = {
    "api": frozenset(),
    "transport": frozenset({"api"}),
    "dataflow": frozenset({"api", "transport"}),
    "algorithms": frozenset({"api"}),
    "backends": frozenset({"api"}),
    "data": frozenset({"api", "transport"}),
    "env": frozenset({"api"}),
    "rollout": frozenset({"api", "transport", "backends"}),
    "trajectory": frozenset({"api", "transport"}),
    "scheduler": frozenset({"api"}),
    "monitor": frozenset({"api"}),
}
TORCH_FREE = ("realhf/api", "realhf/dataflow", "realhf/env", "realhf/monitor", "realhf/scheduler", "realhf/launch",
              "realhf/transport", "realhf/trajectory", "experiments", "workers/master_worker.py",
              "workers/env_worker.py", "workers/trajectory_worker.py")
PROGRAMS = {"realhf/env/evaluate.py"}
"""Commands that put parts of several rooms together, as the launcher does; nothing may import them."""
READS_ENVIRONMENT = {"realhf/env/server_config.py", "realhf/rollout/trl/aws_tool.py",
                     "realhf/rollout/players/trainer_settings.py", "realhf/trajectory/http/config.py"}


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(node: ast.AST) -> Iterator[str]:
    """Full names of what the code below ``node`` imports; relative imports do not exist in this house."""
    for item in ast.walk(node):
        if isinstance(item, ast.Import):
            yield from (alias.name for alias in item.names)
        elif isinstance(item, ast.ImportFrom):
            assert item.level == 0, f"relative import in line {item.lineno}"
            yield from (f"{item.module}.{alias.name}" for alias in item.names)


def room(name: str) -> str | None:
    """'api' for 'realhf.api.config'; 'launch' for the launcher's modules; None for foreign packages."""
    parts = name.split(".")
    if parts[0] in ("workers", "experiments", "configs"):
        return parts[0]
    if parts[0] != "realhf" or len(parts) == 1:
        return None
    return "launch" if parts[1].startswith("launch") else parts[1]


@pytest.mark.parametrize("path", modules("realhf"), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_arrows_point_one_way(path: Path):
    own = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert not {f"{name.rpartition('.')[0].replace('.', '/')}.py" for name in imported(tree(path))} & PROGRAMS
    if own in (None, "__init__", "launch") or path.relative_to(ROOT).as_posix() in PROGRAMS:
        return
    assert own in MAY_IMPORT, f"{own} is not in the import table"
    wrong = {name for name in imported(tree(path))
             if (other := room(name)) and other != own and other not in MAY_IMPORT[own]}
    assert not wrong, f"{own} may import {sorted(MAY_IMPORT[own]) or 'nothing of ours'}"


def test_workers_and_experiments_import_realhf_but_not_the_launcher():
    for path in modules("workers", "experiments"):
        own = path.relative_to(ROOT).parts[0]
        others = {room(name) for name in imported(tree(path))} - {None, own} - EVERYTHING
        assert not others, f"{path.name} imports {others}"


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@pytest.mark.parametrize("prefix", TORCH_FREE)
def test_torch_is_not_imported_at_module_level(prefix: str):
    paths = [path for path in modules("realhf", "workers", "experiments")
             if path.relative_to(ROOT).as_posix().startswith(prefix)]
    for path in paths:
        for node in tree(path).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or is_type_checking(node):
                continue
            heavy = [name for name in imported(node) if name.split(".")[0] in ("torch", "transformers")]
            assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


@pytest.mark.parametrize("packages", [
    "realhf.api realhf.dataflow realhf.scheduler realhf.monitor realhf.launch experiments", "realhf.env",
    "realhf.trajectory",
])
def test_torch_free_packages_really_are(packages: str):
    """Imports every module of the packages in a fresh process: catches what arrives through others."""
    code = (
        "import importlib, pkgutil, sys\n"
        "for name in sys.argv[1:]:\n"
        "    package = importlib.import_module(name)\n"
        "    for found in pkgutil.walk_packages(getattr(package, '__path__', []), name + '.'):\n"
        "        if not found.name.endswith(('.__main__', '.child')):\n"
        "            importlib.import_module(found.name)\n"
        "    assert 'torch' not in sys.modules, f'torch came in with {name}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *packages.split()], capture_output=True, text=True, cwd=ROOT,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def environment_reads(path: Path) -> Iterator[int]:
    """Lines that ask for an environment variable. Handing an environment on to a child is not a read."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.get", "environ.get"):
            yield node.lineno
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and (
            ast.unparse(node.value) in ("os.environ", "environ")
        ):
            yield node.lineno


def test_environment_variables_are_read_in_the_configuration_layer_only():
    found = [f"{path.relative_to(ROOT)}:{line}" for path in modules("realhf", "workers", "experiments")
             for line in environment_reads(path)
             if path.relative_to(ROOT).as_posix() not in READS_ENVIRONMENT]
    assert not found


def test_no_module_is_named_after_nothing():
    names = {path.stem for path in modules("realhf", "workers", "experiments")}
    assert not names & {"utils", "common", "helpers", "misc"}


def test_the_checks_see_what_they_look_for(tmp_path: Path):
    bad = tmp_path / "bad.py"
    bad.write_text("import os\nfrom realhf.env import pool\nx = os.environ['A'] + os.getenv('B', '')\n")
    assert [room(name) for name in imported(tree(bad))] == [None, "env"]
    assert len(list(environment_reads(bad))) == 2
