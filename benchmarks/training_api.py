"""Measures the training API: a LoRA step beside PEFT in a plain loop, two clients beside one, and
what a client costs.

    .venv-tinker/bin/python benchmarks/training_api.py models/smollm2_135m --steps 6

It starts a server of its own. Each figure is the median of the steps after the first; the plain
loop and the server compute the same losses on the same sequences, in turns, and the ratio is told.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

SEQUENCES = 16
RANK = 16
RATE = 1e-4
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def sequences(shared: bool, seed: int, vocabulary: int = 40_000) -> list[list[int]]:
    """Return random token ids: sequences of different lengths or, if ``shared``, two groups that
    share a prompt of 128 tokens."""
    draw = random.Random(seed)
    tokens = lambda n: [draw.randrange(vocabulary) for _ in range(n)]
    if not shared:
        return [tokens(draw.randint(48, 256)) for _ in range(SEQUENCES)]
    prompts = [tokens(128), tokens(128)]
    return [prompts[i % 2] + tokens(draw.randint(16, 96)) for i in range(SEQUENCES)]


class PlainLoop:
    """Baseline with PEFT and transformers: one padded batch and one AdamW step."""

    def __init__(self, model: str, threads: int) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        torch.manual_seed(1)
        options = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules=TARGETS, lora_dropout=0.0)
        self._model = peft.get_peft_model(base, options)
        own = [p for p in self._model.parameters() if p.requires_grad]
        self._adam = torch.optim.AdamW(own, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def step(self, data: list[list[int]]) -> float:
        """Take a step and return the sum of the losses before it."""
        width = max(map(len, data))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in data])
        mask = torch.arange(width)[None] < torch.tensor([len(row) for row in data])[:, None]
        logits = self._model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1].long()).logits
        labels = ids[:, 1:].masked_fill(~mask[:, 1:], -100)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        loss.backward()
        self._adam.step()
        self._adam.zero_grad()
        return float(loss)


class Client:
    """Client of the server at ``url``, using the package ``tinker``."""

    def __init__(self, url: str, key: str) -> None:
        import tinker

        self._types = tinker.types
        self._service = tinker.ServiceClient(base_url=url, api_key=key)
        served = (
            tinker.RestClient(base_url=url, api_key=key)
            .get_server_capabilities()
            .result()
            .supported_models
        )
        create = self._service.create_lora_training_client
        name = served[0].model_name
        self._model = create(
            name, rank=RANK, seed=1, train_unembed=False
        ).result()  # same settings as in the plain loop

    def step(self, data: list[list[int]]) -> float:
        """Take a step and return the sum of the losses before it."""
        types = self._types
        batch = [
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
            )
            for row in data
        ]
        passed = self._model.forward_backward(batch, "cross_entropy")
        adam = types.AdamParams(learning_rate=RATE, beta1=0.9, beta2=0.95, eps=1e-8)
        self._model.optim_step(adam).result()
        return passed.result().metrics["loss:sum"]


def timed(work: Callable[[], float]) -> tuple[float, float]:
    """Return (result of ``work``, its wall seconds)."""
    began = time.perf_counter()
    value = work()
    return value, time.perf_counter() - began


def beside_peft(url: str, model: str, steps: int, threads: int) -> None:
    """Print the seconds of a step with PEFT and with the server, and the difference of their
    losses."""
    for shared in (False, True):
        plain, served = PlainLoop(model, threads), Client(url, "tml-benchmark-of-steps")
        seconds: dict[str, list[float]] = {"plain": [], "served": []}
        apart = 0.0
        for number in range(steps + 1):
            data = sequences(shared, number)
            one, of_plain = timed(lambda plain=plain, data=data: plain.step(data))
            other, of_served = timed(lambda served=served, data=data: served.step(data))
            apart = max(apart, abs(one - other) / one)
            if number:
                seconds["plain"].append(of_plain)
                seconds["served"].append(of_served)
        plain_s, served_s = (statistics.median(values) for values in seconds.values())
        what = "two groups with a common prompt" if shared else "ragged sequences"
        print(
            f"{what}: PEFT {plain_s:.2f} s, served {served_s:.2f} s a step: "
            f"{served_s / plain_s:.2f} of its time; "
            f"losses differ by {apart:.1e}",
            flush=True,
        )


def two_clients(url: str, steps: int, memory: Callable[[], float]) -> None:
    """Print the speed of two concurrent clients relative to a single one, and the memory of the
    second."""
    data = [sequences(False, number) for number in range(steps + 1)]

    def run(client: Client) -> float:
        return timed(lambda: sum(client.step(each) for each in data[1:]))[1]

    clients = [Client(url, "tml-benchmark-of-clients")]
    clients[0].step(data[0])
    before = memory()
    clients.append(Client(url, "tml-benchmark-of-clients"))
    clients[1].step(data[0])
    grown = memory() - before
    alone = run(clients[0])
    with ThreadPoolExecutor(2) as pool:
        _, together = timed(lambda: sum(pool.map(run, clients)))
    print(
        f"two clients at once: {2 * alone / together:.2f} of the speed of one alone, summed over "
        f"both; the second one "
        f"costs {grown:.0f} MiB",
        flush=True,
    )


def main() -> None:
    """Start a server and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        command = [
            sys.executable,
            "-m",
            "realhf.tinker",
            "--model",
            arguments.model,
            "--root",
            root,
            "--port",
            "0",
        ]
        command += ["--threads", str(arguments.threads)]
        with Path(root, "log.txt").open("w") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line.startswith("train-api: "):
                sys.exit(Path(root, "log.txt").read_text()[-2000:])
            url, family = line.split()[1], psutil.Process(server.pid)
            memory = lambda: sum(p.memory_info().rss for p in family.children()) / 2**20
            beside_peft(url, arguments.model, arguments.steps, arguments.threads)
            two_clients(url, arguments.steps, memory)
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    main()
