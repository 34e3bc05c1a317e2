"""The rules of the house that a machine can check: who may import whom, torch-free modules, no
hidden settings."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS: dict[str, str] = {
    "base": "",
    "web": "base",
    "api/tool_syntax": "",
    "api": "api/tool_syntax base",
    "transport": "api base",
    "backends/embedded": "api base",
    "backends/training": "api backends/embedded base",
    "registry": "",
    "backends/parallel": "api backends/embedded backends/training base",
    "backends/pretended": "api backends/embedded backends/parallel backends/training base registry "
    "transport",
    "backends/vllm/broadcast": "",
    "backends/vllm": "api backends/embedded backends/vllm/broadcast base",
    "backends": "api backends/embedded backends/training backends/vllm base",
    "data": "api base transport",
    "dataflow/journal": "api base",
    "env/containment": "base",
    "env/server": "api base web",
    "aws/tasks": "",
    "aws/cli": "base env/containment",
    "trajectory": "web",
    "trajectory/client": "api base trajectory",
    "trajectory/store": "base trajectory",
    "trajectory/state": "base trajectory trajectory/store web",
    "trajectory/training": "api trajectory/client",
    "trajectory/wire": "trajectory web",
    "trajectory/http": "base trajectory trajectory/state trajectory/store trajectory/wire web",
    "scheduler": "base env/containment",
    "monitor/rollouts": "api base",
    "monitor": "api base monitor/rollouts",
    "cluster": "api base monitor scheduler transport",
    "cluster/engines": "api base cluster scheduler transport",
    "view": "api base monitor monitor/rollouts web",
    "aws/simulator": "aws/cli base env/containment",
    "aws/grading": "aws/cli aws/simulator aws/tasks base",
    "aws/real_aws": "aws/cli aws/grading aws/simulator aws/tasks base env/containment",
    "algorithms": "api base data registry",
    "dataflow": "api base registry transport",
    "dataflow/rollouts": "api base dataflow dataflow/journal transport",
    "env/loader": "api base registry",
    "environments/sql": "api base env/loader",
    "env/check": "api base env/containment env/loader registry",
    "env/harbor": "api base env/containment env/loader",
    "env/server/spec": "api base env/containment env/loader env/server registry web",
    "environments/files": "api base env/loader",
    "rollout": "api base env/loader registry transport web",
    "launch": "api backends/pretended backends/training base dataflow env/loader monitor registry "
    "scheduler transport",
    "env": "api base env/check env/loader registry",
    "env/adapters": "api base env env/containment env/loader web",
    "aws": "api aws/cli aws/simulator aws/tasks backends/embedded backends/training base env "
    "env/containment "
    "env/server rollout web",
    "aws/episode": "api aws aws/cli aws/grading aws/real_aws aws/simulator aws/tasks base "
    "env/loader env/server",
    "aws/playground": "aws aws/episode aws/grading aws/simulator aws/tasks env/server web",
    "aws/server": "aws aws/episode aws/playground aws/real_aws aws/simulator aws/tasks env/server "
    "web",
    "aws/training": "api aws aws/episode aws/simulator aws/tasks base rollout",
    "aws/client": "api aws base env rollout",
    "environments": "api base env/loader",
    "tinker": "api backends/embedded backends/training base web",
}
"""Every folder of the product that holds modules, with the folders that it may import from. A row
names rows above it only, so no two rooms import each other, not even in a circle."""
TORCH_FREE = (
    "realhf/api",
    "realhf/base",
    "realhf/dataflow",
    "realhf/env",
    "realhf/environments",
    "realhf/aws",
    "realhf/monitor",
    "realhf/scheduler",
    "realhf/cluster",
    "realhf/launch",
    "realhf/transport",
    "realhf/trajectory",
    "realhf/view",
    "realhf/web",
    "experiments",
    "workers/master_worker.py",
    "workers/env_worker.py",
    "workers/trajectory_worker.py",
)
OF_EXTRAS = ("mcp", "mcp_types", "httpx2")
"""Packages of an extra that modules import at their top; other modules import these lazily."""
PROGRAMS = {"realhf/aws/evaluate.py"}
"""Commands that put parts of several rooms together, as the launcher does; nothing may import them.
So are modules called ``__main__``."""
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
READS_ENVIRONMENT = {
    "realhf/cluster/engines/slurm.py",  # whether it runs in a job, which Slurm says in no other way
    "realhf/backends/embedded/native_build.py",  # where programs of this user keep caches
    "realhf/aws/server_config.py",
    "realhf/aws/client/trl_tool.py",
    "realhf/aws/client/multi_turn_pool.py",
    "realhf/trajectory/http/config.py",
    "realhf/web/settings.py",
}


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imported_by(path: Path) -> tuple[str, ...]:
    """Full names of what a module imports, wherever it does."""
    return tuple(imported(tree(path)))


def imported(node: ast.AST) -> Iterator[str]:
    """Full names of what the code below ``node`` imports; relative imports do not exist in this
    house."""
    for item in statements(node):
        if isinstance(item, ast.Import):
            yield from (alias.name for alias in item.names)
        elif isinstance(item, ast.ImportFrom):
            assert item.level == 0, f"relative import in line {item.lineno}"
            yield from (f"{item.module}.{alias.name}" for alias in item.names)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The node and every statement below it; no expression holds one."""
    found = [node]
    for item in found:
        yield item
        found += [child for child in ast.iter_child_nodes(item) if isinstance(child, STATEMENTS)]


@cache
def room(name: str) -> str | None:
    """'api/config' for 'realhf.api.config.sections', 'workers' for 'workers.env_worker'; None for
    foreign packages."""
    first, *rest = name.split(".")
    if first in ("workers", "experiments", "configs"):
        return first
    if first != "realhf" or not rest:
        return None
    found = ""
    for depth in range(1, len(rest) + 1):
        if not any((ROOT / "realhf").joinpath(*rest[:depth]).glob("*.py")):
            break
        found = "/".join(rest[:depth])
    return found or rest[0]


def is_program(path: Path) -> bool:
    return path.name == "__main__.py" or path.relative_to(ROOT).as_posix() in PROGRAMS


def own_room(path: Path) -> str | None:
    return room(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def test_a_row_of_the_table_names_rows_above_it_only():
    above: set[str] = set()
    for name, others in ROOMS.items():
        assert set(others.split()) <= above, f"{name} names a room that stands below it, or none"
        above.add(name)


def test_every_room_has_a_row_and_every_row_a_room():
    rooms = {
        own_room(path)
        for path in modules("realhf")
        if path.name not in ("__init__.py",) and not is_program(path)
    }
    assert rooms == set(ROOMS)


@pytest.mark.nightly
def test_the_table_allows_no_more_than_is_used():
    used: dict[str, set[str]] = {name: set() for name in ROOMS}
    for path in modules("realhf"):
        if not is_program(path) and (own := own_room(path)) in used:
            used[own] |= {
                other for name in imported_by(path) if (other := room(name)) and other != own
            }
    assert {name: " ".join(sorted(others)) for name, others in used.items()} == ROOMS


@pytest.mark.slow
def test_arrows_point_one_way():
    for path in modules("realhf"):
        arrows_of_a_module(path)


def arrows_of_a_module(path: Path) -> None:
    own = own_room(path)
    assert (
        not {f"{name.rpartition('.')[0].replace('.', '/')}.py" for name in imported_by(path)}
        & PROGRAMS
    )
    if own not in ROOMS or is_program(path):
        return
    others = {name: other for name in imported_by(path) if (other := room(name)) and other != own}
    wrong = sorted(name for name, other in others.items() if other not in ROOMS[own].split())
    assert not wrong, (
        f"{path.relative_to(ROOT)}: {own} may import from {ROOMS[own] or 'no other room'}, not "
        f"{wrong}"
    )


@pytest.mark.parametrize("folder", ["realhf/dataflow", "realhf/rollout", "workers"])
def test_no_two_modules_import_each_other(folder: str):
    """Not even for type checking: what both need belongs into a module below them."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules(folder)
    }
    imports = {
        name: {full if full in paths else full.rpartition(".")[0] for full in imported_by(path)}
        for name, path in paths.items()
    }
    pairs = [
        (one, other)
        for one in paths
        for other in imports[one] & paths.keys()
        if one in imports[other]
    ]
    assert not pairs


def test_workers_and_experiments_import_realhf_but_not_the_launcher():
    for path in modules("workers", "experiments"):
        own = path.relative_to(ROOT).parts[0]
        others = {room(name) for name in imported_by(path)} - {None, own} - set(ROOMS)
        assert not others, f"{path.name} imports {others}"


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


@pytest.mark.slow
@pytest.mark.parametrize("prefix", TORCH_FREE)
def test_torch_is_not_imported_at_module_level(prefix: str):
    paths = [
        path
        for path in modules("realhf", "workers", "experiments")
        if path.relative_to(ROOT).as_posix().startswith(prefix)
    ]
    for path in paths:
        for node in tree(path).body:
            if isinstance(
                node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            ) or is_type_checking(node):
                continue
            heavy = [
                name for name in imported(node) if name.split(".")[0] in ("torch", "transformers")
            ]
            assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


@pytest.mark.slow
def test_torch_free_packages_really_are():
    """Imports every module of the packages in a fresh process: catches what arrives through
    others."""
    packages = [name.replace("/", ".") for name in TORCH_FREE if "." not in name]
    code = (
        "import importlib, pkgutil, sys\n"
        "for name in sys.argv[1:]:\n"
        "    package = importlib.import_module(name)\n"
        "    for found in pkgutil.walk_packages(getattr(package, '__path__', []), name + '.'):\n"
        "        if found.name.endswith(('.__main__', '.child')):\n"
        "            continue\n"
        "        try:\n"
        "            importlib.import_module(found.name)\n"
        "        except ModuleNotFoundError as error:\n"
        f"            if error.name not in {OF_EXTRAS}:\n"
        "                raise\n"
        "    assert 'torch' not in sys.modules, f'torch came in with {name}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *packages],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def environment_reads(path: Path) -> Iterator[int]:
    """Lines that ask for an environment variable. Handing an environment on to a child is not a
    read."""
    text = path.read_text(encoding="utf-8")
    if "getenv" not in text and "environ" not in text.replace("environment", ""):
        return  # What every such line names; to walk through all modules takes half a second.
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "os.getenv",
            "os.environ.get",
            "environ.get",
        ):
            yield node.lineno
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and (ast.unparse(node.value) in ("os.environ", "environ"))
        ):
            yield node.lineno


@pytest.mark.slow
def test_the_clients_of_the_aws_environment_need_no_server():
    """A trainer of another project imports them, and has installed no extra for that."""
    code = (
        "import pkgutil, sys, realhf.aws.client as clients\n"
        "for module in pkgutil.iter_modules(clients.__path__, 'realhf.aws.client.'):\n"
        "    __import__(module.name)\n"
        "found = {'fastapi', 'uvicorn', 'torch', 'ministack', 'realhf.env.server'} & "
        "set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_makes_no_graph_does_not_load_the_graph_library():
    """Clients of both servers, the servers, the kit for environments and the workers start without
    ``networkx``, which takes as long to import as all the rest of a client."""
    modules = (
        "realhf.trajectory.client",
        "realhf.aws.client.multi_turn_pool",
        "realhf.aws.client.grpo_pool",
        "realhf.aws.client.trl_tool",
        "realhf.env.__main__",
        "realhf.env.check",
        "realhf.trajectory.http.cli",
        "workers.env_worker",
        "workers.rollout_worker",
        "realhf.dataflow.model_host",
        "realhf.launch.__main__",
    )
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'networkx' not in sys.modules, f'networkx came in with {name}'\n"
        "importlib.import_module('realhf.api.graph')\n"
        "assert 'networkx' in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_environment_variables_are_read_in_the_configuration_layer_only():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules("realhf", "workers", "experiments")
        for line in environment_reads(path)
        if path.relative_to(ROOT).as_posix() not in READS_ENVIRONMENT
    ]
    assert not found


def test_no_module_is_named_after_nothing():
    names = {path.stem for path in modules("realhf", "workers", "experiments")}
    assert not names & {"utils", "common", "helpers", "misc"}


def test_the_checks_see_what_they_look_for(tmp_path: Path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import os\nfrom realhf.aws.simulator import pool\nx = os.environ['A'] + os.getenv('B', "
        "'')\n"
    )
    assert [room(name) for name in imported_by(bad)] == [None, "aws/simulator"]
    assert len(list(environment_reads(bad))) == 2
