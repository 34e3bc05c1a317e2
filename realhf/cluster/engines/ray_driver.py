"""Helper process that starts host agents through Ray: ``python -m
realhf.cluster.engines.ray_driver``.

Each failure domain is a placement group: one with a single bundle for the trainers (STRICT_PACK),
and one with a bundle for each rollout host (SPREAD). Each bundle gets one actor (``RayAgent``),
which Ray never restarts: the launcher handles lost hosts. Ray only starts and ends agents.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from realhf.base import process_clock
from realhf.base.installation import install_command
from realhf.cluster.engines.engine_process import serve
from realhf.cluster.placement import ClusterError

ADDRESS = re.compile(r"[A-Za-z0-9._-]+:[0-9]{1,5}")
REACH_S = 5.0
NO_RAY = f"scheduler=ray: Ray is not installed here: {install_command('ray')}"


def check_reachable(address: str) -> None:
    """Raise ClusterError if nothing listens at ``address``. Ray itself would retry for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error) or f"no answer within {REACH_S:g} s"
        raise ClusterError(
            f"scheduler.ray={address}: no Ray cluster is reached there: {reason}"
        ) from None


CALL_S = 10.0
OWN_CLUSTER_S = 30.0
OBJECT_STORE_BYTES = 80 << 20
"""Size of Ray's object store in bytes. It stays empty, but Ray requires at least 75 MB."""


class RayEngine:
    """``AgentEngine`` for a running Ray cluster, or for a new private one on this machine.

    The new cluster serves only this run; it has its own ports and folder.
    """

    def __init__(self) -> None:
        self._groups: list[Any] = []
        self._agents: dict[str, Any] = {}
        self._bundles: dict[str, tuple[Any, int]] = {}
        self._folder = ""

    def start(self, plan: Mapping[str, Any]) -> None:
        """Start the agents of ``plan``.

        ``plan`` has the entries ``address`` (HOST:PORT of the Ray cluster; "" for a new one),
        ``endpoint``, ``keys`` ({agent: text of its key file}), ``limit_s``, and ``domains``, a list
        of (placement strategy, {agent: resources}). Raises ClusterError, after which no agent runs.
        """
        address = str(plan["address"])
        if not address:
            self._folder = _prepare_private_cluster()
        ray = _import_ray()
        deadline = process_clock.now() + float(plan["limit_s"])
        calls: dict[str, Any] = {}
        try:
            self._connect(address, deadline)
            for strategy, bundles in plan["domains"]:
                self._place(strategy, bundles, deadline)
            calls = {
                name: self._agents[name].start.remote(plan["endpoint"], keys)
                for name, keys in plan["keys"].items()
            }
            ray.get([*calls.values()], timeout=max(1.0, deadline - process_clock.now()))
        except ray.exceptions.GetTimeoutError:
            self.stop()
            raise ClusterError(
                f"Ray did not start the host agents within {plan['limit_s']:g} s"
            ) from None
        except ray.exceptions.RayError as error:
            who = self._describe_failed_agent(calls)
            self.stop()
            raise ClusterError(f"Ray cannot start {who}: {_last_line(error)}") from None
        except BaseException:
            self.stop()
            raise

    def problem(self) -> str:
        """See ``AgentEngine``. Queries all actors at once."""
        ray = _import_ray()
        try:
            calls = [agent.problem.remote() for agent in self._agents.values()]
            return next((text for text in ray.get(calls, timeout=CALL_S) if text), "")
        except ray.exceptions.GetTimeoutError:
            return ""  # a host is busy; the launcher's control endpoint decides whether it is lost
        except ray.exceptions.RayError as error:
            return f"Ray lost a host agent: {_last_line(error)}"

    def stop(self) -> None:
        """See ``AgentEngine``. Does not affect other users of the cluster."""
        if not self._agents and not self._groups and not self._folder:
            return
        ray = _import_ray()
        with contextlib.suppress(Exception):
            ray.wait(
                [agent.stop.remote() for agent in self._agents.values()],
                num_returns=len(self._agents),
                timeout=8,
            )
        for agent in self._agents.values():
            with contextlib.suppress(Exception):
                ray.kill(agent)
        for group in self._groups:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(group)
        self._agents = {}
        self._bundles = {}
        self._groups = []
        with contextlib.suppress(Exception):
            ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def _connect(self, address: str, deadline: float) -> None:
        ray = _import_ray()
        logging.getLogger("ray").setLevel(logging.ERROR)

        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if address:
            check_reachable(address)
            _check_local_node(address)
            options["address"] = address
        else:
            options |= {
                "address": "local",
                "_temp_dir": self._folder,
                "include_dashboard": False,
                "num_cpus": len(os.sched_getaffinity(0)),
                "object_store_memory": OBJECT_STORE_BYTES,
                # Otherwise Ray would kill our workers when it considers the host's memory full.
                "_system_config": {"memory_monitor_refresh_ms": 0},
            }
        while True:
            try:
                ray.init(**options)
                return
            except Exception as error:
                ray.shutdown()
                # Ray allows a new cluster 30 s to start, which may not suffice on a busy machine.
                if address or process_clock.now() > deadline - OWN_CLUSTER_S:
                    where = (
                        f"the Ray cluster at {address} (scheduler.ray)"
                        if address
                        else "a Ray cluster of its own"
                    )
                    raise ClusterError(
                        f"scheduler=ray: cannot use {where}: {_last_line(error)}"
                    ) from None

    def _describe_failed_agent(self, calls: Mapping[str, Any]) -> str:
        """Describe the host agent that could not be started, and its node."""
        ray = _import_ray()
        agent = "a host agent"
        with contextlib.suppress(Exception):
            ended, _ = ray.wait([*calls.values()], num_returns=len(calls), timeout=0)
            for name, call in calls.items():
                try:
                    ray.get([call] if call in ended else [])
                except ray.exceptions.RayError:
                    agent = f"the host agent {name}"
                    group, index = self._bundles[name]
                    node = ray.util.placement_group_table(group)["bundles_to_node_id"][index]
                    return (
                        f"{agent} on "
                        f"{next(_name(each) for each in ray.nodes() if each['NodeID'] == node)}"
                    )
        return agent

    def _place(
        self, strategy: str, bundles: Mapping[str, Mapping[str, float]], deadline: float
    ) -> None:
        ray = _import_ray()
        strategies = import_module("ray.util.scheduling_strategies")
        nodes = [node for node in ray.nodes() if node["Alive"]]
        for name, needs in bundles.items():
            if not any(
                all(node["Resources"].get(kind, 0) >= n for kind, n in needs.items())
                for node in nodes
            ):
                needed = _describe_resources(needs)
                nodes_text = _describe_nodes(nodes)
                raise ClusterError(
                    f"no node of the Ray cluster can ever hold {name} ({needed}): {nodes_text}"
                )
        group = ray.util.placement_group(
            [dict(needs) for needs in bundles.values()], strategy=strategy
        )
        self._groups.append(group)
        if not group.wait(max(1.0, deadline - process_clock.now())):
            needed = "; ".join(
                f"{name} ({_describe_resources(needs)})" for name, needs in bundles.items()
            )
            free = _describe_resources(ray.available_resources())
            raise ClusterError(
                f"Ray found no room for {needed} in time (scheduler.wait_s); free now: {free}; "
                f"{_describe_nodes(nodes)}"
            )
        # Ray imports this class by name on the node, where the package is installed for the
        # workers.
        from realhf.cluster.engines.ray_agent import RayAgent

        for index, (name, needs) in enumerate(bundles.items()):
            where = strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            )
            remote = ray.remote(RayAgent).options(
                num_cpus=needs.get("CPU", 0),
                num_gpus=needs.get("GPU", 0),
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=where,
            )
            self._agents[name] = remote.remote(name)
            self._bundles[name] = group, index


def _prepare_private_cluster() -> str:
    """Create and return a folder for a new Ray cluster, and configure Ray to listen on the loopback
    interface and to require a token.

    Must be called before Ray is imported. The token is needed because other users of this machine
    can connect to the loopback interface, and any client of a Ray cluster can run programs as its
    owner.
    """
    # The path must be short: Ray's sockets are in this folder, and socket paths are limited to 107
    # characters.
    folder = tempfile.mkdtemp(prefix="realhf-ray-", dir="/tmp")
    token = Path(folder) / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    # This makes Ray use 127.0.0.1 as its node's address, as it does on systems without cluster
    # support. It does not accept a loopback address as an argument.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return folder


def _import_ray() -> Any:
    """Import Ray, an optional dependency. Raises ClusterError if it is not installed."""
    try:
        return import_module("ray")
    except ImportError:
        raise ClusterError(NO_RAY) from None


def _check_local_node(address: str) -> None:
    """Raise ClusterError if this machine is not a node of a Ray cluster.

    Otherwise Ray would search for its node for a minute; versions before 2.60 search differently
    and fail soon.
    """
    find = getattr(import_module("ray._private.services"), "find_node_ids", None)
    if find is not None and not find():
        raise ClusterError(
            f"scheduler.ray={address}: no node of Ray runs on this machine, which has to be part "
            f"of the cluster: "
            f"ray start --address={address}"
        )


def _describe_resources(resources: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if resources.get(kind))
        or "nothing"
    )


def _describe_nodes(nodes: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(
        f"{_name(node)} has {_describe_resources(node['Resources'])}" for node in nodes
    )


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:1000]


if __name__ == "__main__":
    serve(RayEngine())
