"""Scheduler ``scheduler=ray``, which uses the launcher's own machine and hosts that Ray
allocates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from realhf.api.option import option
from realhf.cluster.cluster_keys import HostKeys
from realhf.cluster.engines.engine_process import HelperStarter
from realhf.cluster.engines.ray_driver import ADDRESS, NO_RAY, check_reachable
from realhf.cluster.options import EngineOptions, elsewhere, placement_problems
from realhf.cluster.placement import ClusterError
from realhf.cluster.scheduler import ClusterScheduler
from realhf.scheduler.base import SchedulerDefinition

TRAINER = "trainer"
PLAYER = "player"


@dataclass
class RayOptions(EngineOptions):
    """The Ray cluster and the resources to request from it. Its hosts join as ``trainer`` and
    ``player-0``, ``player-1``, ..."""

    ray: str = option(
        "",
        "HOST:PORT of a running Ray cluster that this machine belongs to; empty: Ray is started on "
        "this machine, for this run only.",
    )
    players: int = option(
        1, "Number of hosts in addition to the trainer's, on different nodes if possible."
    )
    player_cpus: int = option(1, "Cores of each of these hosts.", at_least=1)
    player_gpus: int = option(0, "GPUs of each of these hosts.", at_least=0)
    trainer_cpus: int = option(
        0,
        "Cores of a host for the workers that train; 0: they run on the launcher's machine.",
        at_least=0,
    )
    trainer_gpus: int = option(0, "GPUs of that host.", at_least=0)

    def problems(self, name: str) -> Iterator[str]:
        """Yield errors of these options. The cluster must have an exact address, because ``auto`` could
        find that of another user."""
        yield from super().problems(name)
        if self.ray and not ADDRESS.fullmatch(self.ray):
            yield f"{name}.ray={self.ray}: give HOST:PORT of the cluster's head"
        if self.players < 0 or self.players + self.trainer_cpus == 0:
            yield f"{name}.players={self.players}: no host is requested from Ray"
        if self.trainer_gpus and not self.trainer_cpus:
            yield (
                f"{name}.trainer_gpus={self.trainer_gpus}: has no effect without "
                f"{name}.trainer_cpus"
            )

    def domains(self) -> list[tuple[str, dict[str, dict[str, float]]]]:
        """Return the failure domains as (Ray placement strategy, {host name: its resources})."""
        domains: list[tuple[str, dict[str, dict[str, float]]]] = []
        if self.trainer_cpus:
            domains.append(
                ("STRICT_PACK", {TRAINER: _resources(self.trainer_cpus, self.trainer_gpus)})
            )
        if self.players:
            each = _resources(self.player_cpus, self.player_gpus)
            domains.append(("SPREAD", {f"{PLAYER}-{index}": each for index in range(self.players)}))
        return domains


def _resources(cpus: int, gpus: int) -> dict[str, float]:
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})


class RayStarter(HelperStarter):
    """``AgentStarter`` that uses Ray in a helper process. The helper ends with the run."""

    def __init__(self, options: RayOptions) -> None:
        self._options = options
        super().__init__("realhf.cluster.engines.ray_driver")
        self.hosts = [name for _, bundles in options.domains() for name in bundles]

    def check(self) -> None:
        """See ``AgentStarter``. Raises ClusterError if Ray is not installed or no cluster answers
        at the address."""
        if self._options.ray:
            check_reachable(self._options.ray)
        if find_spec("ray") is None:
            raise ClusterError(NO_RAY)

    def start_agents(self, endpoint: str, keys: HostKeys) -> None:
        """See ``AgentStarter``. Raises ClusterError if the cluster lacks the resources for the
        hosts or cannot be reached."""
        options = self._options
        plan: dict[str, Any] = {
            "address": options.ray,
            "endpoint": endpoint,
            "keys": {
                name: HostKeys(keys.server_public, {name: own}).text()
                for name, own in keys.hosts.items()
            },
            "limit_s": options.wait_s,
            "domains": options.domains(),
        }
        self._engine.start(plan, 2 * options.wait_s, "the start of host agents by Ray")


def make_scheduler(options: RayOptions) -> ClusterScheduler:
    """Return a scheduler that waits for the hosts that Ray allocates."""
    return ClusterScheduler(_with_hosts(options), RayStarter(options))


def _with_hosts(options: RayOptions) -> RayOptions:
    """Return the options with the hosts that Ray allocates added to ``hosts``, and with the
    trainers assigned to the host ``TRAINER`` if it exists."""
    names = [name for _, bundles in options.domains() for name in bundles]
    placement = {"model_worker": TRAINER} if TRAINER in names else {}
    return replace(options, hosts=[*names, *options.hosts], placement=placement | options.placement)


DEFINITION = SchedulerDefinition(
    RayOptions,
    make_scheduler,
    several_hosts=True,
    problems=placement_problems,
    elsewhere=lambda options, name: elsewhere(_with_hosts(options), name),
)
