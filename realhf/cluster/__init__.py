"""Execution of a run on several hosts.

On every host runs a *host agent* (``agent.py``, ``python -m realhf.worker --join``). It connects to
the *control endpoint* of the launcher (``control_endpoint.py``) with the keys of the cluster and
registers its resources. Then it starts, watches and ends workers on request, through
``LocalScheduler``. The launcher uses ``ClusterScheduler``, an implementation of ``Scheduler``. It
decides which worker runs on which host, and reports exits, including those of workers whose host
was lost.

With ``scheduler=join`` a person or a batch system starts the agents. A launcher that starts them
itself passes an ``AgentStarter`` (``scheduler.py``) to ``ClusterScheduler``.
"""
