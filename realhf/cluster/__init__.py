"""Execution of a run on several hosts.

On every host runs a *host agent* (``agent.py``, ``python -m realhf.worker --join``). It connects to
the *control endpoint* of the launcher (``control_endpoint.py``) with the keys of the cluster and
registers its resources. Then it starts, watches and ends workers on request, through
``LocalScheduler``. The launcher's side is ``ClusterScheduler``, a ``Scheduler`` like any other. It
decides which worker runs on which host, and reports exits, including those of workers whose host is
lost.

The scheduler does not start the agents: with ``scheduler=join`` a person or a batch system does. A
launcher that starts them itself provides an ``AgentStarter`` (``scheduler.py``) and shares
everything else.
"""
