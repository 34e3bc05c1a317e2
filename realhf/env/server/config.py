"""Configures the environment server: variables, overridden by flags, among them faults that are injected for tests.

Nothing here happens unless it is asked for, and never on a real account. The faults of a session are drawn from the
seed and the number of the session, so that the same play meets the same faults.

No other module of the server reads the process environment. Source: docs/reference/environment.md 1.
"""

from __future__ import annotations

import argparse
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from realhf.base.loopback import is_loopback_host
from realhf.base.tls import certificate_problem

UNAVAILABLE, DISCONNECT, HANG = "unavailable", "disconnect", "hang"
"""Kinds of faults. ``unavailable``: an error frame that says the step was not executed; ``disconnect``: the connection
ends without an answer; ``hang``: there is no answer."""
KINDS = (UNAVAILABLE, DISCONNECT, HANG)
DEFAULT_FAULT_KINDS = "unavailable=9,disconnect=1"
"""Default kinds of injected faults, with their weights."""


def parse_kinds(text: str) -> dict[str, float]:
    """Parse ``kind[=weight],...`` into weights (1 where none is given). Raises ValueError."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        kind, given, weight = part.strip().partition("=")
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r} (known: {', '.join(KINDS)})")
        if kind in weights:
            raise ValueError(f"{kind} is named twice")
        try:
            weights[kind] = float(weight) if given else 1.0
        except ValueError:
            raise ValueError(f"the weight of {kind} is {weight!r}, not a number") from None
        if not (math.isfinite(weights[kind]) and weights[kind] > 0):
            raise ValueError(f"the weight of {kind} is {weight}; it must be above 0")
    return weights


class SessionTrouble:
    """Draws what one session meets. ``latency_s`` is added to every step."""

    def __init__(self, latency_s: float, rate: float, weights: Mapping[str, float], seed: str) -> None:
        self.latency_s = latency_s
        self._rate = rate
        self._weights = dict(weights)
        self._random = random.Random(seed)

    def draw(self) -> str | None:
        """Return the fault of the next step request, or None. A request that is sent again draws again."""
        if self._rate <= 0 or self._random.random() >= self._rate:
            return None
        return self._random.choices(list(self._weights), list(self._weights.values()))[0]


@dataclass
class InjectedFaults:
    """Describes the trouble of one server. ``rate``: fraction of step requests that fail; ``kinds``: see
    ``parse_kinds``."""

    latency_ms: float = 0.0
    rate: float = 0.0
    kinds: str = DEFAULT_FAULT_KINDS
    seed: int = 0
    _sessions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._weights = parse_kinds(self.kinds)

    def session(self) -> SessionTrouble:
        """Return the trouble of the next session that opens."""
        self._sessions += 1
        return SessionTrouble(self.latency_ms / 1000, self.rate, self._weights, f"{self.seed}/{self._sessions}")

    def described(self) -> dict[str, Any] | None:
        """Return what is simulated, for those who ask the server; None when nothing is."""
        found: dict[str, Any] = {}
        if self.latency_ms:
            found["step_latency_ms"] = self.latency_ms
        if self.rate:
            found |= {"fault_rate": self.rate, "fault_kinds": self.kinds, "fault_seed": self.seed}
        return found or None


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_BOOLEANS: dict[str, bool] = {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}


class ConfigError(ValueError):
    """A setting is unknown or out of range; the text names it."""


def setting(default: Any, about: str, *, limits: tuple[float, float] | None = None, choices: Sequence[str] = ()) -> Any:
    """Return the field of a setting: one sentence, and the least and greatest value or the words that are allowed."""
    return field(default=default, metadata={"about": about, "limits": limits, "choices": tuple(choices)})


@dataclass(frozen=True)
class ServerConfig:
    """Holds the settings of one server process. Raises ConfigError naming variable and flag of a bad one.

    ``PREFIX`` is that of the variables. ``UNPREFIXED`` maps settings to variables of another name, ``FLAGS`` settings
    to flags of another name; ``FOREIGN`` names variables with the prefix that are not the server's.
    """

    PREFIX: ClassVar[str] = "REALHF_ENV_"
    UNPREFIXED: ClassVar[Mapping[str, str]] = MappingProxyType({})
    FLAGS: ClassVar[Mapping[str, str]] = MappingProxyType({})
    FOREIGN: ClassVar[frozenset[str]] = frozenset()

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
        3600.0, "seconds without a message after which a session is closed; 0: never", limits=(0, 1e7)
    )
    first_message_timeout_s: float = setting(
        60.0,
        "seconds that a new session may keep its slot without a first message; 0: as long as an idle one",
        limits=(0, 1e7),
    )
    ws_ping_interval_s: float = setting(20.0, "seconds between pings", limits=(0.1, 1e5))
    ws_ping_timeout_s: float = setting(600.0, "seconds a busy client may leave a ping unanswered", limits=(0.1, 1e6))
    token: str = setting("", "bearer token that clients must send")
    tls_cert: str = setting("", "file with the certificate (PEM) of the server, which speaks https with it")
    tls_key: str = setting("", "file with the private key of the certificate")
    allowed_hosts: str = setting(
        "",
        "names (with commas) that clients may call the server by, beside its host, the "
        "loopback's and, beyond the loopback, its addresses",
    )
    step_latency_ms: float = setting(
        0.0, "SIMULATED: milliseconds added to every step of a session", limits=(0, 60_000)
    )
    fault_rate: float = setting(0.0, "SIMULATED: fraction of the steps of a session that fail", limits=(0, 1))
    fault_kinds: str = setting(
        DEFAULT_FAULT_KINDS,
        "SIMULATED: how they fail, with weights: unavailable (an error frame: "
        "the step was not executed), disconnect, hang",
    )
    fault_seed: int = setting(0, "SIMULATED: seed of the faults")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, limits, choices = getattr(self, each.name), each.metadata["limits"], each.metadata["choices"]
            if limits and not limits[0] <= value <= limits[1]:
                raise ConfigError(f"{self.named(each.name)} is {value}; allowed: {limits[0]} to {limits[1]}")
            if choices and value not in choices:
                raise ConfigError(f"{self.named(each.name)} is {value!r}; allowed: {', '.join(choices)}")
        if not is_loopback_host(self.host) and not self.token:
            where = f"{self.named('host')} is {self.host!r}, not a loopback address"
            raise ConfigError(f"{where}; it needs {self.named('token')}")
        if problem := certificate_problem(self.tls_cert, self.tls_key, self.tls_names):
            raise ConfigError(problem)
        try:
            self.injected.described()
        except ValueError as error:
            raise ConfigError(f"{self.named('fault_kinds')}: {error}") from None

    @property
    def tls_names(self) -> tuple[str, str]:
        """How messages name the settings of certificate and key."""
        return self.named("tls_cert"), self.named("tls_key")

    @property
    def injected(self) -> InjectedFaults:
        """The simulated trouble that is asked for."""
        return InjectedFaults(self.step_latency_ms, self.fault_rate, self.fault_kinds, self.fault_seed)

    @classmethod
    def flag(cls, name: str) -> str:
        """Return the flag of a setting, without its dashes."""
        return cls.FLAGS.get(name, name).replace("_", "-")

    @classmethod
    def variable(cls, name: str) -> str:
        """Return the variable of a setting."""
        return cls.UNPREFIXED.get(name) or cls.PREFIX + cls.flag(name).replace("-", "_").upper()

    @classmethod
    def named(cls, name: str) -> str:
        """Return how messages name a setting: variable and flag."""
        return f"{cls.variable(name)} (--{cls.flag(name)})"


C = TypeVar("C", bound=ServerConfig)


def _convert(kind: type[ServerConfig], found: Field[Any], text: str) -> str | int | float | bool:
    wanted = str(found.type)
    try:
        return _BOOLEANS[text.lower()] if wanted == "bool" else {"str": str, "int": int, "float": float}[wanted](text)
    except (ValueError, KeyError):
        raise ConfigError(f"{kind.named(found.name)} is {text!r}; it must be {wanted}") from None


def from_environment(kind: type[ServerConfig], environ: Mapping[str, str]) -> dict[str, str | int | float | bool]:
    """Read the settings in the variables. Raises ConfigError on an unknown name with the prefix, or a bad value."""
    kinds = {kind.variable(each.name): each for each in fields(kind)}
    found: dict[str, str | int | float | bool] = {}
    for variable, text in environ.items():
        meant = kinds.get(variable)
        if meant is not None:
            found[meant.name] = _convert(kind, meant, text)
        elif variable.startswith(kind.PREFIX) and variable.removeprefix(kind.PREFIX) not in kind.FOREIGN:
            raise ConfigError(f"unknown setting {variable} (known: {', '.join(sorted(kinds))})")
    return found


def add_arguments(parser: argparse._ActionsContainer, kind: type[ServerConfig]) -> None:
    """Add one flag per setting; a flag that is not given leaves the variable or the default in force."""
    for each in fields(kind):
        about = f"{each.metadata['about']} ({kind.variable(each.name)}; default: {each.default!r})"
        parser.add_argument(f"--{kind.flag(each.name)}", dest=each.name, default=None, help=about.replace("%", "%%"))


def resolve(arguments: argparse.Namespace, kind: type[C], environ: Mapping[str, str] | None = None) -> C:
    """Combine defaults, then variables, then flags. Raises ConfigError."""
    settings = from_environment(kind, os.environ if environ is None else environ)
    for each in fields(kind):
        text = getattr(arguments, each.name)
        if text is not None:
            settings[each.name] = _convert(kind, each, text)
    return kind(**settings)  # pyright: ignore[reportArgumentType]


def parse(argv: Sequence[str], kind: type[C], environ: Mapping[str, str] | None = None) -> C:
    """Return the configuration from a command line of server flags alone."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, kind)
    return resolve(parser.parse_args(argv), kind, environ)
