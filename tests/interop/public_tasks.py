"""Plays the tasks of the public AWS RL environment on our server, by its own client, with its own
solutions.

    python -m tests.interop.public_tasks CHECKOUT [--python PYTHON]

CHECKOUT is a folder with that project; PYTHON an interpreter with openenv-core, pydantic, pyyaml
and pytest (``make test-openenv`` makes ``.venv-openenv-core``). Every task has to be solved by its
own solution or refused with a reason: a task that is accepted and cannot be solved teaches nothing
and says nothing. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from realhf.aws.server.program import EnvServerProcess

HERE = Path(__file__).resolve().parent
VERDICTS = ("solved", "refused", "unsolved")


def play_all(checkout: Path, python: Path) -> list[dict]:
    """What came of each task; raises CalledProcessError when the client itself failed."""
    with EnvServerProcess(
        1, "--web", "off", "--max-steps", "60", "--enable-chaos", "false"
    ) as server:
        command = [str(python), str(HERE / "public_client.py"), str(checkout), server.url]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=600, check=True, cwd=HERE
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "--python", type=Path, default=HERE.parent.parent / ".venv-openenv-core/bin/python"
    )
    options = parser.parse_args()
    played = play_all(options.checkout.resolve(), options.python)
    for task in played:
        if task["verdict"] != "solved":
            print(f"{task['tier']:13}{task['task_id']:4}  {task['verdict']:9} {task['reason']}")
        if task["verdict"] == "unsolved":
            for command, success, error in task["commands"]:
                print(
                    f"      {'ok    ' if success else 'failed'} {command[:150]}\n             "
                    f"{error}"[:400]
                )
    counts = Counter((task["tier"], task["verdict"]) for task in played)
    print(f"\n{'tier':13}" + "".join(f"{verdict:>10}" for verdict in VERDICTS))
    for tier in dict.fromkeys(task["tier"] for task in played):
        print(f"{tier:13}" + "".join(f"{counts[tier, verdict]:10}" for verdict in VERDICTS))
    return 1 if any(task["verdict"] == "unsolved" for task in played) or not played else 0


if __name__ == "__main__":
    sys.exit(main())
