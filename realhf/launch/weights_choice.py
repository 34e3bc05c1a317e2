"""Check of weight updates over NCCL, which need GPUs of their own for the trainer and servers."""

from __future__ import annotations

from collections.abc import Mapping

from realhf.api.config import ConfigError
from realhf.api.experiment import ExperimentSpec

OPTION = "async_rl.weights"
"""Option that names a medium."""
NCCL = "nccl"
"""Medium of broadcasts from GPU to GPU."""


def check_medium(
    spec: ExperimentSpec,
    gpus: Mapping[str, tuple[int, ...]],
    *,
    gpu_count: int,
    several_hosts: bool,
) -> None:
    """Raise ConfigError if weights are to go over NCCL and cannot. ``gpus`` are those of each
    worker."""
    rollout = spec.rollout
    if rollout is None or rollout.options.weights != NCCL:
        return
    url = spec.models[rollout.role].engine.vllm_url
    problem = _find_problem(spec, gpus, gpu_count, elsewhere=several_hosts or url is not None)
    if problem:
        raise ConfigError(f"{OPTION}={NCCL}: {problem}; leave the option out")


def _find_problem(
    spec: ExperimentSpec,
    gpus: Mapping[str, tuple[int, ...]],
    gpu_count: int,
    *,
    elsewhere: bool,
) -> str:
    """Return why weights cannot go over NCCL; "" if they can, or if that is not known here because
    workers or servers are on other hosts (``elsewhere``)."""
    assert spec.rollout is not None
    model = spec.models[spec.rollout.role]
    if model.engine.name != "vllm":
        return (
            f"engine.name={model.engine.name} has its weights in the generation workers, and only "
            "vLLM takes them over NCCL"
        )
    if elsewhere:
        return ""
    if gpu_count == 0:
        return "NCCL sends from GPU to GPU, and no GPU of CUDA is visible here"
    if not gpus:
        return "the trainer and the servers share GPU 0, and NCCL needs a GPU for each"
    trainers = {
        gpu: name for name, own in gpus.items() if name.startswith("model_worker/") for gpu in own
    }
    taken: dict[int, str] = dict(trainers)
    for name in sorted(gpus):
        if not name.startswith("generation/"):
            continue
        for gpu in gpus[name]:
            if gpu in taken:
                return f"{taken[gpu]} and {name} share GPU {gpu}, and NCCL needs a GPU for each"
            taken[gpu] = name
    return ""


def describe_medium(spec: ExperimentSpec, gpus: Mapping[str, tuple[int, ...]]) -> str:
    """Return a line that says from which GPU weights go to which; "" for other media."""
    if spec.rollout is None or spec.rollout.options.weights != NCCL:
        return ""
    trainer = f"model_worker/{spec.models[spec.rollout.role].workers[0]}"
    served = sorted(gpu for name, own in gpus.items() if name[:11] == "generation/" for gpu in own)
    if trainer not in gpus or not served:
        return "weights: over NCCL"
    return f"weights: over NCCL, from GPU {gpus[trainer][0]} to {', '.join(map(str, served))}"
