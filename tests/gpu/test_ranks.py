"""A role on one rank over NCCL: the code of several ranks, as far as one GPU can run it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.one_rank import outcome

DEADLINE_S = 180.0


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_one_rank_trains_as_an_engine_alone(
    device: torch.device, tmp_path: Path, backend: str
) -> None:
    """In a process of its own: a process group stays until its process ends."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=outcome, args=(there, device.type, backend, str(tmp_path)), daemon=True
    )
    process.start()
    try:
        assert here.poll(DEADLINE_S), f"the rank did not end within {DEADLINE_S:g} s"
        told: dict[str, Any] = here.recv()
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
    assert "error" not in told, told.get("error")
    assert device.type == "cpu" or "cuda:nccl" in told["backends"]
    assert told["losses"] == pytest.approx(told["expected"], rel=1e-4)
    assert told["resumed"] == pytest.approx(told["losses"][-1:], rel=1e-4)
    assert told["digests"] == told["held"], "a checkpoint restores the weights to the bit"
