"""Settings of the trajectory server. A command-line flag overrides a ``REALHF_TRAJ_*`` variable,
which overrides the default.

Source: docs/reference/trajectory.md 1.1, 3.8 to 3.12.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from realhf.trajectory.records import StateOptions
from realhf.web.settings import ServerSettings, SettingError, setting
from realhf.web.tokens import read_token_lines

SECRETS = ("token", "producer_token", "trainer_token", "admin_token")
"""Settings that hold a token; ``<name>_file`` may name a file with the token instead."""


@dataclass(frozen=True)
class TrajectoryConfig(StateOptions, ServerSettings):
    """The settings of one server process, the options of its state among them. Raises SettingError
    for a bad one."""

    host: str = setting(
        "127.0.0.1", "address to listen on; other than loopback it needs a token or --insecure"
    )
    port: int = setting(8000, "port; 0: any free one", limits=(0, 65535))
    store: str = setting(
        "",
        "sqlite:DIR, memory, or redis://host:port for several instances; default sqlite:trajectory "
        "in the folder "
        "realhf of $XDG_STATE_HOME (~/.local/state)",
    )
    durable: bool = setting(
        False, "sqlite: survive the loss of power too, for a disk flush a commit"
    )
    insecure: bool = setting(False, "listen on other than loopback without a token")
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
    reset_policy: str = setting(
        "",
        "who may reset: open, token (admin only) or off; default: open without tokens, token with "
        "them",
        choices=("open", "token", "off"),
    )
    max_body_bytes: int = setting(
        512 << 20, "largest body, before and after decompression", limits=(1024, math.inf)
    )
    max_bodies_bytes: int = setting(
        0,
        "bytes of all bodies that are being served, before and after decompression; "
        "more get 503 (0: four times the largest body)",
    )
    gzip_level: int = setting(1, "compression of answers, 0 to 3", limits=(0, 3))
    tokenizer: str = setting(
        "", "folder or name of a tokenizer that decodes the latest example on the status page"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.store:
            object.__setattr__(self, "store", f"sqlite:{_state_home() / 'realhf' / 'trajectory'}")
        if self.max_bodies_bytes and self.max_bodies_bytes < 2 * self.max_body_bytes:
            raise SettingError(
                f"{self.setting_label('max_bodies_bytes')} is {self.max_bodies_bytes}; give at "
                f"least twice "
                f"{self.setting_label('max_body_bytes')} ({self.max_body_bytes}): one body may be "
                f"held "
                f"compressed and plain"
            )
        for name in SECRETS:
            self.secret(name)
        if self.durable and not self.store.startswith("sqlite:"):
            raise SettingError(
                f"{self.setting_label('durable')} needs --store sqlite:DIR; it is {self.store!r}"
            )

    @property
    def has_tokens(self) -> bool:
        """Whether any role has a token."""
        return any(getattr(self, name) or getattr(self, f"{name}_file") for name in SECRETS)

    @property
    def asks_for_token(self) -> bool:
        """Whether clients need a token, or ``insecure`` allows the server to run without one."""
        return self.insecure or self.has_tokens

    @property
    def token_names(self) -> str:
        """Names of the settings that allow the server to listen beyond the loopback, for error
        messages."""
        return "--token (or --producer-token and --trainer-token), or --insecure"

    def secret(self, name: str) -> str:
        """Return a role's token, read from its file if one is set; "" if the role has none. Raises
        SettingError."""
        token = getattr(self, name)
        path = getattr(self, f"{name}_file")
        if not path:
            return token
        flag = self.flag(f"{name}_file")
        if token:
            raise SettingError(f"{self.flag(name)} and {flag} are both given; give one")
        lines = read_token_lines(path, flag)
        if len(lines) != 1:
            raise SettingError(f"{flag} {path} must hold one line, the token")
        return lines[0]

    @property
    def all_bodies_bytes(self) -> int:
        """Maximum bytes of all request bodies that are being served at the same time."""
        return self.max_bodies_bytes or 4 * self.max_body_bytes

    @property
    def resets(self) -> str:
        """Who may reset the run: ``open`` (anyone), ``token`` (the administrator), ``off`` (nobody)."""
        return self.reset_policy or ("token" if self.has_tokens else "open")


def _state_home() -> Path:
    """Return the folder for persistent files of this user's programs."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".local" / "state"
