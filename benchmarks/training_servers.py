"""Compares ``train-api`` with the training server of SkyRL (JAX), which speaks the same API and runs
without a GPU, too: time, CPU and memory of a step, losses, greedy samples.

    make bench-skyrl

Both servers run at the same time, on all cores that this process may use (``taskset -c 0`` for
one); one client takes steps at them in turns, on the same sequences and from the same adapters:
those of SkyRL's server are saved and loaded here. A step is one ``forward_backward`` and one
``optim_step``; the first, during which JAX compiles, is told on its own. Peak memory is the sum of
the peak resident sizes of a server's processes.

The client is ``tinker`` 0.24.1, the newest that can send the JSON that SkyRL's server reads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

RATE = 1e-4
SKYRL_PYTHON = Path(".venv-skyrl/bin/python")
START_S = 900.0
"""Seconds that a server may take to start; JAX takes minutes on a busy machine."""
ADAPTERS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Server:
    """A running server."""

    name: str
    url: str
    family: psutil.Process
    """Its first process."""
    averages: bool
    """Whether it divides the loss by the number of tokens of a sequence and by that of the
    sequences. The API's loss is a sum, so that the client has to."""

    def _all(self) -> list[psutil.Process]:
        return [self.family, *self.family.children(recursive=True)]

    def cpu_s(self) -> float:
        """Return the CPU seconds of its processes until now."""
        times = [process.cpu_times() for process in self._all()]
        return sum(each.user + each.system for each in times)

    def mib(self, row: str) -> float:
        """Return memory of its processes in MiB: ``VmRSS``, now, or ``VmHWM``, at most."""
        total = 0
        for process in self._all():
            text = Path(f"/proc/{process.pid}/status").read_text()
            total += int(text.split(f"{row}:")[1].split()[0])
        return total / 1024


@dataclass(frozen=True)
class Step:
    """What a step gave."""

    loss: float
    """Mean over sequences of the mean loss of their tokens, before the step."""
    wall_s: float
    cpu_s: float


class TrainingClient:
    """Client of a server: an adapter of its own."""

    def __init__(self, url: str, *, rank: int, averages: bool, seed: int = 1) -> None:
        import tinker

        self._types: Any = tinker.types
        service: Any = tinker.ServiceClient(base_url=url, api_key="tml-benchmark-of-servers")
        name = service.get_server_capabilities().supported_models[0].model_name
        create = service.create_lora_training_client
        self.training = _settle(create(name, rank=rank, seed=seed, train_unembed=False))
        self._averages = averages

    def step(self, data: Sequence[Sequence[int]], loss: str) -> float:
        """Take a step; return the loss before it."""
        batch = [self._types.Datum(**each) for each in self.inputs(data, loss)]
        passed = self.training.forward_backward(batch, loss)
        adam = self._types.AdamParams(learning_rate=RATE, beta1=0.9, beta2=0.95, eps=1e-8)
        stepped = self.training.optim_step(adam)
        rows = [output["logprobs"].tolist() for output in passed.result().loss_fn_outputs]
        stepped.result()
        return statistics.fmean(
            statistics.fmean(_token_loss(logprob, loss, index) for logprob in row)
            for index, row in enumerate(rows)
        )

    def inputs(self, data: Sequence[Sequence[int]], loss: str) -> Iterator[dict[str, Any]]:
        """Yield the fields of each datum, such that both servers compute the same gradient."""
        for index, row in enumerate(data):
            count = len(row) - 1
            scale = 1.0 if self._averages else 1.0 / (len(data) * count)
            inputs: dict[str, Any] = {"target_tokens": list(row[1:])}
            if loss == "cross_entropy":
                inputs["weights"] = [scale] * count
            else:
                inputs["logprobs"] = [SAMPLED_LOGPROB] * count
                inputs["advantages"] = [_advantage(index) * scale] * count
            prompt = self._types.ModelInput.from_ints(list(row[:-1]))
            yield {"model_input": prompt, "loss_fn_inputs": inputs}

    def sample(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Return ``tokens`` greedy tokens after ``prompt``, from the weights of now."""
        sampler = _settle(self.training.save_weights_and_get_sampling_client())
        options = self._types.SamplingParams(max_tokens=tokens, temperature=0.0, seed=1)
        prompted = self._types.ModelInput.from_ints(list(prompt))
        answer = sampler.sample(prompted, num_samples=1, sampling_params=options).result()
        return list(answer.sequences[0].tokens)

    def save_state(self, name: str) -> str:
        """Save the state and return its path, ``tinker://..``."""
        return self.training.save_state(name).result().path

    def load_adapters(self, root: Path, file: Path) -> None:
        """Load the adapters of ``file`` (PEFT's format). The server is ours, on ``root``: its state
        is saved, gets them, and is loaded."""
        path = self.save_state("start")
        targets = list(root.glob(f"checkpoints/*/weights/start.*/adapter/{ADAPTERS}"))
        if len(targets) != 1:
            raise FileNotFoundError(f"{root} has {len(targets)} states with adapters, not one")
        targets[0].write_bytes(file.read_bytes())
        self.training.load_state(path).result()


SAMPLED_LOGPROB = -8.0
"""Log-probability of each token of ``importance_sampling`` under the policy that sampled it."""


def _advantage(index: int) -> float:
    return 1.0 if index % 2 == 0 else -0.5


def _token_loss(logprob: float, loss: str, index: int) -> float:
    """Return a token's loss from its log-probability, by the API's definition."""
    if loss == "cross_entropy":
        return -logprob
    return -(2.718281828459045 ** (logprob - SAMPLED_LOGPROB)) * _advantage(index)


def _settle(value: Any) -> Any:
    """Return what newer clients return a future of."""
    return value.result() if hasattr(value, "result") else value


def draw_batches(steps: int, count: int, shortest: int, longest: int) -> list[list[list[int]]]:
    """Return for each step ``count`` sequences of random tokens: one of ``longest``, the others of
    ``shortest`` to ``longest``."""
    draw = random.Random(1)
    batches = []
    for _ in range(steps):
        lengths = [longest, *(draw.randint(shortest, longest) for _ in range(count - 1))]
        batches.append([[draw.randrange(40_000) for _ in range(length)] for length in lengths])
    return batches


@contextmanager
def our_server(python: str, model: Path, root: Path) -> Iterator[Server]:
    """Run ``train-api`` of this checkout."""
    command = [python, "-m", "realhf.tinker", "--model", str(model), "--root", str(root)]
    command += ["--port", "0", "--threads", str(len(os.sched_getaffinity(0)))]
    with _running(command, root, dict(os.environ), "train-api: http") as (process, line):
        yield Server("train-api", line.split()[1], process, averages=False)


@contextmanager
def skyrl_server(python: Path, model: Path, root: Path, config: dict[str, Any]) -> Iterator[Server]:
    """Run SkyRL's server. It starts its engine by ``uv run`` with the options of the ``uv run`` that
    started it, so both are told to use the environment as it is."""
    bin_folder = python.absolute().parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(bin_folder / "uv"), "run", "--no-project", "python", "-m", "skyrl.tinker.api"]
    command += ["--base-model", str(model), "--backend", "jax", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--backend-config", json.dumps(config)]
    command += ["--database-url", f"sqlite:///{root}/skyrl.db", "--checkpoints-base", str(root)]
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(bin_folder.parent),
        "UV_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "COLUMNS": "200",
    }
    environment.pop("PYTHONPATH", None)
    with _running(command, root, environment, "Starting background engine") as (process, _):
        yield Server("SkyRL", f"http://127.0.0.1:{port}", process, averages=True)


@contextmanager
def _running(
    command: Sequence[str], root: Path, environment: dict[str, str], ready: str
) -> Iterator[tuple[psutil.Process, str]]:
    """Run a server and yield its process and the line with which it says that it is ready; end all
    its processes afterwards."""
    root.mkdir(parents=True)
    log = root / "log.txt"
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    family = psutil.Process(server.pid)
    try:
        deadline = time.monotonic() + START_S
        while not (said := [line for line in log.read_text().splitlines() if ready in line]):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(command[:5])}: did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield family, said[0][said[0].index(ready) :]
    finally:
        members = [*family.children(recursive=True), family] if family.is_running() else []
        server.terminate()
        _, left = psutil.wait_procs(members, timeout=30)
        for process in left:
            process.kill()
        server.wait()


class Comparison:
    """Client loops at two servers, in turns."""

    def __init__(self, servers: Sequence[Server], clients: Sequence[TrainingClient]) -> None:
        self._pairs = list(zip(servers, clients, strict=True))

    def run(self, batches: Sequence[Sequence[Sequence[int]]], loss: str) -> None:
        """Take the steps and print them. Exits if the first losses differ by more than 0.1 %."""
        taken: dict[str, list[Step]] = {server.name: [] for server, _ in self._pairs}
        for number, data in enumerate(batches):
            turns = self._pairs if number % 2 == 0 else self._pairs[::-1]
            for server, client in turns:
                before = server.cpu_s()
                began = time.perf_counter()
                value = client.step(data, loss)
                wall = time.perf_counter() - began
                taken[server.name].append(Step(value, wall, server.cpu_s() - before))
            self._print_step(number, [taken[server.name][-1] for server, _ in self._pairs])
            ours, theirs = (taken[server.name][0].loss for server, _ in self._pairs)
            if abs(ours - theirs) > 1e-3 * abs(theirs):
                sys.exit(f"{loss}: the first losses differ: {ours:.6f} and {theirs:.6f}")
        ours, theirs = (taken[server.name][1:] for server, _ in self._pairs)
        if ours:
            self._print_medians(loss, ours, theirs)

    def _print_step(self, number: int, steps: Sequence[Step]) -> None:
        parts = [
            f"{server.name} loss {step.loss:.6f}, {step.wall_s:.2f} s, CPU {step.cpu_s:.2f} s"
            for (server, _), step in zip(self._pairs, steps, strict=True)
        ]
        difference = abs(steps[0].loss - steps[1].loss) / abs(steps[1].loss)
        print(f"  step {number}: {'; '.join(parts)}; losses differ by {difference:.1e}", flush=True)

    def _print_medians(self, loss: str, ours: Sequence[Step], theirs: Sequence[Step]) -> None:
        """Print the median of each server and the ratio in pairs, without the first step."""
        for what, values in (
            ("time", [(one.wall_s, other.wall_s) for one, other in zip(ours, theirs, strict=True)]),
            ("CPU", [(one.cpu_s, other.cpu_s) for one, other in zip(ours, theirs, strict=True)]),
        ):
            ratios = [one / other for one, other in values]
            medians = [statistics.median(column) for column in zip(*values, strict=True)]
            names = [server.name for server, _ in self._pairs]
            print(
                f"{loss}, {what} of a step: {names[0]} {medians[0]:.2f} s, {names[1]} "
                f"{medians[1]:.2f} s: {statistics.median(ratios):.3f} of it ({min(ratios):.3f} to "
                f"{max(ratios):.3f}, {len(ratios)} pairs)",
                flush=True,
            )

    def sample(self, prompt: Sequence[int], tokens: int, repeats: int) -> None:
        """Print the seconds of a greedy sample of the trained weights, saving included, and whether
        both servers give the same tokens."""
        seconds: dict[str, list[float]] = {server.name: [] for server, _ in self._pairs}
        found: dict[str, list[int]] = {}
        for _ in range(repeats + 1):
            for server, client in self._pairs:
                began = time.perf_counter()
                found[server.name] = client.sample(prompt, tokens)
                seconds[server.name].append(time.perf_counter() - began)
        told = "; ".join(
            f"{name} {statistics.median(values[1:]):.2f} s (the first {values[0]:.2f} s)"
            for name, values in seconds.items()
        )
        one, other = found.values()
        same = sum(a == b for a, b in zip(one, other, strict=False))
        print(f"saving and sampling {tokens} greedy tokens: {told}; {same} tokens are the same")


def unpack_adapters(archive: Path, folder: Path) -> Path:
    """Unpack the adapters that SkyRL's server saved; return their file."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(folder.rglob(ADAPTERS))


def compare(arguments: argparse.Namespace, folder: Path) -> None:
    """Run both servers and compare them."""
    rank = arguments.rank
    config = {"max_lora_adapters": 2, "max_lora_rank": rank, **json.loads(arguments.skyrl_config)}
    model = arguments.model.absolute()
    with (
        our_server(arguments.python, model, folder / "ours") as own,
        skyrl_server(arguments.skyrl_python, model, folder / "skyrl", config) as other,
    ):
        servers = (own, other)
        clients = [TrainingClient(each.url, rank=rank, averages=each.averages) for each in servers]
        clients[1].training.save_weights_for_sampler("start").result()
        archive = next((folder / "skyrl").glob("*/sampler_weights/start.tar.gz"))
        clients[0].load_adapters(folder / "ours", unpack_adapters(archive, folder / "start"))
        for server in servers:
            print(f"{server.name}: {server.mib('VmRSS'):.0f} MiB before the first step")
        comparison = Comparison(servers, clients)
        batches = draw_batches(
            arguments.steps + 1, arguments.sequences, arguments.shortest, arguments.longest
        )
        lengths = [len(row) for batch in batches for row in batch]
        padded = arguments.longest * len(lengths)
        print(
            f"sequences padded to the longest would have {padded / sum(lengths):.2f} of the tokens"
        )
        for loss in arguments.losses:
            comparison.run(batches, loss)
        print(", ".join(f"{each.name}: peak {each.mib('VmHWM'):.0f} MiB" for each in servers))
        if arguments.sample_tokens:
            comparison.sample(batches[0][0][:32], arguments.sample_tokens, arguments.steps)
            print(
                "with sampling "
                + ", ".join(f"{each.name}: peak {each.mib('VmHWM'):.0f} MiB" for each in servers)
            )


def main() -> None:
    """Start both servers and run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the model (Llama, Qwen3)")
    parser.add_argument("--steps", type=int, default=5, help="steps after the first")
    parser.add_argument("--sequences", type=int, default=16, help="sequences of a step")
    parser.add_argument("--shortest", type=int, default=48, help="least tokens of a sequence")
    parser.add_argument(
        "--longest", type=int, default=256, help="most tokens of a sequence; one of a step has them"
    )
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument(
        "--losses",
        nargs="+",
        default=["cross_entropy", "importance_sampling"],
        choices=["cross_entropy", "importance_sampling"],
    )
    parser.add_argument(
        "--sample-tokens", type=int, default=16, help="tokens of a sample at the end; 0: none"
    )
    parser.add_argument(
        "--skyrl-config",
        default="{}",
        help="options of SkyRL's JAX backend as JSON, such as "
        '{"gradient_checkpointing": true, "train_micro_batch_size": 4}',
    )
    parser.add_argument(
        "--python",
        default=".venv-tinker/bin/python",
        help="Python with realhf and its client, for our server",
    )
    parser.add_argument(
        "--skyrl-python", type=Path, default=SKYRL_PYTHON, help="Python with skyrl and uv"
    )
    arguments = parser.parse_args()
    for file, recipe in (
        (arguments.python, "test-tinker"),
        (arguments.skyrl_python, "bench-skyrl"),
    ):
        if not Path(file).exists():
            parser.error(f"there is no {file}; `make {recipe}` makes it, --help names the option")
    if arguments.steps < 0 or arguments.sequences < 1:
        parser.error("--steps is 0 or more, --sequences 1 or more")
    if not 2 <= arguments.shortest <= arguments.longest:
        parser.error("--shortest is 2 or more and at most --longest")
    with tempfile.TemporaryDirectory() as folder:
        compare(arguments, Path(folder))


if __name__ == "__main__":
    main()
