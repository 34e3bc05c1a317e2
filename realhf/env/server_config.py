"""Configuration of the environment server: ``AWS_RL_ENV_*`` variables, overridden by command-line flags.

The only module of the environment that reads the process environment. Source: environment spec 1.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

PREFIX = "AWS_RL_ENV_"
_CLIENT_ONLY = frozenset({"URL"})


class ConfigError(ValueError):
    """A setting that is unknown or out of range; the text names it."""


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one server process. Port 0 means any free port (for MiniStack: any free range).

    max_steps: commands of one episode; cmd_timeout_s: one command; idle_timeout_s: 0 turns reaping off;
    sandbox: auto or plain.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    pool_size: int = 1
    ministack_base_port: int = 4566
    max_steps: int = 15
    max_command_bytes: int = 8192
    cmd_timeout_s: float = 10.0
    idle_timeout_s: float = 3600.0
    ws_ping_interval_s: float = 20.0
    ws_ping_timeout_s: float = 600.0
    sandbox: str = "auto"

    def __post_init__(self) -> None:
        limits = {
            "port": (0, 65535),
            "pool_size": (1, 1024),
            "ministack_base_port": (0, 65535 - self.pool_size),
            "max_steps": (1, 10_000),
            "max_command_bytes": (16, 65536),
            "cmd_timeout_s": (0.1, 600),
            "idle_timeout_s": (0, 1e7),
            "ws_ping_interval_s": (0.1, 1e5),
            "ws_ping_timeout_s": (0.1, 1e6),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{PREFIX}{name.upper()} (--{_flag(name)}) is {value}; allowed: {low} to {high}")
        if self.sandbox not in ("auto", "plain"):
            raise ConfigError(f"{PREFIX}SANDBOX is {self.sandbox!r}; allowed: auto, plain")
        if not _is_loopback(self.host):
            raise ConfigError(f"{PREFIX}HOST is {self.host!r}; only a loopback address is served (no access token)")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _convert(name: str, kind: str, text: str) -> str | int | float:
    try:
        return {"str": str, "int": int, "float": float}[kind](text)
    except ValueError:
        raise ConfigError(f"{PREFIX}{name.upper()} (--{_flag(name)}) is {text!r}; it must be {kind}") from None


def from_environment(environ: Mapping[str, str]) -> dict[str, str | int | float]:
    """Settings found in ``AWS_RL_ENV_*`` variables. Raises ConfigError on an unknown name or a bad value."""
    kinds = {field.name: str(field.type) for field in fields(ServerConfig)}
    found: dict[str, str | int | float] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable.removeprefix(PREFIX) in _CLIENT_ONLY:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in kinds:
            raise ConfigError(f"unknown setting {variable} (known: {', '.join(sorted(kinds)).upper()})")
        found[name] = _convert(name, kinds[name], text)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting; a flag that is not given leaves the variable or the default in force."""
    for field in fields(ServerConfig):
        parser.add_argument(f"--{_flag(field.name)}", default=None, help=f"default: {field.default}")


def resolve(arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> ServerConfig:
    """Defaults, then variables, then flags. Raises ConfigError."""
    settings = from_environment(os.environ if environ is None else environ)
    for field in fields(ServerConfig):
        text = getattr(arguments, field.name)
        if text is not None:
            settings[field.name] = _convert(field.name, str(field.type), text)
    return ServerConfig(**settings)  # pyright: ignore[reportArgumentType]


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ServerConfig:
    """Configuration from a command line of server flags alone."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return resolve(parser.parse_args(argv), environ)
