"""A trainer of your own on the trajectory server: it pulls batches, takes a step of REINFORCE and acknowledges them.

    python examples/own_trainer.py [STEPS]

A server and a producer run beside it. The policy is a table of next-token logits; the score of a sequence is the share
of token 7 in it. The mean score rises from about 0.06 towards 1.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from realhf.trajectory.client import TrajectoryClient, TrajectoryError

VOCABULARY, LENGTH, GROUP, BATCH, WANTED = 16, 8, 8, 32, 7


@contextmanager
def trajectory_server() -> Iterator[str]:
    """The address of a server that keeps its queue in memory; it ends with the block."""
    command = [sys.executable, "-m", "realhf.trajectory", "--store", "memory", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield next(found[1] for line in process.stderr if (found := re.search(r"running on (http\S+)", line)))
        finally:
            process.terminate()


def produce(url: str, logits: torch.Tensor) -> None:
    """Play with the newest weights and push groups, as fast as the server wants them, until all steps are done."""
    with TrajectoryClient(url, retry_for_s=0) as client, suppress(TrajectoryError):  # the server ends with the trainer
        client.register_env("sevens", group_size=GROUP, max_token_length=LENGTH + 1)
        while not client.wait_for_room(timeout_s=60).done:
            tokens = torch.zeros(GROUP, LENGTH + 1, dtype=torch.long)  # token 0 is the prompt
            for position in range(LENGTH):
                tokens[:, position + 1] = torch.multinomial(logits.detach()[tokens[:, position]].softmax(-1), 1)[:, 0]
            masks, scores = [[-100, *row[1:]] for row in tokens.tolist()], (tokens[:, 1:] == WANTED).float().mean(1)
            client.push({"tokens": tokens.tolist(), "masks": masks, "scores": scores.tolist()})


def loss_of(logits: torch.Tensor, groups: list[dict[str, Any]]) -> torch.Tensor:
    """REINFORCE with the group's mean as the baseline. Every token after the prompt counts, so masks are not needed."""
    loss = torch.zeros(())
    for group in groups:
        tokens, scores = torch.tensor(group["tokens"]), torch.tensor(group["scores"])
        logprobs = logits[tokens[:, :-1]].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        loss = loss - ((scores - scores.mean())[:, None] * logprobs).mean() / len(groups)
    return loss


def main(steps: int = 40) -> list[float]:
    """Train for ``steps`` steps; returns the mean score of each batch."""
    logits, means = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True), []
    optimizer = torch.optim.Adam([logits], lr=0.2)
    with trajectory_server() as url, TrajectoryClient(url, binary=False, explicit_acks=True) as client:
        client.register(batch_size=BATCH, max_token_len=LENGTH + 1, num_steps=steps)
        threading.Thread(target=produce, args=(url, logits), daemon=True).start()
        for step in range(1, steps + 1):
            batch = client.pull(timeout_s=60)
            optimizer.zero_grad()
            loss_of(logits, batch.groups).backward()
            optimizer.step()
            client.ack(batch.lease_id)  # a batch that is not acknowledged comes again
            client.set_policy_version(step)
            means.append(sum(sum(group["scores"]) for group in batch.groups) / batch.n_sequences)
            print(f"step {step}: {batch.n_sequences} sequences, mean score {means[-1]:.2f}")
    return means


if __name__ == "__main__":
    if any(not text.isdecimal() for text in sys.argv[1:]):
        sys.exit("give the number of steps, as in: own_trainer.py 20")
    main(*map(int, sys.argv[1:2]))
