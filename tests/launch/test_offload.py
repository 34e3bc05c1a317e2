"""Moments are offloaded from GPUs only, by the backends that can."""

import pytest

from realhf.api.config import ConfigError
from realhf.launch.allocation import check_offload
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.scheduler import gpus


def built(*options):
    return build_experiment(compose_config(["experiment=ppo", "env=countdown", *options])).spec


@pytest.mark.nightly
@pytest.mark.slow
def test_without_a_gpu_it_is_refused_for_every_role_and_with_one_only_where_it_cannot_be(monkeypatch):
    monkeypatch.setattr("realhf.launch.allocation.visible_gpus", lambda: ())
    for option in ("actor.optimizer.offload", "critic.optimizer.offload", "warm_start.optimizer.offload"):
        with pytest.raises(ConfigError, match=r"optimizer.offload=true: has no effect on the CPU"):
            built(f"{option}=true")
    monkeypatch.setattr("realhf.launch.allocation.visible_gpus", lambda: ("0",))
    spec = built("actor.optimizer.offload=true")
    assert spec.models["actor"].optimizer is not None and spec.models["actor"].optimizer.offload
    with pytest.raises(ConfigError, match="0 GPUs are visible"):
        check_offload(spec, there=0)
    cut = ("actor.backend=fsdp2", "actor.workers=[0,1]", "warm_start.optimizer.offload=false")
    monkeypatch.setattr(gpus, "DRIVER", gpus.Path("/nowhere"))
    with pytest.raises(ConfigError, match="backend fsdp2 cuts moments over workers"):
        built("actor.optimizer.offload=true", *cut)
