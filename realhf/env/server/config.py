"""Configures the environment server: ``AWS_RL_ENV_*`` variables and BACKEND_TYPE, overridden by flags.

No other module of the environment reads the process environment. Source: docs/reference/environment.md 1.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from realhf.base.loopback import is_loopback_host
from realhf.env.containment.process_guard import LAYERS
from realhf.env.server.injected_faults import DEFAULT_KINDS, InjectedFaults

PREFIX = "AWS_RL_ENV_"
_CLIENT_ONLY = frozenset({"URL"})
_UNPREFIXED = {"backend_type": "BACKEND_TYPE"}
"""Settings whose variable has no prefix."""
_CHOICES = {
    "backend_type": ("simulator", "aws"),
    "capacity_mode": ("reject", "openenv"),
    "sandbox": ("auto", "bwrap", "plain"),
    "lambda_mode": ("stub", "sandbox"),
    "reward_mode": ("potential", "level"),
    "web": ("auto", "dedicated", "off"),
}
_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
    "": False,
}
_LIMITS = {
    "port": (0, 65535),
    "pool_size": (1, 1024),
    "ministack_base_port": (0, 65535),
    "max_steps": (1, 10_000),
    "max_command_bytes": (16, 65536),
    "max_stdout_bytes": (64, 8 << 20),
    "max_stderr_bytes": (64, 8 << 20),
    "cmd_timeout_s": (0.1, 600),
    "idle_timeout_s": (0, 1e7),
    "first_message_timeout_s": (0, 1e7),
    "ws_ping_interval_s": (0.1, 1e5),
    "ws_ping_timeout_s": (0.1, 1e6),
    "web_ministack_port": (0, 65535),
    "step_latency_ms": (0, 60_000),
    "fault_rate": (0, 1),
}


class ConfigError(ValueError):
    """A setting is unknown or out of range; the text names it."""


def _setting(default: Any, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class ServerConfig:
    """Holds the settings of one server process. Raises ConfigError naming variable and flag of a bad one."""

    host: str = _setting("127.0.0.1", "address to listen on; other than loopback it needs a token and bubblewrap")
    port: int = _setting(8000, "port of the server; 0: any free port")
    pool_size: int = _setting(1, "sessions, each with a simulator of its own (GRPO: at least num_generations)")
    ministack_base_port: int = _setting(4566, "first port of the simulators, pool_size in a row; 0: any free ports")
    backend_type: str = _setting("simulator", "simulator, or aws: a real account (see docs/environment.md)")
    max_steps: int = _setting(15, "commands of one episode")
    capacity_mode: str = _setting(
        "reject",
        "a client too many: reject (503 before the handshake) or openenv (an error "
        "frame after it, as stock OpenEnv servers do)",
    )
    max_command_bytes: int = _setting(8192, "length of a command, in bytes")
    max_stdout_bytes: int = _setting(16384, "kept of a command's output")
    max_stderr_bytes: int = _setting(4096, "kept of a command's error text")
    cmd_timeout_s: float = _setting(10.0, "seconds a command may take")
    idle_timeout_s: float = _setting(3600.0, "seconds without a message after which a session is closed; 0: never")
    first_message_timeout_s: float = _setting(
        60.0, "seconds that a new session may keep its slot without a first message; 0: as long as an idle one"
    )
    ws_ping_interval_s: float = _setting(20.0, "seconds between pings")
    ws_ping_timeout_s: float = _setting(600.0, "seconds a busy client may leave a ping unanswered")
    reward_mode: str = _setting(
        "potential",
        "potential (rewards of an episode sum to its final score) or level (each reward is the score so far)",
    )
    enable_chaos: bool = _setting(True, "disturb episodes of the higher tiers, unless a reset says chaos=false")
    lambda_mode: str = _setting("stub", "Lambda code: stub (a fixed answer, nothing runs) or sandbox (in bubblewrap)")
    sandbox: str = _setting("auto", "containment of the simulators: auto, bwrap (or no start) or plain")
    may_lack: str = _setting(
        "",
        "layers of containment (with commas: hooks, filter, limits, network, bubblewrap) "
        "without which the server starts all the same",
    )
    web: str = _setting("auto", "playground at /web: auto (with pool_size 1 only), dedicated (always) or off")
    web_ministack_port: int = _setting(4565, "port of the playground's own simulator; 0: any free port")
    web_solutions: bool = _setting(False, "the playground shows canonical solutions")
    token: str = _setting("", "bearer token that clients must send")
    allowed_hosts: str = _setting(
        "",
        "names (with commas) that clients may call the server by, beside its host, the "
        "loopback's and, beyond the loopback, its addresses",
    )
    allow_real_aws: str = _setting("", "backend_type aws: the account id, as confirmation")
    step_latency_ms: float = _setting(0.0, "SIMULATED: milliseconds added to every step of a session")
    fault_rate: float = _setting(0.0, "SIMULATED: fraction of the steps of a session that fail")
    fault_kinds: str = _setting(
        DEFAULT_KINDS,
        "SIMULATED: how they fail, with weights: unavailable (an error frame: "
        "the step was not executed), disconnect, hang",
    )
    fault_seed: int = _setting(0, "SIMULATED: seed of the faults")
    allow_file: str = _setting("", "backend_type aws: file with operations that are allowed beside the default reads")

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{_named(name)} is {value}; allowed: {low} to {high}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{_named(name)} is {value!r}; allowed: {', '.join(choices)}")
        last = self.ministack_base_port + self.pool_size - 1
        if self.ministack_base_port and last > 65535:
            raise ConfigError(
                f"{_named('ministack_base_port')} is {self.ministack_base_port}; there are no "
                f"{self.pool_size} ports from there on"
            )
        ours = self.web_ministack_port
        if self.web_mounted and ours and self.ministack_base_port <= ours <= last:
            raise ConfigError(
                f"{_named('web_ministack_port')} is {self.web_ministack_port}, a port of the pool "
                f"({self.ministack_base_port} to {last})"
            )
        if self.may_lack and self.backend_type == "aws":
            raise ConfigError(f"{_named('may_lack')} has no effect with {_named('backend_type')} aws")
        if unknown := self.missing_layers - set(LAYERS):
            raise ConfigError(f"{_named('may_lack')} names {', '.join(sorted(unknown))}; known: {', '.join(LAYERS)}")
        if not is_loopback_host(self.host):
            self._check_open_host()
        self._check_simulated()
        if self.backend_type == "aws" and not (self.token and self.allow_real_aws and self.pool_size == 1):
            raise ConfigError(
                f"{_named('backend_type')} is aws; it needs {_named('token')}, the account id in "
                f"{_named('allow_real_aws')} and {_named('pool_size')} 1"
            )

    def _check_open_host(self) -> None:
        where = f"{_named('host')} is {self.host!r}, not a loopback address"
        if not self.token:
            raise ConfigError(f"{where}; it needs {_named('token')}")
        if self.sandbox == "plain":
            raise ConfigError(f"{where}; it needs {_named('sandbox')} auto or bwrap")
        if self.may_lack:
            raise ConfigError(f"{where}; no layer may be missing then ({_named('may_lack')})")

    def _check_simulated(self) -> None:
        try:
            simulated = self.injected.described() or {}
        except ValueError as error:
            raise ConfigError(f"{_named('fault_kinds')}: {error}") from None
        if simulated and self.backend_type == "aws":
            raise ConfigError(f"{_named(min(simulated))} is simulated trouble; not with {_named('backend_type')} aws")

    @property
    def injected(self) -> InjectedFaults:
        """The simulated trouble that is asked for."""
        return InjectedFaults(self.step_latency_ms, self.fault_rate, self.fault_kinds, self.fault_seed)

    @property
    def missing_layers(self) -> frozenset[str]:
        """Layers of containment that may be missing."""
        return frozenset(filter(None, (name.strip() for name in self.may_lack.split(","))))

    @property
    def web_mounted(self) -> bool:
        """Whether the playground is served."""
        if self.backend_type == "aws" or self.web == "off":
            return False
        return self.web == "dedicated" or self.pool_size == 1

    @property
    def containment(self) -> str:
        """The containment that the pool is asked for: an open address never goes without bubblewrap."""
        return self.sandbox if is_loopback_host(self.host) else "bwrap"


def _flag(name: str) -> str:
    return {"lambda_mode": "lambda"}.get(name, name).replace("_", "-")


def _variable(name: str) -> str:
    return _UNPREFIXED.get(name) or PREFIX + _flag(name).replace("-", "_").upper()


def _named(name: str) -> str:
    return f"{_variable(name)} (--{_flag(name)})"


def _convert(name: str, kind: str, text: str) -> str | int | float | bool:
    try:
        return _BOOLEANS[text.lower()] if kind == "bool" else {"str": str, "int": int, "float": float}[kind](text)
    except (ValueError, KeyError):
        raise ConfigError(f"{_named(name)} is {text!r}; it must be {kind}") from None


def from_environment(environ: Mapping[str, str]) -> dict[str, str | int | float | bool]:
    """Read the settings in the variables. Raises ConfigError on an unknown ``AWS_RL_ENV_`` name or a bad value."""
    kinds = {_variable(field.name): field for field in fields(ServerConfig)}
    found: dict[str, str | int | float | bool] = {}
    for variable, text in environ.items():
        setting = kinds.get(variable)
        if setting is not None:
            found[setting.name] = _convert(setting.name, str(setting.type), text)
        elif variable.startswith(PREFIX) and variable.removeprefix(PREFIX) not in _CLIENT_ONLY:
            raise ConfigError(f"unknown setting {variable} (known: {', '.join(sorted(kinds))})")
    return found


def aws_endpoints(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of botocore that name endpoints, for ``backend_type`` aws: the commands of agents obey the
    same ones as the server's own clients."""
    variables = os.environ if environ is None else environ
    return {name: value for name, value in variables.items() if name.startswith("AWS_ENDPOINT_URL")}


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Add one flag per setting; a flag that is not given leaves the variable or the default in force."""
    for setting in fields(ServerConfig):
        about = f"{setting.metadata['about']} ({_variable(setting.name)}; default: {setting.default!r})"
        parser.add_argument(f"--{_flag(setting.name)}", dest=setting.name, default=None, help=about.replace("%", "%%"))


def resolve(arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> ServerConfig:
    """Combine defaults, then variables, then flags. Raises ConfigError."""
    settings = from_environment(os.environ if environ is None else environ)
    for setting in fields(ServerConfig):
        text = getattr(arguments, setting.name)
        if text is not None:
            settings[setting.name] = _convert(setting.name, str(setting.type), text)
    return ServerConfig(**settings)  # pyright: ignore[reportArgumentType]


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ServerConfig:
    """Return the configuration from a command line of server flags alone."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return resolve(parser.parse_args(argv), environ)
