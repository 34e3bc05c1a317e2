"""Starters of host agents through Ray, Slurm and Kubernetes.

Each of them only starts ``python -m realhf.worker --join``; ``realhf.cluster`` does the rest. Ray
and ``srun`` run in a helper process (``engine_process``), so that the launcher neither imports Ray
nor waits for it.
"""
