"""Harbor task folders: ``task.toml``, ``instruction.md``, ``environment/``, ``tests/test.sh`` and
``solution/solve.sh``.

What cannot be played without Docker is refused by name when the folder is read, so no task is
played otherwise than its author meant without a word. Source: the task format of Harbor, schema
1.0 to 1.4.
"""

from __future__ import annotations

import json
import math
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realhf.env.harbor.dockerfile import Build, read_dockerfile, read_text, stands_in

_DEFAULT_TIMEOUT_S = 600.0
"""Time limit in seconds of the agent, the verifier and the build, if ``task.toml`` has none."""
_DEFAULT_MEMORY_MB = 2048
_DEFAULT_STORAGE_MB = 10240
_REWARD = "reward"
"""Name of the reward, where ``reward.json`` has several numbers."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
_UNITS_MB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_NOT_PLAYED = {
    "gpus": "GPUs",
    "gpu_types": "GPUs",
    "tpu": "TPUs",
    "mcp_servers": "MCP servers",
    "healthcheck": "a health check",
    "skills_dir": "skills",
    "docker_compose": "compose",
}
"""Keys of ``[environment]`` that are refused if they are set, with what they ask for."""
_KNOWN = {
    "": ("artifacts", "agent", "environment", "metadata", "multi_step_reward_strategy",
         "schema_version", "solution", "source", "steps", "task", "verifier", "version"),
    "agent": ("allowed_hosts", "network_mode", "timeout_sec", "user"),
    "environment": ("allow_internet", "allowed_hosts", "build_timeout_sec", "cpus", "docker_image",
                    "env", "memory", "memory_mb", "network_mode", "os", "storage", "storage_mb",
                    "workdir", *_NOT_PLAYED),
    "solution": ("env",),
    "verifier": ("allowed_hosts", "collect", "env", "environment", "environment_mode",
                 "network_mode", "timeout_sec", "user"),
}  # fmt: skip
"""Keys of ``task.toml`` by table; "" for the whole file. Others are refused, because they may
change what a task means; ``task`` and ``metadata`` describe it only."""
_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
"""Kinds of files that a task may consist of."""
_MAX_INSTRUCTION_CHARS = 1 << 18
_ROOT = "root"
"""Key of ``[metadata.realhf]``: the folder of an unpacked image, relative to the task's."""


class InvalidReward(ValueError):
    """Raised if the verifier wrote no reward, or something that is none."""


@dataclass(frozen=True)
class HarborTask:
    """A task folder whose files were read."""

    folder: Path
    """Absolute path of the folder."""
    instruction: str
    """What the policy is asked to do."""
    build: Build
    """How the container is built."""
    image: str
    """Folder of an unpacked image; "" for the host's userland."""
    agent_timeout_s: float
    """Time in seconds that the agent's commands may take together."""
    verifier_timeout_s: float
    """Time in seconds that the verifier may take."""
    build_timeout_s: float
    """Time in seconds that building the container may take."""
    memory_mb: int
    """Memory that the task asks for, in MiB."""
    storage_mb: int
    """Storage that the task asks for, in MiB."""
    asked: Mapping[str, float]
    """What ``task.toml`` itself asks for, of ``memory_mb``, ``storage_mb`` and ``cpus``."""
    network: bool
    """Whether ``task.toml`` says that the task may use the internet."""
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the verifier."""
    solution_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the solution."""
    category: str = ""
    """Category by which success is reported."""

    @property
    def name(self) -> str:
        """Name of the task, that of its folder."""
        return self.folder.name

    @property
    def tests(self) -> Path:
        """Folder of the verifier."""
        return self.folder / "tests"

    @property
    def solution(self) -> Path | None:
        """Folder of the solution; None if the task has none."""
        folder = self.folder / "solution"
        return folder if (folder / "solve.sh").is_file() else None

    def find_warnings(self, *, memory_mb: int, storage_mb: int) -> Sequence[str]:
        """Return what differs from a run of the task in Docker, with these limits of an episode."""
        warnings = []
        if not self.image:
            warnings.append(f"the host's userland stands in for the image {self.build.base}")
        for name, limit in (("memory_mb", memory_mb), ("storage_mb", storage_mb)):
            if self.asked.get(name, 0) > limit:
                warnings.append(
                    f"the task asks for {name}={self.asked[name]:g} and gets env.{name}={limit}"
                )
        if cpus := self.asked.get("cpus"):
            warnings.append(f"cpus={cpus:g} is not enforced: the host's CPUs are shared")
        return warnings


def find_tasks(folder: Path) -> list[Path]:
    """Return the task folders: ``folder`` itself, or those in it, by name. Raises ValueError if
    there are none."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    if (folder / "task.toml").is_file():
        return [folder.resolve()]
    found = sorted(path.parent.resolve() for path in folder.glob("*/task.toml"))
    if not found:
        raise ValueError(f"{folder}: neither it nor a folder in it has a task.toml")
    return found


def read_task(folder: Path) -> HarborTask:
    """Read a task folder. Raises ValueError that names the file and what is wrong or not played."""
    file = folder / "task.toml"
    try:
        config = tomllib.loads(read_text(file, folder))
        instruction = _read_instruction(folder)
        _refuse_features(config, folder)
        environment = _section(config, "environment")
        image = _find_image(config, folder)
        build = _read_build(environment, folder, image)
        metadata = _section(config, "metadata")
        variables = _variables(environment, "environment")
        build.variables |= variables
        if workdir := environment.get("workdir"):
            build.folder = _text(workdir, "environment.workdir")
        return HarborTask(
            folder=folder.resolve(),
            instruction=instruction,
            build=build,
            image=image,
            asked=_find_asked(environment),
            agent_timeout_s=_seconds(_section(config, "agent"), "timeout_sec", "agent"),
            verifier_timeout_s=_seconds(_section(config, "verifier"), "timeout_sec", "verifier"),
            build_timeout_s=_seconds(environment, "build_timeout_sec", "environment"),
            memory_mb=_megabytes(environment, "memory", _DEFAULT_MEMORY_MB),
            storage_mb=_megabytes(environment, "storage", _DEFAULT_STORAGE_MB),
            network=environment.get("allow_internet") is True
            or environment.get("network_mode") == "public",
            verifier_variables=_variables(_section(config, "verifier"), "verifier"),
            solution_variables=_variables(_section(config, "solution"), "solution"),
            category=str(metadata.get("category") or ""),
        )
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{getattr(error, 'filename', None) or file}: {reason}") from None
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(folder)) else f"{file}: {text}") from None


def parse_reward(text: bytes | None, mapping: bytes | None) -> dict[str, float]:
    """Return the rewards that a verifier wrote, among them ``reward``.

    text: content of ``reward.txt``, a number; it is read first, as in Harbor. mapping: content of
    ``reward.json``, a mapping from names to numbers. The reward is the one called ``reward``, or
    the only one. None for a file that does not exist. Raises InvalidReward.
    """
    if text is not None:
        return {_REWARD: _number(_decode(text, "reward.txt").strip(), "reward.txt")}
    if mapping is None:
        raise InvalidReward("the verifier wrote neither reward.txt nor reward.json")
    content = _decode(mapping, "reward.json")
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        raise InvalidReward(f"reward.json is no JSON: {content[:60]!r}") from None
    if not isinstance(values, dict) or not values:
        raise InvalidReward("reward.json is no mapping from names to numbers")
    rewards = {name: _number(value, f"reward.json, {name!r}") for name, value in values.items()}
    if _REWARD not in rewards:
        if len(rewards) > 1:
            names = ", ".join(rewards)
            raise InvalidReward(f"reward.json has several numbers and none is 'reward': {names}")
        rewards[_REWARD] = next(iter(rewards.values()))
    return rewards


def _number(value: Any, where: str) -> float:
    """Convert a number, or a text that is one, to a finite float. Raises InvalidReward."""
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidReward(f"{where} is no number: {str(value)[:60]!r}")
    return number


def _decode(data: bytes, name: str) -> str:
    if not data.strip():
        raise InvalidReward(f"{name} is empty")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidReward(f"{name} is no text") from None


def _read_instruction(folder: Path) -> str:
    text = read_text(folder / "instruction.md", folder).strip()
    if not text or len(text) > _MAX_INSTRUCTION_CHARS:
        raise ValueError(f"{folder / 'instruction.md'}: is empty or too long")
    return text


def _refuse_features(config: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError that names everything in the task that is not played here."""
    found = [*_unplayed(config, folder)]
    if found:
        raise ValueError(f"not played here: {', '.join(dict.fromkeys(found))}")
    for name in ("tests/test.sh", "instruction.md"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: there is no such file")
    for name in ("environment", "tests", "solution"):
        if (folder / name).is_symlink():
            raise ValueError(f"{folder / name}: is a link: put the folder there")
        for path in (folder / name).rglob("*"):
            if stat.S_IFMT(path.lstat().st_mode) not in _KINDS:
                raise ValueError(f"{path}: is neither a file, a folder nor a link: remove it")
    for name in ("tests/test.sh", "solution/solve.sh"):
        if (folder / name).exists():
            read_text(folder / name, folder)


def _unplayed(config: Mapping[str, Any], folder: Path) -> Iterator[str]:
    environment = _section(config, "environment")
    for name, known in _KNOWN.items():
        for key in _section(config, name) if name else config:
            if key not in known:
                yield f"the unknown key {name}{'.' if name else ''}{key[:40]}"
    for key, what in _NOT_PLAYED.items():
        if environment.get(key):
            yield f"{what} (environment.{key})"
    if str(environment.get("os", "linux")).lower() != "linux":
        yield f"{str(environment['os'])[:40]} (environment.os)"
    for name in _COMPOSE:
        if (folder / "environment" / name).exists():
            yield f"compose (environment/{name})"
    for name in ("test.bat", "test.ps1"):
        if (folder / "tests" / name).exists():
            yield f"Windows (tests/{name})"
    if config.get("steps") or (folder / "steps").is_dir():
        yield "several steps (steps)"
    if config.get("artifacts"):
        yield "artifacts (artifacts)"
    for name in ("agent", "verifier"):
        user = _section(config, name).get("user")
        if user not in (None, "root", 0, "0"):
            yield f"the user {user!r} ({name}.user)"
    verifier = _section(config, "verifier")
    if verifier.get("environment") or verifier.get("environment_mode") not in (None, "shared"):
        yield "a verifier in an environment of its own (verifier.environment_mode)"
    if verifier.get("collect"):
        yield "collected artifacts (verifier.collect)"
    for name in ("environment", "agent", "verifier"):
        section = _section(config, name)
        if section.get("allowed_hosts"):
            yield f"a list of hosts ({name}.allowed_hosts)"
        mode = section.get("network_mode")
        if mode not in (None, "none", "no-network", "public"):
            yield f"the network mode {mode!r} ({name}.network_mode)"
        elif mode is not None and mode != environment.get("network_mode", mode):
            yield f"a network that changes ({name}.network_mode)"


def _find_image(config: Mapping[str, Any], folder: Path) -> str:
    """Return the absolute path of the task's unpacked image; "" if it names none."""
    named = _section(_section(config, "metadata"), "realhf").get(_ROOT, "")
    if not named:
        return ""
    path = (folder / _text(named, "metadata.realhf.root")).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"metadata.realhf.root: {path} is outside of the task: move it there")
    if not (path / "usr").is_dir():
        raise ValueError(f"metadata.realhf.root: {path} is no unpacked image: it has no usr")
    return str(path)


def _read_build(environment: Mapping[str, Any], folder: Path, image: str) -> Build:
    file = folder / "environment" / "Dockerfile"
    if file.is_file():
        build = read_dockerfile(file)
        where = f"{file}: FROM {build.base}"
    elif named := environment.get("docker_image"):
        build = Build(_text(named, "environment.docker_image"))
        where = f"environment.docker_image = {named!r}"
    else:
        raise ValueError(f"{file}: there is no such file, and no environment.docker_image")
    if not image and not stands_in(build.base):
        raise ValueError(
            f"{where}: the host's userland stands in for plain debian, ubuntu and python images "
            f"only; for another one, unpack it and name its folder in metadata.realhf.root"
        )
    return build


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is no table")
    return value


def _variables(section: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the environment variables of a section. Raises ValueError for one that is taken from
    the host, which may be a secret."""
    variables: dict[str, str] = {}
    for key, value in _section(section, "env").items():
        text = _text(value, f"{name}.env.{key}")
        if "${" in text:
            raise ValueError(f"{name}.env.{key}: variables of the host are not given to tasks")
        variables[key] = text
    return variables


def _find_asked(environment: Mapping[str, Any]) -> dict[str, float]:
    """Return the amounts that a task itself asks for."""
    asked: dict[str, float] = {
        f"{name}_mb": _megabytes(environment, name, 0)
        for name in ("memory", "storage")
        if name in environment or f"{name}_mb" in environment
    }
    if (cpus := environment.get("cpus")) is not None:
        if isinstance(cpus, bool) or not isinstance(cpus, (int, float)) or not 0 < cpus < math.inf:
            raise ValueError("environment.cpus is no positive number")
        asked["cpus"] = cpus
    return asked


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value


def _seconds(section: Mapping[str, Any], key: str, name: str) -> float:
    value = section.get(key)
    if value is None:
        return _DEFAULT_TIMEOUT_S
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name}.{key} is no positive number of seconds")
    return float(value)


def _megabytes(section: Mapping[str, Any], key: str, default: int) -> int:
    """Return a size in MiB: ``KEY_mb``, a number, or the older ``KEY``, such as ``"2G"``."""
    value = section.get(f"{key}_mb")
    if value is None and key in section:
        match = _SIZE.fullmatch(str(section[key]).strip())
        if match is None:
            raise ValueError(f"environment.{key} is no size such as '2G'")
        value = round(float(match[1]) * _UNITS_MB[match[2].upper()])
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"environment.{key}_mb is no positive whole number")
    return value
