"""Options of schedulers that use joined hosts."""

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
        "The control endpoint for host agents listens on this port; 0: any.",
        at_least=0,
        at_most=65535,
    )
    key_file: str = option(
        "~/.realhf/cluster.key",
        "The launcher's own file of keys: its endpoint's, and whose hosts' it knows; made when it "
        "does not exist.",
    )
    hosts: list[str] = option([], "The run begins when these hosts have joined, by their names.")
    min_hosts: int = option(
        1, "The run begins when at least so many hosts have joined.", at_least=0
    )
    wait_s: float = option(120.0, "Hosts that are waited for join within these seconds.", above=0)
    dead_after_s: float = option(
        7.0,
        "A host that says nothing for these seconds is lost; below rpc.dead_after_s, hosts are "
        "named and not workers.",
        at_least=3,
        at_most=40,
    )
    placement: dict[str, str] = option(
        {},
        "Workers, by kind (generation), name (generation/1) or pattern, and their host; 'launcher' "
        "is this machine.",
    )
    joining: dict[str, int] = option(
        {"rollout_worker": 1, "generation": 1},
        "A host that joins a running asynchronous run gets so many more workers of each kind.",
    )
    differing_hosts: str = option(
        "refuse",
        "What becomes of a host that has other files of this package than this machine, or another "
        "torch, transformers "
        "or tokenizers.",
        choices=("refuse", "warn"),
    )
    one_gpu_each: bool = option(
        True, "A worker on a joined host that computes sees one GPU there; false: all of them."
    )
    carry_mb: float = option(
        512.0,
        "Weights, data and code of at most this size go to a host that does not share fileroot.",
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
        "The control endpoint for host agents listens on this port; 0: any.",
        at_least=0,
        at_most=65535,
    )
    key_file: str = option(
        "",
        "The launcher's own file of keys, for hosts that join beside those of the engine; empty: "
        "keys are drawn for "
        "each run, and lie on no disk.",
    )


def placement_problems(options: ClusterOptions, workers: Sequence[str]) -> Iterator[str]:
    """Yield an error for each entry of ``placement`` that matches no worker of the run, nor the
    kind of one."""
    kinds = sorted({kind_of(name) for name in workers})
    for pattern in options.placement:
        if kind_of(pattern) not in kinds and not any(
            fnmatchcase(name, pattern) for name in workers
        ):
            yield f"placement.{pattern}: this run has no such worker{suggest_names(pattern, kinds)}"


def elsewhere(options: ClusterOptions, name: str) -> bool:
    """Return whether a worker will run on a joined host: by ``placement``, or for generation if one
    is expected."""
    if host := find_placed_host(name, options.placement):
        return host != LAUNCHER
    return kind_of(name) == "generation" and bool(options.hosts or options.min_hosts)


ELASTIC = ("rollout_worker", "generation")
"""Kinds of workers that may join and leave a running asynchronous run."""
