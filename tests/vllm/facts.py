"""What this project takes for granted about vLLM, each fact with the code that needs it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from realhf.backends.vllm import server
from realhf.backends.vllm.broadcast.payloads import build_init_info, build_update_info
from realhf.backends.vllm.server import VllmOptions
from tests.vllm.sources import VllmSources

WORKER = "v1/worker/gpu_worker.py"
NCCL = "distributed/weight_transfer/nccl_engine.py"
COMMON = "distributed/weight_transfer/nccl_common.py"
PYNCCL = "distributed/device_communicators/pynccl.py"
BROADCAST_PY = "realhf/backends/vllm/broadcast/__init__.py"
IPC = "distributed/weight_transfer/ipc_engine.py"
SERVER_PY = "realhf/backends/vllm/server.py"
EXTENSION_PY = "realhf/backends/vllm/extension.py"
API_PY = "realhf/backends/vllm/api.py"


@dataclass(frozen=True)
class Fact:
    """Something that must be so in the sources of vLLM."""

    name: str
    """What it is about."""
    needed_by: str
    """File of this project that relies on it."""
    find_problem: Callable[[VllmSources], str]
    """Returns what is wrong; "" if the fact holds."""


def _flag_names() -> set[str]:
    """Flags of every server that we start, without ``no-``."""
    everything = VllmOptions(
        max_model_len=8, kv_cache_bytes=1, tensor_parallel_size=2, dtype="bfloat16"
    )
    share = VllmOptions(cuda=True, gpu_memory_utilization=0.5)
    commands = [server._build_command("vllm", "model", 1, each) for each in (everything, share)]
    flags = {word for words in commands for word in words if word.startswith("--")}
    assert len(flags) > 15
    return {flag.removeprefix("--").removeprefix("no-") for flag in flags}


def _variable_names(folder: Path) -> set[str]:
    """Environment variables of vLLM that we set."""
    options = VllmOptions(runner="v2", threads=1)
    names = {name for name in server._build_environment(options, folder) if name[:5] == "VLLM_"}
    assert "VLLM_USE_V2_MODEL_RUNNER" in names
    return names


def _has_flag(sources: VllmSources, flag: str) -> str:
    field = flag.replace("-", "_")
    declared = rf'^\s+"--{flag}"|\("--{flag}"|^    {field} *:'
    text = sources.text("engine/arg_utils.py") + sources.texts("entrypoints/")
    return "" if re.search(declared, text, re.MULTILINE) else f"`vllm serve` has no --{flag}"


def _has_variable(sources: VllmSources, name: str) -> str:
    known = f'"{name}": lambda' in sources.text("envs.py")
    return "" if known else f"vllm/envs.py does not know {name}"


def _has_endpoint(sources: VllmSources, verb: str, path: str) -> str:
    declared = rf'@router\.{verb}\(\s*"{path}"|add_api_route\(\s*"{path}"'
    known = re.search(declared, sources.texts("entrypoints/"))
    return "" if known else f"no server of vLLM has {verb} {path}"


def _says(file: str, path: str, *patterns: str) -> Callable[[VllmSources], str]:
    """The code of a function contains every pattern."""

    def find_problem(sources: VllmSources) -> str:
        code = sources.source(file, path)
        missing = [pattern for pattern in patterns if not re.search(pattern, code, re.DOTALL)]
        if not code:
            return f"vllm/{file} has no {path}"
        return f"vllm/{file}: {path} does not say {missing}" if missing else ""

    return find_problem


def _takes(file: str, path: str, *names: str) -> Callable[[VllmSources], str]:
    """A function has these parameters."""

    def find_problem(sources: VllmSources) -> str:
        actual = sources.parameters(file, path)
        return "" if set(names) <= set(actual) else f"vllm/{file}: {path} takes {actual}"

    return find_problem


def _has_fields(file: str, name: str, sent: Iterable[str]) -> Callable[[VllmSources], str]:
    """A dataclass has the fields that we send, and all others have a default."""

    def find_problem(sources: VllmSources) -> str:
        fields = sources.fields(file, name)
        unknown = sorted(set(sent) - fields.keys())
        left_out = sorted(field for field in fields.keys() - set(sent) if not fields[field])
        if not fields:
            return f"vllm/{file} has no dataclass {name}"
        if unknown or left_out:
            return f"vllm/{file}: {name} has no {unknown}, and needs {left_out}"
        return ""

    return find_problem


ENDPOINTS: Mapping[str, str] = {
    "/inference/v1/generate": "post",
    "/inference/v1/abort_requests": "post",
    "/pause": "post",
    "/resume": "post",
    "/collective_rpc": "post",
    "/update_weight_version": "post",
    "/server_info": "get",
    "/v1/models": "get",
}
"""Endpoints that we call, and how."""


def list_facts(folder: Path) -> Iterator[Fact]:
    """All facts; ``folder`` is any folder."""
    for flag in sorted(_flag_names()):
        yield Fact(f"--{flag}", SERVER_PY, lambda s, flag=flag: _has_flag(s, flag))
    for name in sorted(_variable_names(folder)):
        yield Fact(name, SERVER_PY, lambda s, name=name: _has_variable(s, name))
    for path, verb in ENDPOINTS.items():
        yield Fact(path, API_PY, lambda s, verb=verb, path=path: _has_endpoint(s, verb, path))
    yield Fact(
        "a worker knows its runner",
        EXTENSION_PY,
        _says(WORKER, "Worker.__init__", r"self\.use_v2_model_runner = "),
    )
    yield Fact(
        "VLLM_USE_V2_MODEL_RUNNER chooses the runner",
        SERVER_PY,
        _says("config/vllm.py", "VllmConfig.use_v2_model_runner", "envs.VLLM_USE_V2_MODEL_RUNNER"),
    )
    yield Fact(
        "head_dtype is an override of the model's configuration",
        SERVER_PY,
        _says("config/model.py", "_get_head_dtype", "'head_dtype'"),
    )
    yield Fact(
        "the worker has the dtype of the head",
        EXTENSION_PY,
        _says("config/model.py", "ModelConfig.head_dtype", "supported_dtypes"),
    )
    for runner in ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"):
        names = ("weights_iterator", "weights_path")
        check = _takes(runner, "GPUModelRunner.reload_weights", *names)
        yield Fact(f"reload_weights of {runner}", EXTENSION_PY, check)
        check = _takes(runner, "GPUModelRunner.get_model", "self")
        yield Fact(f"get_model of {runner}", EXTENSION_PY, check)
    for method, names in {
        "reload_weights": ("args", "kwargs"),
        "init_weight_transfer_engine": ("init_info",),
        "start_weight_update": (),
        "update_weights": ("update_info",),
        "finish_weight_update": (),
    }.items():
        check = _takes(WORKER, f"Worker.{method}", "self", *(n for n in names if n[-4:] != "args"))
        yield Fact(f"{method} of a worker", EXTENSION_PY, check)
    chunk = ("names", "dtype_names", "shapes", "tensor_sizes", "ipc_handles")
    yield Fact(
        "fields of a chunk over CUDA IPC",
        "realhf/backends/vllm/device_transfer.py",
        _has_fields(IPC, "IPCWeightTransferUpdateInfo", chunk),
    )
    yield Fact(
        "the start of a transfer over CUDA IPC",
        EXTENSION_PY,
        _has_fields(IPC, "IPCWeightTransferInitInfo", ("packed",)),
    )
    yield Fact(
        "the device of a handle is its part 6",
        "realhf/backends/vllm/device_transfer.py",
        _says(
            "distributed/weight_transfer/packed_tensor.py",
            "packed_ipc_consumer",
            r"list_args\[6\] = device_index",
        ),
    )
    yield from _list_broadcast_facts()
    yield Fact(
        "a backend of the transfer is named in its configuration",
        SERVER_PY,
        _has_fields("config/weight_transfer.py", "WeightTransferConfig", ("backend",)),
    )


def _list_broadcast_facts() -> Iterator[Fact]:
    """What ``realhf.backends.vllm.broadcast`` and its stand-in in the tests take for granted."""
    checks = {
        "fields with which a group is joined": _has_fields(
            COMMON, "NCCLWeightTransferInitInfo", build_init_info(bytes(128), 1, 2, 1)
        ),
        "a group is joined by a unique id": _says(
            COMMON, "worker_init_process_group", "unique_id_bytes is not None", "world_size"
        ),
        "a unique id is standard base64": _says(
            COMMON, "decode_nccl_unique_id", r"base64\.b64decode\(nccl_unique_id_b64, validate=True"
        ),
        "fields of a broadcast": _has_fields(
            NCCL, "NCCLWeightTransferUpdateInfo", build_update_info([])
        ),
        "the engine receives packs from rank 0": _says(
            NCCL,
            "NCCLWeightTransferEngine.receive_weights",
            r"if self\.packed",
            r"packed_nccl_broadcast_consumer\(",
            r"src=0",
            r"post_unpack_func=self\.model\.load_weights",
            r"num_buffers=self\.packed_num_buffers",
        ),
        "the engine takes the packs' size when it joins": _says(
            NCCL,
            "NCCLWeightTransferEngine.init_transfer_engine",
            r"self\.packed_buffer_size_bytes = init_info\.packed_buffer_size_bytes",
        ),
        "a group is left by shutdown": _says(
            NCCL,
            "NCCLWeightTransferEngine.shutdown",
            r"self\.model_update_group\.destroy\(\)",
            r"self\.model_update_group = None",
        ),
        "to leave a group aborts it from another thread": _says(
            PYNCCL, "PyNcclCommunicator.destroy", "ncclCommAbort", r"self\.disabled = True"
        ),
        "a group that was left takes nothing": _says(
            PYNCCL, "PyNcclCommunicator.broadcast", r"if self\.disabled:\s+return"
        ),
        "all ranks sum one element when they have joined": _says(
            PYNCCL,
            "PyNcclCommunicator._init_comm",
            r"ncclCommInitRank\(.*torch\.zeros\(1, device=device\).*self\.all_reduce\(data\)",
        ),
        "a unique id has 128 bytes": _matches(
            "distributed/device_communicators/pynccl_wrapper.py",
            r"^NCCL_UNIQUE_ID_BYTES\b.*= 128$|internal.*c_byte \* 128",
        ),
        "ranks of a server's workers follow one another": _matches(
            COMMON,
            r"dp_rank \* world_size_per_dp \+ rank_within_dp",
        ),
        "an update that failed is not active": _says(
            WORKER,
            "Worker.update_weights",
            r"if not self\._weight_update_active:\s+raise RuntimeError",
            r"except BaseException:\s+self\._weight_update_active = False",
        ),
        "an update cannot begin within another": _matches(
            WORKER, r"if self\._weight_update_active:\s+raise RuntimeError"
        ),
        "a layer is loaded when as many elements have arrived as it has": _matches(
            "model_executor/model_loader/reload/layerwise.py",
            r"if info\.load_numel >= info\.load_numel_total:",
        ),
        "an end puts back layers that have not got all of theirs": _says(
            "model_executor/model_loader/reload/layerwise.py",
            "finalize_layerwise_processing",
            r"info\.load_numel <= 0",
            r"_place_kernel_tensors\(layer, info\)",
            r"_layerwise_process\(layer, info\)",
            r"info\.reset\(\)",
        ),
    }
    for name, check in checks.items():
        yield Fact(name, BROADCAST_PY, check)


def _matches(file: str, pattern: str) -> Callable[[VllmSources], str]:
    """The text of a file contains a pattern."""

    def find_problem(sources: VllmSources) -> str:
        found = re.search(pattern, sources.text(file), re.DOTALL | re.MULTILINE)
        return "" if found else f"vllm/{file} does not say {pattern!r}"

    return find_problem
