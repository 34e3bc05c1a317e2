"""The settings of an environment server.

Source: docs/reference/environment.md 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from realhf.api.environment import DEFAULT_FAULT_KINDS
from realhf.env.server.injected_faults import InjectedFaults
from realhf.web.settings import ServerSettings, SettingError, setting


@dataclass(frozen=True)
class ServerConfig(ServerSettings):
    """The settings of one server process. Raises SettingError for a bad one."""

    PREFIX: ClassVar[str] = "REALHF_ENV_"

    host: str = setting("127.0.0.1", "address to listen on; other than loopback it needs a token")
    port: int = setting(8100, "port of the server; 0: any free port", limits=(0, 65535))
    pool_size: int = setting(64, "sessions that can be open at once", limits=(1, 1024))
    capacity_mode: str = setting(
        "reject",
        "a client too many: reject (503 before the handshake) or openenv (an error "
        "frame after it, as stock OpenEnv servers do)",
        choices=("reject", "openenv"),
    )
    idle_timeout_s: float = setting(
        3600.0,
        "seconds without a message after which a session is closed; 0: never",
        limits=(0, 1e7),
    )
    first_message_timeout_s: float = setting(
        60.0,
        "seconds that a new session may keep its slot without a first message; 0: as long as an "
        "idle one",
        limits=(0, 1e7),
    )
    ws_ping_interval_s: float = setting(20.0, "seconds between pings", limits=(0.1, 1e5))
    ws_ping_timeout_s: float = setting(
        600.0, "seconds a busy client may leave a ping unanswered", limits=(0.1, 1e6)
    )
    token: str = setting("", "bearer token that clients must send")
    allowed_hosts: str = setting(
        "",
        "names (with commas) that clients may call the server by, beside its host, the "
        "loopback's and, beyond the loopback, its addresses",
    )
    step_latency_ms: float = setting(
        0.0, "SIMULATED: milliseconds added to every step of a session", limits=(0, 60_000)
    )
    fault_rate: float = setting(
        0.0, "SIMULATED: fraction of the steps of a session that fail", limits=(0, 1)
    )
    fault_kinds: str = setting(
        DEFAULT_FAULT_KINDS,
        "SIMULATED: how they fail, with weights: unavailable (an error frame: "
        "the step was not executed), disconnect, hang",
    )
    fault_seed: int = setting(0, "SIMULATED: seed of the faults")

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.injected.describe()
        except ValueError as error:
            raise SettingError(f"{self.setting_label('fault_kinds')}: {error}") from None

    @property
    def asks_for_token(self) -> bool:
        """Whether clients need a token."""
        return bool(self.token)

    @property
    def injected(self) -> InjectedFaults:
        """The faults to simulate."""
        return InjectedFaults(
            self.step_latency_ms, self.fault_rate, self.fault_kinds, self.fault_seed
        )
