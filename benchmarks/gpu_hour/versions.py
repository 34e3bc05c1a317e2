"""Versions and limits: what a report needs so that its other figures can be understood."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import psutil
import torch
from torch.cuda.nccl import version as nccl_version

from benchmarks.gpu_hour.recording import CheckFailed, Recorder, Setting
from realhf.launch.vllm_choice import OLDEST, read_installed

_PACKAGES = ("torch", "transformers", "triton", "safetensors", "peft")
_FIELDS = (
    "driver_version",
    "power.limit",
    "clocks.max.sm",
    "pcie.link.gen.max",
    "mig.mode.current",
)
"""What ``nvidia-smi`` is asked for each GPU, besides what torch knows."""
_TIMEOUT_S = 20.0
_SHARED_BYTES = 1 << 30
"""Shared memory that NCCL and the processes of data loaders use without a word; containers have
64 MiB by default."""
GIB = 2**30


def check_versions(record: Recorder, setting: Setting) -> None:
    """Record versions, GPUs and limits of this machine."""
    with record.check("this machine") as check:
        memory = psutil.virtual_memory()
        check.say(
            f"{os.cpu_count()} cores, {memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB "
            f"free, Python {platform.python_version()}",
            cores=os.cpu_count(),
            memory_gib=memory.total / GIB,
            free_gib=memory.available / GIB,
            python=platform.python_version(),
        )
    with record.check("packages") as check:
        found = {name: _find_version(name) for name in _PACKAGES}
        present = {name: version for name, version in found.items() if version}
        check.say(", ".join(f"{name} {version}" for name, version in present.items()), **present)
    if setting.cuda:
        _check_gpus(record)
    else:
        record.skip_on_cpu("CUDA and GPUs", "this is a rehearsal")
    _check_vllm(record, setting)
    with record.check("limits") as check:
        _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
        unlimited = locked == resource.RLIM_INFINITY
        check.say(
            f"locked memory {'unlimited' if unlimited else f'{locked / 2**20:.0f} MiB'}, open "
            f"files {files}, /dev/shm {shared / GIB:.2f} GiB free",
            locked_mib="unlimited" if unlimited else locked / 2**20,
            open_files=files,
            shared_memory_gib=shared / GIB,
        )
        if shared < _SHARED_BYTES:
            raise CheckFailed(
                f"/dev/shm has {shared / 2**20:.0f} MiB free, and ranks on several GPUs talk "
                "through it: start the container with --shm-size=8g"
            )


def _check_gpus(record: Recorder) -> None:
    """Record CUDA, each GPU, and which GPUs reach each other directly."""
    with record.check("CUDA", needed=True) as check:
        nccl = ".".join(map(str, nccl_version()))
        cudnn = torch.backends.cudnn.version()
        check.say(
            f"CUDA {torch.version.cuda}, cuDNN {cudnn}, NCCL {nccl}, "
            f"{torch.cuda.device_count()} GPU(s)",
            cuda=torch.version.cuda,
            cudnn=cudnn,
            nccl=nccl,
            gpus=torch.cuda.device_count(),
        )
        # Fails at once where torch was not compiled for this GPU, or the driver is too old.
        torch.ones(2, 2, device="cuda").sum().item()
    told = _ask_driver()
    for index in range(torch.cuda.device_count()):
        with record.check(f"GPU {index}") as check:
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            capability = f"{properties.major}.{properties.minor}"
            check.say(
                f"{properties.name}, capability {capability}, {free / GIB:.1f} of "
                f"{total / GIB:.1f} GiB free, {properties.multi_processor_count} multiprocessors",
                name=properties.name,
                capability=capability,
                free_gib=free / GIB,
                total_gib=total / GIB,
                multiprocessors=properties.multi_processor_count,
                **(told[index] if len(told) == torch.cuda.device_count() else {}),
            )
            if properties.major < 8:
                raise CheckFailed(
                    f"{properties.name} has capability {capability}, bf16 needs 8.0: "
                    "actor.dtype=float32 trains here, and the parts in bf16 fail"
                )
    count = torch.cuda.device_count()
    if count < 2:
        record.skip("direct access between GPUs", "one GPU is visible here")
        return
    with record.check("direct access between GPUs") as check:
        reach = [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)]
            for i in range(count)
        ]
        pairs = sum(map(sum, reach)) - count
        check.say(f"{pairs} of {count * (count - 1)} pairs", reach=reach)


def _ask_driver() -> list[dict[str, str]]:
    """Return what ``nvidia-smi`` says about each GPU, [] if it cannot be run."""
    command = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    names = [field.replace(".", "_") for field in _FIELDS]
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def _check_vllm(record: Recorder, setting: Setting) -> None:
    """Record the version of vLLM, and whether it fits this machine and this torch."""
    if setting.vllm is None:
        record.skip("vLLM", describe_missing_vllm(setting))
        return
    with record.check("vLLM") as check:
        installed = read_installed(setting.vllm)
        if installed is None:
            raise CheckFailed("the environment of the program vllm has no metadata of vLLM")
        check.say(
            f"vLLM {installed.version} with torch {installed.torch or 'unknown'}",
            vllm=installed.version,
            torch=installed.torch,
        )
        if installed.for_cpu == setting.cuda:
            raise CheckFailed(
                f"vLLM {installed.version} was built for {'the CPU' if setting.cuda else 'CUDA'}: "
                f"{describe_missing_vllm(setting)}"
            )
        if installed.release is not None and installed.release < OLDEST:
            raise CheckFailed(f"vLLM {installed.version} is older than 0.32: make vllm-cuda")
        own = torch.__version__.partition("+")[0]
        if setting.cuda and installed.torch and installed.torch.partition("+")[0] != own:
            raise CheckFailed(
                f"vLLM has torch {installed.torch} and we have {own}: weights that travel through "
                "a GPU's memory are described by torch, so give both the same (make vllm-cuda)"
            )


def describe_missing_vllm(setting: Setting) -> str:
    """Return how to get a vLLM for this machine."""
    target = "make vllm-cuda" if setting.cuda else "make test-vllm"
    return f"no vLLM here for this machine: {target} installs one, --vllm names another"


def _find_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
