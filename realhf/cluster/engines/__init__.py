"""Starts host agents by systems that own machines, one module or two for each: Ray, Slurm, Kubernetes.

Each of them starts ``python -m realhf.worker --join`` and nothing else; what happens then is the business of
``realhf.cluster``. Ray and ``srun`` run below a process of their own (``engine_process``), so that the launcher neither
imports Ray nor waits for it.
"""
