"""Refuses an optimizer whose moments would be moved from a memory to the same memory."""

from __future__ import annotations

from realhf.api.config import ConfigError
from realhf.api.experiment import ExperimentSpec
from realhf.api.parallel import SHARDED
from realhf.scheduler.gpus import visible_gpus


def check_offload(spec: ExperimentSpec, there: int | None = None) -> None:
    """Raise ConfigError for a role with ``optimizer.offload`` that trains on the CPU, or whose backend cuts its moments
    over workers. ``there``: the number of GPUs (None: this process counts those that it sees)."""
    for model in spec.models.values():
        if not (model.trainable and model.optimizer is not None and model.optimizer.offload):
            continue
        option = f"{model.role}.optimizer.offload=true"
        device = str(model.backend_args.get("device", "auto"))
        gpus = len(visible_gpus()) if there is None else there
        if device.startswith("cpu") or (device == "auto" and not gpus):
            raise ConfigError(
                f"{option}: has no effect on the CPU, where {model.role} trains (experiment {spec.name}, {gpus} GPUs "
                "are visible here): moments are in the memory of the host already"
            )
        if model.backend == SHARDED:
            raise ConfigError(
                f"{option}: backend {SHARDED} cuts moments over workers and does not offload them; use torch or ddp"
            )
