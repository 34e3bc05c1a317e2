"""How much of a GPU a generation worker takes: less where a trainer computes on the same one."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from workers import generation_worker

APART = {"model_worker/0": 0, "generation/0": 1}


@pytest.fixture(scope="module")
def plan(tmp_path_factory, tiny_policy):
    given = ["experiment=grpo_async", "env=sql", f"actor.path={tiny_policy}"]
    built = build_experiment(compose_config([*given, f"fileroot={tmp_path_factory.mktemp('runs')}"]))
    built.spec.run_dir.mkdir(parents=True)
    return built.plan(built.spec, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "flags", "shared"),
    [
        ({}, (), True),
        (APART, (), False),
        ({}, ("--beside-trainer", "no"), False),
        (APART, ("--beside-trainer", "yes"), True),
    ],
)
def test_who_dealt_out_the_gpu_knows_better_than_the_plan(plan, monkeypatch, gpus, flags, shared):
    """A host agent deals out GPUs of its host, of which the plan knows nothing: every engine there took half of what
    was free on a GPU of its own, and four fifths of a trainer's where the plan named that one."""
    replace(plan, gpus=gpus).write()
    seen: list[bool] = []

    def make(*given, **more):
        seen.append(more["shared"])
        raise RuntimeError("it is enough to know")

    monkeypatch.setattr(generation_worker, "make_streaming_generator", make)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # a worker handles SIGTERM, a test does not
    words = ("--run-dir", str(plan.spec.run_dir), "--run-id", "r", "--master", "tcp://127.0.0.1:1", "--index", "0")
    monkeypatch.setattr(sys, "argv", ["generation_worker", *words, *flags])
    assert generation_worker.main() == 1
    assert seen == [shared]
