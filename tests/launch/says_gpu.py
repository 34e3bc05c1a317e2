"""A worker that says which GPUs it sees."""

import os

print(f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}")
