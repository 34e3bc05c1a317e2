"""Starts the processes of a run on several hosts.

On every host runs a *host agent* (``agent.py``, ``python -m realhf.worker --join``). It connects to the *control
endpoint* of the launcher (``control_endpoint.py``) with the cluster's keys and says what its host has. Then it starts,
watches and ends workers as it is told, through ``LocalScheduler``. The launcher's end is ``ClusterScheduler``, a
``Scheduler`` like any other. It decides which worker goes to which host, and reports exits, also of workers whose host
has vanished.

Who starts the agents is not the scheduler's business: with ``scheduler=join`` a person or a batch system does. A
launcher that starts them itself is an ``AgentStarter`` (``scheduler.py``), and shares everything else.
"""
