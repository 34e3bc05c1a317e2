"""Plays one episode against the environment server with nothing but JSON over a WebSocket.

    python examples/environment_over_the_wire.py                          # starts a server of its own, and ends it
    python examples/environment_over_the_wire.py http://127.0.0.1:8100    # plays on one that runs (`aws-env`)

Nothing of this project is used on the client's side, so any language with a WebSocket can do the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from realhf.aws.server.program import EnvServerProcess

LIST_OBJECTS = 1
"""A task of the warmup tier: list the objects of the one bucket that the account holds."""

Ask = Callable[..., dict[str, Any]]


def play(url: str) -> float:
    """Play the task once, print what happens, and return the return of the episode: the sum of its rewards."""
    with connect(url.replace("http", "ws", 1) + "/ws", proxy=None) as socket:

        def ask(kind: str, **data: Any) -> dict[str, Any]:
            socket.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(socket.recv(timeout=60))
            if reply["type"] == "error":
                raise RuntimeError(f"{reply['data']['code']}: {reply['data']['message']}")
            return reply["data"]

        return episode(ask)


def episode(ask: Ask) -> float:
    """The agent: it looks which bucket there is, then lists what is in it."""
    result = ask("reset", task_id=LIST_OBJECTS, seed=3)
    print("task:", result["observation"]["task"]["description"])
    total, command = 0.0, "aws s3api list-buckets --output json"
    while not result["done"]:
        result = ask("step", command=command)
        seen = result["observation"]
        total += result["reward"]
        print(f"$ {command}\n  success {seen['command_success']}, reward {result['reward']}, done {result['done']}")
        if not seen["command_success"]:
            raise RuntimeError(seen["error"])
        if not result["done"]:
            bucket = json.loads(seen["command_output"])["Buckets"][0]["Name"]
            command = f"aws s3api list-objects-v2 --bucket {bucket}"
    print(f"return {total}")
    return total


def main(arguments: list[str]) -> None:
    """Play on the server that was named, or on one that lives as long as the episode."""
    if arguments:
        try:
            play(arguments[0])
        except (OSError, ValueError, WebSocketException) as error:
            sys.exit(f"{arguments[0]}: no server plays there: {error}")
        return
    with EnvServerProcess(1) as server:
        play(server.url)


if __name__ == "__main__":
    main(sys.argv[1:])
