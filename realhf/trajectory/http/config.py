"""Configures the server: flags over ``REALHF_TRAJ_*`` variables over defaults.

No other module of the trajectory server reads the process environment. Source: docs/reference/trajectory.md 1.1, 3.8 to
3.12.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from realhf.base.loopback import is_loopback_host
from realhf.base.tls import certificate_problem
from realhf.trajectory.records import FALSE_WORDS, TRUE_WORDS, StateOptions, setting

PREFIX = "REALHF_TRAJ_"

SECRETS = ("token", "producer_token", "trainer_token", "admin_token")
"""Settings that hold a token; ``<name>_file`` may hold it in its place."""
TLS_FLAGS = ("--tls-cert", "--tls-key")


class ConfigError(ValueError):
    """Is raised for a setting that is unknown or out of range; the text names it."""


@dataclass(frozen=True)
class TrajectoryConfig(StateOptions):
    """Holds the settings of one server process, the rules of its state among them. Raises ConfigError naming a bad
    one."""

    host: str = setting("127.0.0.1", "address to listen on; other than loopback it needs a token or --insecure")
    port: int = setting(8000, "port; 0: any free one", int)
    store: str = setting(
        "",
        "sqlite:DIR, memory, or redis://host:port for several instances; default sqlite:trajectory in the folder "
        "realhf of $XDG_STATE_HOME (~/.local/state)",
    )
    durable: bool = setting(False, "sqlite: survive the loss of power too, for a disk flush a commit", bool)
    insecure: bool = setting(False, "listen on other than loopback without a token", bool)
    allowed_hosts: str = setting(
        "",
        "names (with a dot) by which this server may be addressed without a token, with "
        "commas between them, or *; addresses and local names always may",
    )
    token: str = setting("", "bearer token of producers and trainers")
    producer_token: str = setting("", "bearer token that may only push and poll")
    trainer_token: str = setting("", "bearer token that may only register and pull")
    admin_token: str = setting("", "bearer token that may do everything, resets included")
    token_file: str = setting("", "file with the token, which as a flag or variable others may see")
    producer_token_file: str = setting("", "file with the producer token")
    trainer_token_file: str = setting("", "file with the trainer token")
    admin_token_file: str = setting("", "file with the admin token")
    tls_cert: str = setting("", "file with the certificate (PEM) of the server, which speaks https with it")
    tls_key: str = setting("", "file with the private key of the certificate")
    reset_policy: str = setting(
        "", "who may reset: open, token (admin only) or off; default: open without tokens, token with them"
    )
    max_body_bytes: int = setting(512 << 20, "largest body, before and after decompression", int)
    max_bodies_bytes: int = setting(
        0,
        "bytes of all bodies that are being served, before and after decompression; "
        "more get 503 (0: four times the largest body)",
        int,
    )
    gzip_level: int = setting(1, "compression of answers, 0 to 3", int)
    tokenizer: str = setting("", "folder or name of a tokenizer that decodes the latest example on the status page")

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not self.store:
            object.__setattr__(self, "store", f"sqlite:{_state_home() / 'realhf' / 'trajectory'}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; give 0 to 65535")
        if not 0 <= self.gzip_level <= 3:
            raise ConfigError(f"--gzip-level is {self.gzip_level}; give 0 to 3")
        if self.max_body_bytes < 1024:
            raise ConfigError(f"--max-body-bytes is {self.max_body_bytes}; give at least 1024")
        if self.max_bodies_bytes and self.max_bodies_bytes < 2 * self.max_body_bytes:
            raise ConfigError(
                f"--max-bodies-bytes is {self.max_bodies_bytes}; give at least twice --max-body-bytes "
                f"({self.max_body_bytes}): one body may be held compressed and plain"
            )
        for name in SECRETS:
            self.secret(name)
        if self.reset_policy not in ("", "open", "token", "off"):
            raise ConfigError(f"--reset-policy is {self.reset_policy!r}; give open, token or off")
        if not (self.insecure or self.has_tokens or is_loopback_host(self.host)):
            raise ConfigError(
                f"--host {self.host} is not loopback: set --token (or --producer-token and "
                "--trainer-token), or say --insecure"
            )
        if problem := certificate_problem(self.tls_cert, self.tls_key, TLS_FLAGS):
            raise ConfigError(problem)
        if self.durable and not self.store.startswith("sqlite:"):
            raise ConfigError(f"--durable needs --store sqlite:DIR; it is {self.store!r}")

    @property
    def has_tokens(self) -> bool:
        """Whether any role has a token."""
        return any(getattr(self, name) or getattr(self, f"{name}_file") for name in SECRETS)

    def secret(self, name: str) -> str:
        """Return the token of a role, from its file if there is one; "" without. Raises ConfigError."""
        given, path = getattr(self, name), getattr(self, f"{name}_file")
        if not path:
            return given
        flag = _flag(f"{name}_file")
        if given:
            raise ConfigError(f"{_flag(name)} and {flag} are both given; give one")
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{flag} {path}: {error}") from error
        if not text or len(text.splitlines()) > 1:
            raise ConfigError(f"{flag} {path} must hold one line, the token")
        return text

    @property
    def all_bodies_bytes(self) -> int:
        """Bytes that all bodies being served may take together."""
        return self.max_bodies_bytes or 4 * self.max_body_bytes

    @property
    def resets(self) -> str:
        """Who may reset: open, token or off."""
        return self.reset_policy or ("token" if self.has_tokens else "open")

    def to_environment(self) -> dict[str, str]:
        """Return variables that make the same configuration in a child process."""
        return {
            PREFIX + item.name.upper(): str(getattr(self, item.name))
            for item in fields(self)
            if getattr(self, item.name) != item.default
        }


def add_arguments(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add one flag for each setting; its help names the variable in brackets."""
    for item in fields(TrajectoryConfig):
        kind, about = item.metadata["kind"], item.metadata["about"]
        default = "" if item.default in (None, "", False) else f"; default {item.default}"
        text = f"{about}{default} [{PREFIX}{item.name.upper()}]".replace("%", "%%")
        options: dict[str, Any] = {"dest": item.name, "default": None, "help": text}
        if "bare" in item.metadata:
            options |= {"nargs": "?", "const": item.metadata["bare"]}
        if kind is bool:
            parser.add_argument(_flag(item.name), action=argparse.BooleanOptionalAction, **options)
        else:
            parser.add_argument(_flag(item.name), type=kind, metavar=kind.__name__.upper(), **options)


def resolve(
    arguments: argparse.Namespace | None = None, environment: Mapping[str, str] | None = None
) -> TrajectoryConfig:
    """Take flags that were given, else variables, else defaults. Raises ConfigError, also for an unknown REALHF_TRAJ_
    variable."""
    environment = os.environ if environment is None else environment
    known = {PREFIX + item.name.upper(): item for item in fields(TrajectoryConfig)}
    unknown = sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
    if unknown:
        raise ConfigError(f"unknown variable {unknown[0]}; known are {', '.join(sorted(known))}")
    chosen: dict[str, Any] = {
        item.name: _parsed(name, environment[name], item.metadata["kind"])
        for name, item in known.items()
        if name in environment
    }
    for item in known.values():
        given = getattr(arguments, item.name, None)
        if given is not None:
            chosen[item.name] = given
    return TrajectoryConfig(**chosen)


def _state_home() -> Path:
    """Return where programs of this user keep what must survive them."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".local" / "state"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parsed(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in (*TRUE_WORDS, *FALSE_WORDS):
            raise ConfigError(f"{name} is {text!r}; give 1 or 0")
        return text.lower() in TRUE_WORDS
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; give a number") from None
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{name} is {text!r}; give a number")
    return value
