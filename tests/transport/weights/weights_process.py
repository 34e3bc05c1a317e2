"""Processes that publish or receive weights: forked from one that has imported torch, a line on its
stdin each. They connect to the Unix socket named on the command line and take a command per line of
JSON, an answer per line."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from realhf.api.generation import WeightsManifest
from realhf.base.messages import from_payload, to_payload
from realhf.transport.weights import WeightPublisher, WeightsError, receive


def values(seed: int) -> dict[str, torch.Tensor]:
    """4 MB that another process can make again."""
    numbers = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(125, 80, generator=numbers) for i in range(100)}


def publish(medium: Any, folder: str, version: int) -> dict[str, Any]:
    publisher = WeightPublisher("run", "model_worker/0", Path(folder), medium)
    held.append(publisher)
    return to_payload(publisher.publish(version, values(version)))


def take(manifest: dict[str, Any]) -> str:
    """``same``, ``other`` or the error."""
    try:
        tensors = receive(from_payload(WeightsManifest, manifest), 60.0)
    except WeightsError as error:
        return f"{type(error).__name__}: {error}"
    held.append(tensors)
    expected = values(manifest["version"])
    same = list(tensors) == list(expected) and all(
        torch.equal(tensors[k], expected[k]) for k in expected
    )
    return "same" if same else "other"


def serve(path: str) -> None:
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw") as lines:
            for line in lines:
                name, *arguments = json.loads(line)
                answer = {"publish": publish, "take": take}[name](*arguments)
                lines.write(json.dumps(answer) + "\n")
                lines.flush()


held: list[Any] = []

if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in sys.stdin:
        if os.fork() == 0:
            serve(sys.argv[1])
            os._exit(0)
