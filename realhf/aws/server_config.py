"""Settings of the AWS environment server, and the simulator pools built from them.

They extend the settings of every environment server (``realhf.env.server.config``) by those of
simulators and commands. Source: docs/reference/environment.md 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from realhf.aws.cli.executor import OutputLimits
from realhf.aws.simulator.pool import MiniStackPool
from realhf.base.loopback import is_loopback_host
from realhf.env.containment.sandbox import LAYERS
from realhf.env.server.config import ServerConfig
from realhf.web.settings import SettingError, setting


@dataclass(frozen=True)
class AwsServerConfig(ServerConfig):
    """Settings of one server process. The constructor raises SettingError, which names the variable
    and flag of an invalid setting."""

    PREFIX: ClassVar[str] = "AWS_RL_ENV_"
    UNPREFIXED: ClassVar[Mapping[str, str]] = {"backend_type": "BACKEND_TYPE"}
    FLAGS: ClassVar[Mapping[str, str]] = {"lambda_mode": "lambda"}
    FOREIGN: ClassVar[frozenset[str]] = frozenset({"URL"})

    host: str = setting(
        "127.0.0.1", "address to listen on; other than loopback it needs a token and bubblewrap"
    )
    pool_size: int = setting(
        1,
        "sessions, each with a simulator of its own (GRPO: at least num_generations)",
        limits=(1, 1024),
    )
    ministack_base_port: int = setting(
        4566,
        "first port of the simulators, pool_size in a row; 0: any free ports",
        limits=(0, 65535),
    )
    backend_type: str = setting(
        "simulator",
        "simulator, or aws: a real account (see docs/environment.md)",
        choices=("simulator", "aws"),
    )
    max_steps: int = setting(15, "maximum number of commands in an episode", limits=(1, 10_000))
    max_command_bytes: int = setting(
        8192, "maximum length of a command, in bytes", limits=(16, 65536)
    )
    max_stdout_bytes: int = setting(
        16384, "bytes of a command's output that are kept", limits=(64, 8 << 20)
    )
    max_stderr_bytes: int = setting(
        4096, "bytes of a command's error text that are kept", limits=(64, 8 << 20)
    )
    cmd_timeout_s: float = setting(10.0, "time limit of a command, in seconds", limits=(0.1, 600))
    reward_mode: str = setting(
        "potential",
        "potential (rewards of an episode sum to its final score) or level (each reward is the "
        "score so far)",
        choices=("potential", "level"),
    )
    enable_chaos: bool = setting(
        True, "perturb episodes of the higher tiers, unless the reset has chaos=false"
    )
    lambda_mode: str = setting(
        "stub",
        "Lambda code: stub (a fixed answer, nothing runs) or sandbox (in bubblewrap)",
        choices=("stub", "sandbox"),
    )
    sandbox: str = setting(
        "auto",
        "containment of the simulators: auto, bwrap (fails to start without it) or plain",
        choices=("auto", "bwrap", "plain"),
    )
    simulator_memory_mb: int = setting(
        512,
        "memory limit of a simulator, in MiB (it uses 128 at its start)",
        limits=(256, 65536),
    )
    may_lack: str = setting(
        "",
        "containment layers that may be missing, comma-separated (hooks, filter, limits, "
        "network, bubblewrap)",
    )
    web: str = setting(
        "auto",
        "playground at /web: auto (with pool_size 1 only), dedicated (always) or off",
        choices=("auto", "dedicated", "off"),
    )
    web_ministack_port: int = setting(
        4565, "port of the playground's own simulator; 0: any free port", limits=(0, 65535)
    )
    web_solutions: bool = setting(False, "the playground shows canonical solutions")
    allow_real_aws: str = setting("", "backend_type aws: the account id, as confirmation")
    allow_file: str = setting(
        "",
        "backend_type aws: file with operations that are allowed in addition to the default reads",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_ports()
        if self.may_lack and self.backend_type == "aws":
            raise SettingError(
                f"{self.setting_label('may_lack')} has no effect with "
                f"{self.setting_label('backend_type')} aws"
            )
        if unknown := self.missing_layers - set(LAYERS):
            known = ", ".join(LAYERS)
            raise SettingError(
                f"{self.setting_label('may_lack')} names {', '.join(sorted(unknown))}; known: "
                f"{known}"
            )
        if not is_loopback_host(self.host):
            self._check_open_host()
        if (simulated := self.injected.describe()) and self.backend_type == "aws":
            trouble = self.setting_label(min(simulated))
            raise SettingError(
                f"{trouble} is simulated trouble; not with {self.setting_label('backend_type')} aws"
            )
        if self.backend_type == "aws" and not (
            self.token and self.allow_real_aws and self.pool_size == 1
        ):
            raise SettingError(
                f"{self.setting_label('backend_type')} is aws; it needs "
                f"{self.setting_label('token')}, the account "
                f"id in "
                f"{self.setting_label('allow_real_aws')} and {self.setting_label('pool_size')} 1"
            )

    def _check_ports(self) -> None:
        last = self.ministack_base_port + self.pool_size - 1
        if self.ministack_base_port and last > 65535:
            raise SettingError(
                f"{self.setting_label('ministack_base_port')} is {self.ministack_base_port}; "
                f"there are no "
                f"{self.pool_size} ports from there on"
            )
        web_port = self.web_ministack_port
        if self.web_mounted and web_port and self.ministack_base_port <= web_port <= last:
            raise SettingError(
                f"{self.setting_label('web_ministack_port')} is {self.web_ministack_port}, a port "
                f"of the "
                f"pool "
                f"({self.ministack_base_port} to {last})"
            )

    def _check_open_host(self) -> None:
        where = f"{self.setting_label('host')} is {self.host!r}, not a loopback address"
        if self.sandbox == "plain":
            raise SettingError(f"{where}; it needs {self.setting_label('sandbox')} auto or bwrap")
        if self.may_lack:
            raise SettingError(
                f"{where}; no layer may be missing then ({self.setting_label('may_lack')})"
            )

    @property
    def missing_layers(self) -> frozenset[str]:
        """Containment layers that the server may start without."""
        return frozenset(filter(None, (name.strip() for name in self.may_lack.split(","))))

    @property
    def web_mounted(self) -> bool:
        """Whether the server serves the playground."""
        if self.backend_type == "aws" or self.web == "off":
            return False
        return self.web == "dedicated" or self.pool_size == 1

    @property
    def web_absent(self) -> str:
        """Message that says why ``web=auto`` does not serve the playground, and which flag enables
        it; "" if the playground is served or switched off."""
        if self.web_mounted or self.web != "auto" or self.backend_type == "aws":
            return ""
        return f"no playground at /web beside {self.pool_size} sessions; --web dedicated serves one"

    @property
    def containment(self) -> str:
        """Containment mode of the simulator pool. On a non-loopback address it is always
        bubblewrap."""
        return self.sandbox if is_loopback_host(self.host) else "bwrap"


def aws_endpoints() -> dict[str, str]:
    """Return the environment variables that set botocore's endpoints, for ``backend_type`` aws.
    Agents' commands and the server's own clients use the same endpoints."""
    return {
        name: value for name, value in os.environ.items() if name.startswith("AWS_ENDPOINT_URL")
    }


def output_limits(config: AwsServerConfig) -> OutputLimits:
    """Return the limits that apply to each command of a session."""
    return OutputLimits(
        config.cmd_timeout_s,
        config.max_stdout_bytes,
        config.max_stderr_bytes,
        config.max_command_bytes,
    )


def simulator_pool(config: AwsServerConfig, size: int, base_port: int) -> MiniStackPool:
    """Return a pool of ``size`` simulators, not started yet, with the containment that ``config``
    sets."""
    return MiniStackPool(
        size,
        base_port,
        sandbox=config.containment,
        limits=output_limits(config),
        lambda_mode=config.lambda_mode,
        may_lack=config.missing_layers,
        memory_mb=config.simulator_memory_mb,
    )
