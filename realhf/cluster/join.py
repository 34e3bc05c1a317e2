"""Is ``scheduler=join``: host agents are started by a person, a batch system or a cluster, and join the launcher."""

from __future__ import annotations

from realhf.cluster.options import ClusterOptions, elsewhere, placement_problems
from realhf.cluster.scheduler import ClusterScheduler
from realhf.scheduler.base import SchedulerDefinition

DEFINITION = SchedulerDefinition(
    ClusterOptions, ClusterScheduler, several_hosts=True, problems=placement_problems, elsewhere=elsewhere
)
