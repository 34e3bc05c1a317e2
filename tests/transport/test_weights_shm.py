"""Weights by shared memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realhf.transport.weights.errors import WeightsError, WeightsGone
from realhf.transport.weights.publisher import WeightPublisher
from realhf.transport.weights.receiver import receive

torch.set_num_threads(1)


def test_round_trip(tmp_path: Path) -> None:
    publisher = WeightPublisher("run", "trainer", tmp_path)
    sent = {"a": torch.randn(3, 5), "b": torch.arange(7).to(torch.bfloat16), "c": torch.tensor(3)}
    sent["d"] = torch.empty(0, 2)
    got = receive(publisher.publish(1, sent), 1.0)
    assert list(got) == list(sent)
    assert all(torch.equal(got[k], sent[k]) and got[k].dtype == sent[k].dtype for k in sent)
    publisher.close()


def test_old_versions_are_gone_and_damage_is_refused(tmp_path: Path) -> None:
    publisher = WeightPublisher("run", "trainer", tmp_path)
    manifests = [publisher.publish(version, {"a": torch.randn(100)}) for version in range(3)]
    with pytest.raises(WeightsGone, match="version 0 by shm"):
        receive(manifests[0], 1.0)
    with pytest.raises(WeightsError, match="version 2 by shm: checksum"):
        receive(replace(manifests[2], checksum="0" * 32), 1.0)
    receive(manifests[1], 1.0)
    publisher.close()
    with pytest.raises(WeightsGone):
        receive(manifests[2], 1.0)
