"""Runs the server of the AWS environment as a child process, for benchmarks, notebooks and tests."""

from __future__ import annotations

from realhf.env.server.process import ServerProcess


class EnvServerProcess(ServerProcess):
    """Runs ``python -m workers.env_worker`` with ``pool_size`` simulators on free ports; see ``ServerProcess``."""

    def __init__(self, pool_size: int, *arguments: str, timeout_s: float = 60.0) -> None:
        super().__init__("--ministack-base-port", "0", "--pool-size", str(pool_size), *arguments, timeout_s=timeout_s)
