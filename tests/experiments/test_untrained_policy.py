"""The policy that needs no demonstrations is made by a job, and found again."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.sft import Config, untrained_policy
from realhf.api.config import BuiltinModelConfig

TINY = BuiltinModelConfig(hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16)


def test_the_job_makes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(fileroot=str(tmp_path), builtin=TINY, seed=3)
    job = untrained_policy(config)
    assert job.artifact.parent == tmp_path / "warm_start" and job == untrained_policy(config)
    others = (replace(config, seed=4), replace(config, builtin=replace(TINY, num_layers=2)))
    assert len({job.artifact, *(untrained_policy(other).artifact for other in others)}) == 3
    out = tmp_path / "made"
    argv = [str(out) if text == "{artifact}" else text for text in job.argv]
    monkeypatch.setattr(sys, "argv", [job.module, *argv])
    importlib.import_module(job.module).main()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in out.iterdir()}
