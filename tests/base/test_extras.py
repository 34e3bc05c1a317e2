"""What is missing is named with the command that installs it, and the parts that need little ask
for little."""

import subprocess
import sys

import pytest

from realhf.base import installation
from realhf.base.installation import IMPORT_ROOT

HEAVY = ("torch", "transformers", "hydra", "matplotlib")


def test_the_command_installs_into_the_checkout_and_never_a_strangers_distribution(
    tmp_path, monkeypatch
):
    """It used to name the distribution that somebody else has on the package index."""
    monkeypatch.chdir(IMPORT_ROOT)
    assert installation.install_command("wandb") == "pip install -e '.[wandb]'"
    monkeypatch.chdir(tmp_path)
    assert installation.install_command("wandb") == f"pip install -e '{IMPORT_ROOT}[wandb]'"
    monkeypatch.setattr(installation, "IMPORT_ROOT", tmp_path)
    assert installation.install_command("wandb") == "pip install 'realhf-agents[wandb]'"


def test_a_missing_package_names_the_extra():
    with pytest.raises(
        ModuleNotFoundError,
        match=r"^not installed here: no_such; the extra 'x' .*: pip install -e '",
    ):
        installation.require_modules("x", "sys", "no_such")
    installation.require_modules("x", "sys")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "further", "extra"),
    [
        ("workers.env_worker", (), ""),
        ("realhf.env.__main__", ("fastapi", "ministack", "awscli"), ""),
        ("realhf.aws.client.aws_env", ("fastapi", "ministack", "awscli"), ""),
        ("realhf.trajectory.client", ("fastapi", "ministack", "awscli"), ""),
        ("realhf.trajectory.http.server", ("ministack", "awscli"), ""),
        ("workers.env_worker", ("fastapi",), "env"),
        ("realhf.aws.simulator.pool", ("ministack",), "env"),
        ("realhf.trajectory.http.cli", ("uvicorn",), "server"),
        ("realhf.view.__main__", ("uvicorn",), "server"),
        ("realhf.launch.__main__", (), "train"),
        ("realhf.backends.training.torch_engine", (), "train"),
    ],
)
def test_a_part_starts_with_its_extra_alone(module, further, extra):
    """What the extra ``train`` brings is hidden, and ``further``: the part is imported, or names
    the ``extra``."""
    hide = (
        "import importlib.abc, sys\n"
        "class Hidden(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {(*HEAVY, *further)!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name in {(*HEAVY, *further)!r} else "
        f"found(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}import {module}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    last = done.stderr.strip().rpartition("\n")[2]
    assert (done.returncode == 0) is (not extra), done.stderr[-2000:]
    assert not extra or f"the extra '{extra}' contains it: pip install -e '" in last, last
