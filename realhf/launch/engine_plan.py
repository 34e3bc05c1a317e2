"""What the engines that sample take of the GPUs' memory in the plan of ``mode=check``.

An engine gets a part of its GPU for keys and values, and episodes that do not fit wait. The plan
has what it gets, by the same arithmetic as when it starts. A vLLM server reserves all of that at
once, the embedded engine no more than its episodes need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from realhf.api.config import ConfigError, ExperimentConfig
from realhf.api.experiment import ExperimentSpec, ModelSpec
from realhf.base.engine_memory import (
    DEDICATED_FRACTION,
    SERVER_BYTES,
    SERVER_SHARE,
    SHARED_FRACTION,
    cache_in,
    describe_no_room,
    server_room,
)
from realhf.base.hf_config import ModelSize, weight_bytes
from realhf.launch.allocation import (
    GIB,
    KEY_VALUES,
    MemoryNeed,
    find_model_size,
    key_value_bytes,
    sampled_sessions,
)
from realhf.scheduler.machine import Machine

_SERVER_OF = "vllm of "
"""Prefix of the name of a server's process, before that of the model worker that starts it."""


def plan_engines(
    needs: Sequence[MemoryNeed],
    spec: ExperimentSpec,
    config: ExperimentConfig,
    gpus: Mapping[str, tuple[int, ...]],
    machine: Machine,
) -> list[MemoryNeed]:
    """Return the memory needs with those of engines as they will be: with the servers of a
    synchronous run, divided over the GPUs of a tensor-parallel server, and with the keys and values
    that an engine gets.

    Raises ConfigError for a server whose weights, or whose keys and values of a single episode, do
    not fit.
    """
    served = [*needs, *_plan_synchronous_servers(needs, spec, config)]
    divided = [part for need in served for part in _divide(need, spec, config, gpus, machine)]
    rooms = {
        (need.process, need.role, need.device): _find_room(need, divided, spec, config, machine)
        for need in divided
    }
    return [_bound(need, rooms, spec) for need in divided]


def _plan_synchronous_servers(
    needs: Sequence[MemoryNeed], spec: ExperimentSpec, config: ExperimentConfig
) -> Iterator[MemoryNeed]:
    """Yield the need of the vLLM server that a model worker of a synchronous run starts."""
    sessions = sampled_sessions(spec)
    for need in needs if spec.rollout is None and sessions else ():
        model = spec.models[need.role]
        size = find_model_size(model, config)
        starts = model.role == "actor" and _starts_server(model)
        if starts and size is not None:
            key_values = key_value_bytes(model, size, config, sessions)
            parts = {"weights": weight_bytes(size, model.dtype), KEY_VALUES: key_values}
            yield replace(need, process=f"{_SERVER_OF}{need.process}", bytes=parts)


def _starts_server(model: ModelSpec) -> bool:
    return model.engine.name == "vllm" and model.engine.vllm_url is None


def is_engine(need: MemoryNeed) -> bool:
    """Whether a need is that of a process that only samples."""
    return need.process.startswith(("generation/", _SERVER_OF))


def _divide(
    need: MemoryNeed,
    spec: ExperimentSpec,
    config: ExperimentConfig,
    gpus: Mapping[str, tuple[int, ...]],
    machine: Machine,
) -> Iterator[MemoryNeed]:
    """Yield the need of an engine on each of its GPUs, and any other need as it is."""
    model = spec.models[need.role]
    count = model.engine.tensor_parallel_size
    if not is_engine(need) or count == 1 or need.device is None:
        yield need
        return
    size = find_model_size(model, config)
    parts = need.bytes
    if parts is not None and size is not None:
        key_values = parts.get(KEY_VALUES, 0) // _count_key_value_parts(model, size)
        parts = {part: value // count for part, value in parts.items()} | {KEY_VALUES: key_values}
    worker = need.process.removeprefix(_SERVER_OF)
    for device in gpus.get(worker) or range(min(count, len(machine.gpus))):
        yield replace(need, device=device, bytes=parts)


def _count_key_value_parts(model: ModelSpec, size: ModelSize) -> int:
    """Return over how many GPUs a server divides the keys and values of a token. With more GPUs
    than heads of them, vLLM keeps the same heads on several."""
    return min(model.engine.tensor_parallel_size, size.key_value_heads)


def _bound(
    need: MemoryNeed,
    rooms: Mapping[tuple[str, str, int | None], int | None],
    spec: ExperimentSpec,
) -> MemoryNeed:
    """Return a need with the keys and values that its engine gets, and a server's also with what it
    computes with. A server has as many keys and values on each of its GPUs as fit on the one with
    the least room."""
    known = [
        room
        for (process, role, _), room in rooms.items()
        if (process, role) == (need.process, need.role) and room is not None
    ]
    if not known or not need.bytes:
        return need
    if _starts_server(spec.models[need.role]):
        parts = {**need.bytes, "activations": SERVER_BYTES, KEY_VALUES: max(0, min(known))}
        return replace(need, bytes=parts, is_server=True)
    return replace(need, bytes={**need.bytes, KEY_VALUES: min(need.bytes[KEY_VALUES], *known)})


def _find_room(
    need: MemoryNeed,
    needs: Sequence[MemoryNeed],
    spec: ExperimentSpec,
    config: ExperimentConfig,
    machine: Machine,
) -> int | None:
    """Return the bytes that the keys and values of an engine get on its GPU; None for a need
    without any, and if they are not known. Raises ConfigError."""
    if need.device is None or not need.bytes or not need.bytes.get(KEY_VALUES):
        return None
    gpu = machine.gpus[need.device]
    if gpu.total_bytes is None or gpu.free_bytes is None:
        return None
    there = [other for other in needs if other.device == need.device and other.bytes]
    trainers = [other.bytes for other in there if not is_engine(other) and other.bytes]
    loaded = _sum(trainers, "weights", "masters")
    first_update = _sum(trainers, "gradients", "moments")
    model = spec.models[need.role]
    weights = need.bytes["weights"] if is_engine(need) else 0
    share = model.engine.gpu_memory_utilization
    if not _starts_server(model):
        if model.engine.kv_cache_gib is not None:
            return None
        engines = [other.bytes for other in there if other.bytes and other.bytes.get(KEY_VALUES)]
        sampling = [other.bytes for other in there if is_engine(other) and other.bytes]
        free = gpu.free_bytes - _sum(sampling, "weights") - loaded - first_update
        left = 1 - (SHARED_FRACTION if trainers else DEDICATED_FRACTION)
        # Each engine takes its fraction of what those before it have left.
        return max(0, int(free * (1 - left ** len(engines)) / len(engines)))
    if share is not None or not trainers:
        room = int(gpu.total_bytes * (share or SERVER_SHARE)) - weights - SERVER_BYTES
    else:
        # A server knows the trainer of its own model only. What other processes have on the GPU may
        # not be there yet when it starts, and the moments of other roles are not.
        own = [other for other in needs if not is_engine(other) and other.role == need.role][:1]
        worker = need.process.removeprefix(_SERVER_OF)
        before = [other for other in there if other.process == worker and not is_engine(other)]
        loaded = _sum([each.bytes for each in before or own if each.bytes], "weights", "masters")
        first_update = _sum([each.bytes for each in own if each.bytes], "gradients", "moments")
        whole = server_room(
            gpu.free_bytes, gpu.free_bytes, loaded=loaded, first_update=first_update
        )
        if whole <= weights:
            raise ConfigError(
                describe_no_room(
                    model.role,
                    total=gpu.total_bytes,
                    free=gpu.free_bytes,
                    trainer=loaded + first_update,
                    room=whole,
                    needed=weights,
                )
            )
        room = cache_in(whole - weights)
    _check_longest(need, model, config, room)
    return room


def _check_longest(need: MemoryNeed, model: ModelSpec, config: ExperimentConfig, room: int) -> None:
    """Raise ConfigError for a server whose keys and values of a single episode do not fit into
    ``room``: vLLM does not start then."""
    size = find_model_size(model, config)
    if size is None or not _starts_server(model):
        return
    longest = key_value_bytes(model, size, config, 1) // _count_key_value_parts(model, size)
    if longest > room:
        raise ConfigError(
            f"rollout.max_total_tokens={config.rollout.max_total_tokens}: keys and values of one "
            f"episode take {longest / GIB:.3g} GiB of GPU {need.device}, and vLLM has "
            f"{max(room, 0) / GIB:.3g} for them besides its weights of "
            f"{(need.bytes or {}).get('weights', 0) / GIB:.3g}; lower it, give the server a GPU of "
            "its own (allocation.gpus) or several (engine.tensor_parallel_size), or take a smaller "
            "model"
        )


def _sum(parts: Sequence[Mapping[str, int]], *names: str) -> int:
    return sum(each.get(name, 0) for each in parts for name in names)
