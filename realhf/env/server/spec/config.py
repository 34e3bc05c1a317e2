"""Configures the server of any registered environment: ``REALHF_ENV_*`` variables, overridden by flags."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.env.server.config import ServerConfig, setting


@dataclass(frozen=True)
class SpecServerConfig(ServerConfig):
    """Holds the settings of one server process. Raises ConfigError naming variable and flag of a bad one."""

    call_timeout_s: float = setting(
        30.0, "seconds that the environment may take for a reset or a step", limits=(0.01, 3600)
    )
    info: bool = setting(False, "observations carry info, which is for people and may hold the solution")
    processes: int = setting(
        -1,
        "processes that the environment lives in, apart from the server's; a crash ends the sessions of one of them. "
        "0: the server's own, which is faster for cheap environments; -1: 4, and 0 for a registered environment",
        limits=(-1, 256),
    )
