"""What the owner of the project fixed: packages, folders, commands, names of the design, and the
tests of each call.

These points are the owner's decisions. No clean-up removes, renames or replaces one of them,
however little it may seem to do: a package with a smaller substitute, a verb with a better word, a
test that another one covers. Whoever thinks that one should go asks the owner; until then this file
fails. It only ever grows.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from realhf.aws.client.grpo_pool import GrpoPool
from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool, pool_arguments
from realhf.aws.server_config import AwsServerConfig
from realhf.aws.simulator.pool import EXHAUSTED, MiniStackPool
from realhf.data.stream_dataset import StreamDataset
from realhf.dataflow.buffer import AsyncIOSequenceBuffer
from realhf.dataflow.function_executor import FunctionExecutor
from realhf.dataflow.model_function_call import ModelFunctionCall
from realhf.trajectory.http.config import TrajectoryConfig
from realhf.trajectory.http.server import create_app

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("realhf", "workers", "experiments")
PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "pyzmq": "zmq",
    "msgpack": "msgpack",
    "networkx": "networkx",
    "omegaconf": "omegaconf",
    "websockets": "websockets",
}
"""Distribution and the name that it is imported by."""
FOLDERS = ("realhf", "workers", "configs", "experiments", "tests")
FILES = ("setup.py", "README.md", "Makefile", ".ci/run")
COMMANDS = ("aws-env", "run-api")
DESIGN = {
    AsyncIOSequenceBuffer: ("put_batch", "get_batch_for_rpc", "amend_batch"),
    FunctionExecutor: ("load_data", "execute_step"),
    ModelFunctionCall: ("run",),
    StreamDataset: (),
    MiniStackPool: ("acquire", "release"),
    MultiTurnEnvPool: ("run_group", "reset_group", "run_group_step", "close"),
    GrpoPool: ("connect", "close", "run_group", "reset_group", "record_group_result"),
}
"""Classes by their names, and the methods of each."""
NAMES = (
    "AsyncIOSequenceBuffer",
    "FunctionExecutor",
    "ModelFunctionCall",
    "StreamDataset",
    "MiniStackPool",
    "MultiTurnEnvPool",
    "GrpoPool",
)
ENDPOINTS = {
    ("GET", "/"),
    ("POST", "/register"),
    ("GET", "/wandb_info"),
    ("GET", "/info"),
    ("GET", "/status"),
    ("POST", "/register-env"),
    ("POST", "/disconnect-env"),
    ("GET", "/status-env"),
    ("POST", "/scored_data"),
    ("POST", "/scored_data_list"),
    ("GET", "/batch"),
    ("GET", "/latest_example"),
    ("GET", "/reset_data"),
}
"""The thirteen endpoints of the trajectory server."""
CALLS = ("actor_gen", "ref_inf", "rew_inf", "actor_train", "actor_inf", "critic")
"""Model function calls that have tests of their own, each alone on a real model worker."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def requirements() -> frozenset[str]:
    """Every requirement in a list of ``setup.py``, for whatever extra, without its version."""
    lists = [node for node in ast.walk(tree("setup.py")) if isinstance(node, ast.List)]
    texts = [
        str(node.value) for found in lists for node in found.elts if isinstance(node, ast.Constant)
    ]
    return frozenset(re.split(r"[\s\[<>=;~!]", text)[0].lower() for text in texts)


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


@cache
def product() -> str:
    """The text of the whole product."""
    paths = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 100
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


@pytest.mark.parametrize(("distribution", "module"), PACKAGES.items())
def test_a_package_is_required_pinned_and_imported(distribution: str, module: str) -> None:
    """To be required alone is not enough: the product is built on these packages."""
    assert distribution in requirements()
    assert re.search(
        rf"^{distribution}==", (ROOT / "constraints.txt").read_text(), re.MULTILINE | re.IGNORECASE
    )
    assert re.search(rf"^\s*(import|from) {module}\b", product(), re.MULTILINE)


def test_the_top_level_is_the_owners() -> None:
    """Folders, files and the command of continuous integration."""
    assert [name for name in FOLDERS if not (ROOT / name).is_dir()] == []
    assert [name for name in FILES if not (ROOT / name).is_file()] == []
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
        "testpaths"
    ] == ["tests"]


def test_the_commands_are_there() -> None:
    """Console commands, the launcher as a module, the main job, and the targets of make."""
    setup = (ROOT / "setup.py").read_text()
    assert [name for name in COMMANDS if f'"{name}=' not in setup] == []
    assert (ROOT / "realhf" / "launch" / "__main__.py").is_file()
    assert (ROOT / "configs" / "experiment" / "grpo_aws.yaml").is_file()
    makefile = (ROOT / "Makefile").read_text()
    assert [
        name
        for name in ("run", "train", "test")
        if not re.search(rf"^{name}:", makefile, re.MULTILINE)
    ] == []


@pytest.mark.parametrize("cls", DESIGN, ids=lambda cls: cls.__name__)
def test_a_class_of_the_design_has_its_methods(cls: type) -> None:
    """Own or inherited; a name that is bound to something else than a function does not count."""
    assert cls.__name__ in NAMES and len(DESIGN) == len(NAMES)
    assert [name for name in DESIGN[cls] if not inspect.isfunction(getattr(cls, name, None))] == []


def test_the_trajectory_server_has_its_thirteen_endpoints() -> None:
    """By method and path, in the application that is served."""
    assert len(ENDPOINTS) == 13
    app = create_app(TrajectoryConfig(store="memory"))
    served = {
        (method.upper(), path)
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    }
    assert ENDPOINTS - served == set()


def test_words_that_clients_rely_on() -> None:
    """The text of an exhausted pool, and the variables of server and trainer."""
    assert EXHAUSTED == "MiniStack pool exhausted"
    assert AwsServerConfig.variable("backend_type") == "BACKEND_TYPE"
    assert AwsServerConfig.variable("pool_size") == "AWS_RL_ENV_POOL_SIZE"
    given = pool_arguments({"NUM_GENERATIONS": "3", "MAX_TURNS": "4", "MAX_TOTAL_TOKENS": "5"})
    assert {3, 4, 5} <= set(given.values())


@pytest.mark.parametrize("call", CALLS)
def test_a_model_function_call_has_tests_of_its_own(call: str) -> None:
    """Each call of a graph alone, on a real model worker, over the RPC: this is how the owner uses
    the project."""
    found = [
        node.name
        for node in ast.walk(tree(f"tests/mfc/test_{call}.py"))
        if isinstance(node, FUNCTIONS)
    ]
    assert [name for name in found if name.startswith("test_")]
