"""The compute process: it holds the base model and the adapters of all clients, trains and samples.

    python -m realhf.tinker.compute DESCRIPTOR OPTIONS

The server starts it, and it ends with the server. It is not a model worker of a run: those execute the calls of one
graph, step by step, on samples of their buffer, and hold one model for each role. Here, independent clients send their
own data at any time, and adapters come and go. The engines are the same: ``TorchEngine`` trains, ``DecodeCore``
samples.

One thread computes. It runs one training job of each model in turn, and after each job samples for as long as the job
took.
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
from realhf.backends.embedded.weight_copy import named_weights
from realhf.backends.training.tokenizer_loading import load_tokenizer
from realhf.backends.training.torch_backend import load_causal_lm
from realhf.base import process_clock
from realhf.base.files import sync, whole_folder
from realhf.base.hf_config import context_limit
from realhf.base.host_resources import memory_left
from realhf.base.tensor_digest import digests, joint_digest
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
from realhf.tinker.training import TRAINING_COPIES, AdapterSpec, Held, TrainedModel
from realhf.tinker.wire import BadRequest, read_json, read_pass, types

_log = logging.getLogger(__name__)


_REST_S = 60.0
"""Seconds without work after which free memory goes back to the system."""


class Computer:
    """Runs jobs with one base model; ``tell`` sends their replies."""

    def __init__(self, options: ComputeOptions, tell: Callable[..., None]) -> None:
        self._options, self._tell = options, tell
        self._threads = compute_threads(options.threads)
        self._threads.take()
        self._heap = Heap()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._base = load_causal_lm(options.path, "tinker", getattr(torch, options.dtype)).to(device)
        self._base.requires_grad_(False)
        use_onednn(self._base)
        use_few_pass_norms(self._base)
        self._tokenizer = load_tokenizer(options.path, "tinker")
        limit = context_limit(self._base.config.to_dict())
        self.longest = min(options.longest or limit, limit)
        self.vocabulary = int(self._base.config.get_text_config().vocab_size)
        weights = named_weights(self._base)
        self.digest, self.nbytes = joint_digest(digests(weights)), sum(tensor.nbytes for tensor in weights.values())
        self._models: dict[str, TrainedModel] = {}
        self._queues: dict[str, deque[tuple[Job, bytes]]] = {}
        self._turns: deque[str] = deque()
        self._changed = threading.Condition()
        self._arrived: deque[tuple[Job, bytes]] = deque()
        self._closing = False
        self._sampler = Sampler(
            self._base,
            self._tokenizer,
            ends=_ends(self._tokenizer, options.path),
            longest=self.longest,
            most_bytes=lambda: _cache_bytes(options.kv_cache_gib, device),
            began=lambda number: tell(Began(number)),
            full_weights=options.full_weights,
        )
        self._room = _free(device)

    def take(self, job: Job, body: bytes) -> None:
        """Queue a job; may be called from any thread."""
        with self._changed:
            self._arrived.append((job, body))
            self._changed.notify()

    def close(self) -> None:
        """End ``serve`` after the running job."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def serve(self) -> None:
        """Run jobs until ``close``."""
        sample_until, rested = 0.0, True
        while True:
            with self._changed:
                while not (self._closing or self._arrived or self._turns or self._sampler.busy):
                    if not self._changed.wait(None if rested else _REST_S):
                        self._heap.trim()
                        rested = True
                if self._closing:
                    return
                arrived, self._arrived = list(self._arrived), deque()
                rested = False
            for job, body in arrived:
                self._sort(job, body)
            if self._turns and not (self._sampler.busy and process_clock.now() < sample_until):
                began = process_clock.now()
                self._train(self._turns.popleft())
                sample_until = 2 * process_clock.now() - began
            if self._sampler.busy:
                with self._threads.computing():
                    self._sampler.step()

    def _sort(self, job: Job, body: bytes) -> None:
        work = job.work
        if isinstance(work, Cancel):
            self._sampler.cancel(work.job)
        elif isinstance(work, Sample):
            try:
                self._sampler.submit(job.number, work.folder, read_json(types.SampleRequest, body), self._sampled)
            except Exception as error:
                self._failed(job.number, error)
        else:
            queue = self._queues.setdefault(work.model, deque())
            if not queue:
                self._turns.append(work.model)
            queue.append((job, body))

    def _train(self, model: str) -> None:
        """Run the next job of a model, and put the model at the end of the queue if it has more."""
        queue = self._queues[model]
        job, body = queue.popleft()
        self._tell(Began(job.number))
        if job.again and isinstance(job.work, Update) and model in self._models:
            self._models[model].missing = ""  # the step succeeded before, by a version without this check
        try:
            answer, numbers = self._do(job.work, body)
            kept = isinstance(job.work, (Create, Update, Load)) and self._keep(job.work)
            held = self._models[model].held if model in self._models else Held(-1, "")
            done = Done(job.number, kept=kept, version=held.version, digest=held.digest, numbers=numbers)
            self._tell(done, answer)
        except Exception as error:
            if job.again:
                self._drop(model)
            self._failed(job.number, error)
        if queue:
            self._turns.append(model)
        else:
            del self._queues[model]

    def _do(self, work: Any, body: bytes) -> tuple[bytes, dict[str, float]]:
        """Run a job; return the body of the reply, and statistics."""
        if isinstance(work, Create):
            self._create(work)
        elif isinstance(work, Unload):
            self._drop(work.model)
        elif isinstance(work, (Drop, Spoil)) and work.model not in self._models:
            pass  # its creation failed
        elif work.model not in self._models:
            raise RuntimeError(f"model {work.model} is not loaded: its creation failed")
        elif isinstance(work, Forward):
            return self._pass(work, body), {}
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

    def _pass(self, work: Forward, body: bytes) -> bytes:
        """Run a pass and return its answer. If it fails, the next step must fail, too: other parts of the same call may
        have added their gradients."""
        model = self._models[work.model]
        try:
            return model.run(read_pass(body, vocabulary=self.vocabulary, longest=self.longest))
        except Exception as error:
            if work.backward:
                model.missing = first_line(error)
            raise

    def _drop(self, model: str) -> None:
        """Remove a model and free its memory at once: an engine is a reference cycle, which only the collector
        frees."""
        if self._models.pop(model, None) is not None:
            gc.collect()
            self._heap.trim()

    def _create(self, work: Create) -> None:
        needed, there = TRAINING_COPIES * self.nbytes, len(self._models)
        if self._options.full_weights and work.model not in self._models and (there + 1) * needed > self._room:
            raise BadRequest(
                f"memory: to train all weights of a model takes {needed / 2**30:.1f} GiB; {there} are in memory, which "
                f"had {self._room / 2**30:.1f} GiB free before the first; --max-adapters bounds how many there are"
            )
        spec = AdapterSpec(work.rank, work.seed, work.mlp, work.attention, work.unembedding)
        with self._threads.computing():
            made = TrainedModel(self._base, self._tokenizer, spec, self._options, self._threads)
        if work.folder:
            self._load(made, Path(work.folder), moments=work.moments)
        self._models[work.model] = made
        _log.info("model %s: rank %d, %.1f MiB to train it", work.model, work.rank, made.nbytes() / 2**20)

    def _load(self, model: TrainedModel, folder: Path, *, moments: bool) -> None:
        try:
            model.load(folder, moments=moments)
        except (FileNotFoundError, ValueError) as error:  # clients must not see paths of this machine
            raise BadRequest(str(error).replace(str(folder), folder.name)) from None

    def _keep(self, work: Create | Update | Load) -> bool:
        """Save the whole state if the job asks for it; return whether it was saved. The job does not fail if the state
        cannot be saved, since a client that repeats a step would make it twice. A restart resumes from an earlier
        state."""
        if not work.keep:
            return False
        try:
            self._save(work.model, Path(work.keep), "training")
        except OSError as error:
            _log.error("the state of %s is not kept: %s", work.model, error)
            return False
        return True

    def _save(self, model: str, folder: Path, kind: str) -> float:
        made = self._models[model]
        with whole_folder(folder) as partial:
            if kind == "external":
                with self._threads.computing():
                    made.export(partial)
            else:
                made.save(partial, moments=kind == "training")
            held = {"version": made.held.version, "digest": made.held.digest}
            (partial / VERSION).write_text(json.dumps(held), encoding="utf-8")
            for file in sorted(partial.rglob("*")):  # it must be on the disk before the store refers to it
                sync(file)
            sync(partial)
        sync(folder.parent)
        return float(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))

    def _sampled(self, number: int, answer: bytes | Exception, held: Held) -> None:
        if isinstance(answer, Exception):
            self._failed(number, answer)
        else:
            self._tell(Done(number, version=held.version, digest=held.digest), answer)

    def _failed(self, number: int, error: Exception) -> None:
        theirs = isinstance(error, (BadRequest, FileNotFoundError, FloatingPointError))
        if not theirs:
            _log.exception("job %d failed", number, exc_info=error)
        said = f"out of memory: {error}" if oom_message(error) is not None else first_line(error)
        self._tell(Done(number, error=said[:2000] or type(error).__name__, theirs=theirs))


def _cache_bytes(gib: float | None, device: torch.device) -> int:
    """Return the largest number of bytes of keys and values, the only bound on what clients request."""
    most = cache_bytes(gib, device, shared=True)
    return _free(torch.device("cpu")) // 2 if most is None else most


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free, left = psutil.virtual_memory().available, memory_left()
    return free if left is None else min(free, left)


def _ends(tokenizer: Any, path: str) -> frozenset[int]:
    """Return the end-of-sequence tokens of the tokenizer and of ``generation_config.json``."""
    ends = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    try:
        said = json.loads((Path(path) / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError):
        said = None
    return frozenset(ends | {each for each in (said if isinstance(said, list) else [said]) if isinstance(each, int)})


def main(arguments: list[str]) -> int:
    """Run jobs for the server at the other end of the socket until it closes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the server ends this process
    options = msgspec.json.decode(arguments[1].encode(), type=ComputeOptions)
    own = socket.socket(fileno=int(arguments[0]))

    def take(job: Job, body: bytes) -> None:
        computer.take(job, body)

    channel = Channel(own, Job, take, lambda: computer.close())
    computer = Computer(options, channel.send)
    channel.start()
    channel.send(Ready(computer.longest, computer.vocabulary, computer.digest, computer.nbytes))
    computer.serve()
    channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
