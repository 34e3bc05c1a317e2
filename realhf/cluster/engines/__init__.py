"""Starters of host agents through Ray, Slurm and Kubernetes.

Each of them only starts ``python -m realhf.worker --join`` on the hosts; ``realhf.cluster`` does
the rest. A helper process (``engine_process``) uses Ray or runs ``srun``, so that the launcher
neither imports Ray nor waits for it.
"""
