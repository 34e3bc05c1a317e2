"""Options of the schedulers that use joined hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from realhf.api.config import ADDRESS_WANTED, is_invalid_address
from realhf.api.option import option
from realhf.base.text import suggest_names
from realhf.cluster.placement import LAUNCHER, find_placed_host, kind_of

HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass
class ClusterOptions:
    """Control endpoint for host agents, expected hosts, and placement of workers."""

    address: str = option(
        "", "Host agents reach the launcher at this address of its machine (its network.bind)."
    )
    port: int = option(
        7788,
        "Port of the control endpoint for host agents; 0: any free port.",
        at_least=0,
        at_most=65535,
    )
    key_file: str = option(
        "~/.realhf/cluster.key",
        "The launcher's own file of keys: those of its endpoint, and the public keys of known hosts; "
        "created if it does not exist.",
    )
    hosts: list[str] = option([], "Names of hosts; the run begins when they have joined.")
    min_hosts: int = option(
        1, "Number of hosts; the run begins when at least this many have joined.", at_least=0
    )
    wait_s: float = option(120.0, "Timeout in seconds for the expected hosts to join.", above=0)
    dead_after_s: float = option(
        7.0,
        "A host that is silent for this many seconds is lost. Below rpc.dead_after_s, errors name the "
        "host instead of its workers.",
        at_least=3,
        at_most=40,
    )
    placement: dict[str, str] = option(
        {},
        "Host of each worker, by kind (generation), name (generation/1) or pattern; 'launcher' is "
        "this machine.",
    )
    joining: dict[str, int] = option(
        {"rollout_worker": 1, "generation": 1},
        "Number of additional workers of each kind for a host that joins a running asynchronous run.",
    )
    differing_hosts: str = option(
        "refuse",
        "Action for a host whose files of this package, or versions of torch, transformers or "
        "tokenizers, differ from this machine's.",
        choices=("refuse", "warn"),
    )
    one_gpu_each: bool = option(
        True,
        "Whether a computing worker on a joined host sees only one GPU; false: it sees all of them.",
    )
    carry_mb: float = option(
        512.0,
        "Maximum size in MB of weights, data and code that are sent to a host without fileroot.",
        at_least=0,
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield errors of these options, each naming its option."""
        if is_invalid_address(self.address):
            yield f"{name}.address={self.address}: {ADDRESS_WANTED}"
        for host in self.hosts:
            if not HOST_NAME.fullmatch(host) or host == LAUNCHER:
                yield (
                    f"{name}.hosts: no host can have the name {host!r}; use letters, digits, _, - "
                    "and ."
                )
        for kind, count in self.joining.items():
            if kind not in ELASTIC:
                yield f"{name}.joining.{kind}: only {' and '.join(ELASTIC)} can join a running run"
            elif count < 0:
                yield f"{name}.joining.{kind}={count}: must be at least 0"
        for worker, host in self.placement.items():
            if host != LAUNCHER and not HOST_NAME.fullmatch(host):
                yield f"{name}.placement.{worker}={host}: no host can have this name"
            elif worker == "master" and host != LAUNCHER:
                yield f"{name}.placement.master={host}: the master runs on the launcher's machine"


@dataclass
class EngineOptions(ClusterOptions):
    """``ClusterOptions`` with other defaults where an engine starts the agents and gives them
    endpoint and keys."""

    port: int = option(
        0,
        "Port of the control endpoint for host agents; 0: any free port.",
        at_least=0,
        at_most=65535,
    )
    key_file: str = option(
        "",
        "The launcher's own file of keys, for hosts that join in addition to those of the engine; "
        "empty: keys are generated for each run and never stored on a disk.",
    )


def placement_problems(options: ClusterOptions, workers: Sequence[str]) -> Iterator[str]:
    """Yield an error for each entry of ``placement`` that matches neither the name nor the kind of
    any worker in ``workers``."""
    kinds = sorted({kind_of(name) for name in workers})
    for pattern in options.placement:
        if kind_of(pattern) not in kinds and not any(
            fnmatchcase(name, pattern) for name in workers
        ):
            yield f"placement.{pattern}: this run has no such worker{suggest_names(pattern, kinds)}"


def elsewhere(options: ClusterOptions, name: str) -> bool:
    """Return whether the worker ``name`` will run on a joined host: because of ``placement``, or
    because it is a generation worker and hosts are expected to join."""
    if host := find_placed_host(name, options.placement):
        return host != LAUNCHER
    return kind_of(name) == "generation" and bool(options.hosts or options.min_hosts)


ELASTIC = ("rollout_worker", "generation")
"""Kinds of workers that may join and leave a running asynchronous run."""
