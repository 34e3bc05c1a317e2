"""Code of an environment that ends its process, in a process that plays episodes."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys
from realhf.api.environment import AssistantMessage, EnvironmentFailure
from realhf.base.loop_thread import LoopThread
from realhf.base.process import block_exit_in_threads
from realhf.env.loader.load import build_environment

async def play():
    environment = build_environment(sys.argv[1], {}).make("")
    try:
        await environment.reset({"prompt": "Say a number."}, seed=7)
        await environment.step(AssistantMessage("no"))
    except EnvironmentFailure as error:
        return f"{error.kind}: {error}"

block_exit_in_threads()
print(LoopThread("episodes", instead="").call(play(), 20.0))
"""
HOUSE = """
import os

class House:
    def reset(self, **row):
        return "Say a number."

    def number(self, value: int) -> str:
        '''
        Say it.

        Args:
            value: the number
        '''
        return "no"

    def get_reward(self):
        os._exit(CODE)
"""
VERIFIER = """
import os

def tasks(split):
    return [{"prompt": "Say a number.", "n": 1}]

def house(completion, **row):
    os._exit(CODE)
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize(("text", "name"), [(HOUSE, "House"), (VERIFIER, "house")])
def test_os_exit_is_a_failure_of_the_episode_with_a_name(
    tmp_path: Path, text: str, name: str, code: int
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(text.replace("CODE", str(code)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{mine}:{name}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.startswith("internal: ")
        and f"os._exit({code}) would end its process" in done.stdout
    )
    assert name in done.stdout and "mine.py, line" in done.stdout
