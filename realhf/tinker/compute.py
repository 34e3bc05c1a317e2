"""The compute process: holds the base model and the adapters of all clients, trains and samples.

    python -m realhf.tinker.compute DESCRIPTOR OPTIONS

``DESCRIPTOR`` is the file descriptor of a socket to the server, ``OPTIONS`` a ``ComputeOptions`` as
JSON. The server starts the process, and it exits with the server.

It is not a model worker of a run. Model workers execute the calls of one dataflow graph step by
step, on samples from the run's buffer, with one model for each role. Here independent clients send
their own data at any time, and adapters are created and removed. The computation is the same:
``TorchEngine`` trains, ``DecodeCore`` samples.

One thread computes. It runs the training jobs of the models round-robin, the jobs of each model in
order. After each training job it samples for as long as that job took, if there is anything to
sample.
"""

from __future__ import annotations

import gc
import json
import logging
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from realhf.backends.embedded.compute_threads import threads as compute_threads
from realhf.backends.embedded.kernels import use_few_pass_norms, use_onednn
from realhf.backends.embedded.memory import Heap, cache_bytes, oom_message
from realhf.backends.embedded.weight_copy import collect_weights
from realhf.backends.training.tokenizer_loading import load_tokenizer
from realhf.backends.training.torch_backend import load_causal_lm
from realhf.base import process_clock
from realhf.base.files import atomic_folder, sync
from realhf.base.hf_config import context_limit
from realhf.base.host_resources import memory_left
from realhf.base.tensor_digest import digest_tensors, joint_digest
from realhf.base.text import first_line
from realhf.tinker.channel import (
    Began,
    Cancel,
    Channel,
    ComputeOptions,
    Create,
    Done,
    Drop,
    Forward,
    Job,
    Load,
    Ready,
    Sample,
    Save,
    Spoil,
    Unload,
    Update,
)
from realhf.tinker.sampling import VERSION, Sampler
from realhf.tinker.training import TRAINING_COPIES, AdapterSpec, TrainedModel, WeightsId
from realhf.tinker.wire import BadRequest, read_json, read_pass, types

_log = logging.getLogger(__name__)

_IDLE_S = 60.0
"""Seconds without work after which the memory of forward and backward passes is returned to the
system."""


class Computer:
    """Runner of jobs on one base model. ``reply(message, body=b"")`` sends the replies."""

    def __init__(self, options: ComputeOptions, reply: Callable[..., None]) -> None:
        self._options = options
        self._reply = reply
        self._threads = compute_threads(options.threads)
        self._threads.use_in_this_thread()
        self._heap = Heap()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._base = load_causal_lm(options.path, "tinker", getattr(torch, options.dtype)).to(
            device
        )
        self._base.requires_grad_(False)
        use_onednn(self._base)
        use_few_pass_norms(self._base)
        self._tokenizer = load_tokenizer(options.path, "tinker")
        limit = context_limit(self._base.config.to_dict())
        self.longest = min(options.longest or limit, limit)
        self.vocabulary = int(self._base.config.get_text_config().vocab_size)
        weights = collect_weights(self._base)
        self.digest = joint_digest(digest_tensors(weights))
        self.nbytes = sum(tensor.nbytes for tensor in weights.values())
        self._models: dict[str, TrainedModel] = {}
        self._queues: dict[str, deque[tuple[Job, bytes]]] = {}
        self._round_robin: deque[str] = deque()  # models with queued jobs
        self._changed = threading.Condition()
        self._inbox: deque[tuple[Job, bytes]] = deque()
        self._closing = False
        self._sampler = Sampler(
            self._base,
            self._tokenizer,
            end_tokens=_find_end_tokens(self._tokenizer, options.path),
            longest=self.longest,
            max_bytes=lambda: _max_cache_bytes(options.kv_cache_gib, device),
            on_start=lambda number: reply(Began(number)),
            full_weights=options.full_weights,
        )
        self._free_at_start = _free_bytes(device)

    def submit(self, job: Job, body: bytes) -> None:
        """Queue a job. May be called from any thread."""
        with self._changed:
            self._inbox.append((job, body))
            self._changed.notify()

    def close(self) -> None:
        """Make ``serve`` return after the current job."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def serve(self) -> None:
        """Run jobs until ``close``."""
        sample_until = 0.0
        memory_returned = True
        while True:
            with self._changed:
                while not (self._closing or self._inbox or self._round_robin or self._sampler.busy):
                    if not self._changed.wait(None if memory_returned else _IDLE_S):
                        self._heap.trim()
                        memory_returned = True
                if self._closing:
                    return
                new_jobs = list(self._inbox)
                self._inbox = deque()
                memory_returned = False
            for job, body in new_jobs:
                self._enqueue(job, body)
            if self._round_robin and not (
                self._sampler.busy and process_clock.now() < sample_until
            ):
                started = process_clock.now()
                self._run_next(self._round_robin.popleft())
                # Sampling gets as much time as the training job took: now + (now - started).
                sample_until = 2 * process_clock.now() - started
            if self._sampler.busy:
                with self._threads.computing():
                    self._sampler.step()

    def _enqueue(self, job: Job, body: bytes) -> None:
        work = job.work
        if isinstance(work, Cancel):
            self._sampler.cancel(work.job)
        elif isinstance(work, Sample):
            try:
                request = read_json(types.SampleRequest, body)
                self._sampler.submit(job.number, work.folder, request, self._on_sampled)
            except Exception as error:
                self._reply_error(job.number, error)
        else:
            queue = self._queues.setdefault(work.model, deque())
            if not queue:
                self._round_robin.append(work.model)
            queue.append((job, body))

    def _run_next(self, model: str) -> None:
        """Run the next job of a model. If the model has more jobs, move it to the end of the
        round-robin order."""
        queue = self._queues[model]
        job, body = queue.popleft()
        self._reply(Began(job.number))
        if job.again and isinstance(job.work, Update) and model in self._models:
            # The step succeeded in its first run: an older version of the server did not check for
            # missing gradients.
            self._models[model].missing = ""
        try:
            response, metrics = self._run(job.work, body)
            is_state_saved = isinstance(job.work, (Create, Update, Load)) and self._keep_state(
                job.work
            )
            weights = self._models[model].weights_id if model in self._models else WeightsId(-1, "")
            done = Done(
                job.number,
                kept=is_state_saved,
                version=weights.version,
                digest=weights.digest,
                numbers=metrics,
            )
            self._reply(done, response)
        except Exception as error:
            if job.again:
                self._remove(model)
            self._reply_error(job.number, error)
        if queue:
            self._round_robin.append(model)
        else:
            del self._queues[model]

    def _run(self, work: Any, body: bytes) -> tuple[bytes, dict[str, float]]:
        """Run a training job; return the body of the response and the metrics."""
        if isinstance(work, Create):
            self._create(work)
        elif isinstance(work, Unload):
            self._remove(work.model)
        elif isinstance(work, (Drop, Spoil)) and work.model not in self._models:
            pass  # the creation of the model failed
        elif work.model not in self._models:
            raise RuntimeError(f"model {work.model} is not loaded: its creation failed")
        elif isinstance(work, Forward):
            return self._run_pass(work, body), {}
        elif isinstance(work, Update):
            return b"", self._models[work.model].update(work.params)
        elif isinstance(work, Drop):
            self._models[work.model].drop()
        elif isinstance(work, Spoil):
            self._models[work.model].missing = work.why
        elif isinstance(work, Save):
            return b"", {"size_bytes": self._save(work.model, Path(work.folder), work.kind)}
        elif isinstance(work, Load):
            self._load(self._models[work.model], Path(work.folder), moments=work.moments)
        return b"", {}

    def _run_pass(self, work: Forward, body: bytes) -> bytes:
        """Run a forward or backward pass and return the body of its response. A failed backward
        pass makes the next optimizer step fail, because the client may have split one batch into
        several requests, and the gradients of the other requests are accumulated."""
        model = self._models[work.model]
        try:
            return model.run(read_pass(body, vocabulary=self.vocabulary, longest=self.longest))
        except Exception as error:
            if work.backward:
                model.missing = first_line(error)
            raise

    def _remove(self, model: str) -> None:
        """Remove a model and release its memory at once. Engines have reference cycles, so their
        memory is released only by a garbage collection, which this triggers."""
        if self._models.pop(model, None) is not None:
            gc.collect()
            self._heap.trim()

    def _create(self, work: Create) -> None:
        needed = TRAINING_COPIES * self.nbytes
        count = len(self._models)
        is_new = work.model not in self._models
        if self._options.full_weights and is_new and (count + 1) * needed > self._free_at_start:
            raise BadRequest(
                f"memory: to train all weights of a model takes {needed / 2**30:.1f} GiB; {count} "
                f"are in memory, which "
                f"had {self._free_at_start / 2**30:.1f} GiB free before the first; --max-adapters "
                f"bounds how many "
                "there are"
            )
        spec = AdapterSpec(work.rank, work.seed, work.mlp, work.attention, work.unembedding)
        with self._threads.computing():
            model = TrainedModel(self._base, self._tokenizer, spec, self._options, self._threads)
        if work.folder:
            self._load(model, Path(work.folder), moments=work.moments)
        self._models[work.model] = model
        _log.info(
            "model %s: rank %d, %.1f MiB to train it", work.model, work.rank, model.nbytes() / 2**20
        )

    def _load(self, model: TrainedModel, folder: Path, *, moments: bool) -> None:
        try:
            model.load(folder, moments=moments)
        except (FileNotFoundError, ValueError) as error:  # hide the server's paths from clients
            raise BadRequest(str(error).replace(str(folder), folder.name)) from None

    def _keep_state(self, work: Create | Update | Load) -> bool:
        """Save the whole state of the model if the job asks for it; return whether it was saved.
        The job succeeds even if saving fails, because a client that repeated a step would apply it
        twice. After a crash the state is rebuilt from an earlier one."""
        if not work.keep:
            return False
        try:
            self._save(work.model, Path(work.keep), "training")
        except OSError as error:
            _log.error("the state of %s is not kept: %s", work.model, error)
            return False
        return True

    def _save(self, model_id: str, folder: Path, kind: str) -> float:
        """Save a model durably and return the size of its files in bytes. The folder appears only
        once it is complete."""
        model = self._models[model_id]
        with atomic_folder(folder) as partial:
            if kind == "external":
                with self._threads.computing():
                    model.export(partial)
            else:
                model.save(partial, moments=kind == "training")
            weights = {"version": model.weights_id.version, "digest": model.weights_id.digest}
            (partial / VERSION).write_text(json.dumps(weights), encoding="utf-8")
            # files must be durable before the server records them as saved
            for file in sorted(partial.rglob("*")):
                sync(file)
            sync(partial)
        sync(folder.parent)
        return float(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))

    def _on_sampled(self, number: int, response: bytes | Exception, weights: WeightsId) -> None:
        if isinstance(response, Exception):
            self._reply_error(number, response)
        else:
            self._reply(Done(number, version=weights.version, digest=weights.digest), response)

    def _reply_error(self, number: int, error: Exception) -> None:
        is_client_error = isinstance(error, (BadRequest, FileNotFoundError, FloatingPointError))
        if not is_client_error:
            _log.exception("job %d failed", number, exc_info=error)
        text = f"out of memory: {error}" if oom_message(error) is not None else first_line(error)
        self._reply(Done(number, error=text[:2000] or type(error).__name__, theirs=is_client_error))


def _max_cache_bytes(gib: float | None, device: torch.device) -> int:
    """Return the maximum size of the key-value cache in bytes: ``gib``, or half of the free memory.
    Without this limit, clients could request any amount."""
    limit = cache_bytes(gib, device, shared=True)
    return _free_bytes(torch.device("cpu")) // 2 if limit is None else limit


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    cgroup_left = memory_left()
    return available if cgroup_left is None else min(available, cgroup_left)


def _find_end_tokens(tokenizer: Any, path: str) -> frozenset[int]:
    """Return the tokens that end a sequence unless a request names others: the end-of-sequence
    token of the tokenizer and those of ``generation_config.json``."""
    tokens = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    try:
        config = json.loads((Path(path) / "generation_config.json").read_text(encoding="utf-8"))
        eos = config.get("eos_token_id")
    except (OSError, ValueError):
        eos = None
    return frozenset(
        tokens
        | {token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int)}
    )


def main(arguments: list[str]) -> int:
    """Serve jobs from the socket with descriptor ``arguments[0]`` until its other end closes;
    return the exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # a terminal interrupts both; the server stops this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = msgspec.json.decode(arguments[1].encode(), type=ComputeOptions)
    own = socket.socket(fileno=int(arguments[0]))

    def submit(job: Job, body: bytes) -> None:
        computer.submit(job, body)

    channel = Channel(own, Job, submit, lambda: computer.close())
    computer = Computer(options, channel.send)
    channel.start()
    channel.send(Ready(computer.longest, computer.vocabulary, computer.digest, computer.nbytes))
    computer.serve()
    channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
