"""Defines the section ``env`` of experiments on the AWS environment, and the server that it describes. Source:
docs/reference/environment.md 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from realhf.api.config.option import option
from realhf.api.environment import EnvironmentService
from realhf.aws.tasks.loader import training_tags
from realhf.aws.tasks.task import TIERS, TaskError
from realhf.env.server.config import DEFAULT_KINDS


@dataclass
class AwsOptions:
    """The AWS environment server that the launcher starts, and the tasks that are trained on.

    SIMULATED trouble, for tests and benchmarks: step_latency_ms and the options whose names start with fault."""

    path: str = option("aws", "The environment is this one.", choices=("aws",))
    pool_size: int = option(
        16, "This many sessions can be open at once, each with a simulator of its own.", at_least=1, on_resume="free"
    )
    host: str = option("127.0.0.1", "The server listens on this address.", on_resume="free")
    port: int = option(
        0, "The server listens on this port; 0 is any free one.", at_least=0, at_most=65535, on_resume="free"
    )
    ministack_base_port: int = option(
        0,
        "The simulators listen on this port and those after it; 0 is any free ones.",
        at_least=0,
        at_most=65535,
        on_resume="free",
    )
    max_steps: int = option(15, "The server ends an episode after this many commands.", at_least=1)
    tiers: list[str] = option(
        ["warmup", "beginner", "intermediate"], "Tasks of these tiers are trained on.", choices=TIERS
    )
    tags: list[str] | None = option(
        None,
        "Templates with any of these tags are trained on, with [] all; without a list the tag 'starter', what the "
        "built-in policy can learn, where each of the tiers has such templates, else all.",
    )
    chaos: bool = option(False, "Training and evaluation episodes may be perturbed (docs/reference/environment.md 7).")
    step_latency_ms: float = option(
        0.0, "SIMULATED: every step takes these milliseconds longer.", at_least=0, on_resume="free"
    )
    fault_rate: float = option(
        0.0, "SIMULATED: this fraction of the steps fails.", at_least=0, at_most=1, on_resume="warns"
    )
    fault_kinds: str = option(
        DEFAULT_KINDS,
        "SIMULATED: steps fail in these ways (unavailable, disconnect, hang), with weights.",
        on_resume="warns",
    )
    fault_seed: int = option(0, "SIMULATED: which steps fail is drawn from this seed.", on_resume="warns")

    def problems(self, name: str) -> Iterator[str]:
        """Yield tags that a tier does not have, and details of faults that nobody asked for."""
        if not self.fault_rate and (self.fault_kinds, self.fault_seed) != (DEFAULT_KINDS, 0):
            yield f"{name}.fault_kinds, {name}.fault_seed: no effect without {name}.fault_rate"
        if not self.tiers:
            yield f"{name}.tiers=[]: name at least one tier"
        elif self.tags is not None:
            try:
                training_tags(self.tiers, self.tags)
            except TaskError as error:
                yield f"{name}.tags={self.tags}: {error}"


def environment_server(options: AwsOptions) -> EnvironmentService:
    """Return the server of a run."""
    argv = ["--pool-size", str(options.pool_size), "--ministack-base-port", str(options.ministack_base_port)]
    argv += ["--max-steps", str(options.max_steps)]
    if options.step_latency_ms:
        argv += ["--step-latency-ms", str(options.step_latency_ms)]
    if options.fault_rate:
        argv += ["--fault-rate", str(options.fault_rate), "--fault-kinds", options.fault_kinds]
        argv += ["--fault-seed", str(options.fault_seed)]
    return EnvironmentService("workers.env_worker", tuple(argv), host=options.host, port=options.port)
