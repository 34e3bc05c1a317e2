"""Starts the process that computes, carries jobs to it, and what came of them back, over a pair of sockets that only
the two have.

A job is a message with a number and a body of bytes; the answer has the same number. Jobs of one model are done in the
order in which they were sent.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Literal

import msgspec

from realhf.base.messages import Message


class ComputeOptions(Message, frozen=True):
    """What the process that computes is told at its start: the folder of the model, its element type, threads, the most
    positions of a micro-batch, tokens of a sequence (0: what the model takes), memory for keys and values, and whether
    all weights train, in place of adapters."""

    path: str
    dtype: str
    threads: int
    max_tokens_per_mb: int
    longest: int
    kv_cache_gib: float | None
    full_weights: bool = False


class Create(Message, frozen=True, tag=True):
    """Make a model with adapters, or of rank 0, where all weights train; with ``folder``, as it was saved there, with
    the optimizer's state if ``moments``. Then save everything into ``keep``, if it says a folder."""

    model: str
    rank: int
    seed: int
    mlp: bool
    attention: bool
    unembedding: bool
    folder: str = ""
    moments: bool = True
    keep: str = ""


class Forward(Message, frozen=True, tag=True):
    """Do the request of ``forward_backward`` in the body; ``backward`` unless it only asks for the forward pass."""

    model: str
    backward: bool = True


class Update(Message, frozen=True, tag=True):
    """Make a step of the optimizer; then save everything into ``keep``, if it says a folder. A disk that takes nothing
    more is no reason for this, ``Create`` or ``Load`` to have failed."""

    model: str
    params: dict[str, float]
    keep: str = ""


class Drop(Message, frozen=True, tag=True):
    """Drop what was accumulated, as a step did that failed."""

    model: str


class Spoil(Message, frozen=True, tag=True):
    """Refuse the next step: a gradient that belongs to it is missing, for the reason ``why``."""

    model: str
    why: str


class Save(Message, frozen=True, tag=True):
    """Save the weights into a folder: what trains (``sampler``), with the optimizer's state (``training``), or a whole
    model with merged weights (``external``)."""

    model: str
    folder: str
    kind: Literal["sampler", "training", "external"]


class Load(Message, frozen=True, tag=True):
    """Take saved weights; then save everything into ``keep``, if it says a folder."""

    model: str
    folder: str
    moments: bool
    keep: str = ""


class Unload(Message, frozen=True, tag=True):
    """Forget a model."""

    model: str


class Sample(Message, frozen=True, tag=True):
    """Do the request of ``sample`` in the body, with the adapters saved in ``folder``, or with the base ("")."""

    folder: str


class Cancel(Message, frozen=True, tag=True):
    """Leave off the job of this number; it is not answered."""

    job: int


Work = Create | Forward | Update | Drop | Spoil | Save | Load | Unload | Sample | Cancel


class Job(Message, frozen=True):
    """What is to be done; its body follows. ``again``: it was done before, and where it fails the model is gone: jobs
    behind it would be done with other weights."""

    number: int
    work: Work
    again: bool = False


class Began(Message, frozen=True, tag=True):
    """The job of this number is being done now."""

    number: int


class Done(Message, frozen=True, tag=True):
    """What came of a job; the answer's body follows. ``error``: why it failed, and whether by the fault of who asked
    (``theirs``). ``version`` and ``digest`` are those of the weights that computed it, ``numbers`` its statistics;
    ``kept``: everything was saved into the folder that the job named."""

    number: int
    error: str = ""
    theirs: bool = False
    kept: bool = False
    version: int = -1
    digest: str = ""
    numbers: dict[str, float] = msgspec.field(default_factory=dict)


class Ready(Message, frozen=True, tag=True):
    """The model is loaded: its context in tokens, its vocabulary, the digest of its weights, and their bytes."""

    longest: int
    vocabulary: int
    digest: str
    nbytes: int


Told = Began | Done | Ready
_SEND, _STOP_S, _STOPS_WITHIN_S = msgspec.msgpack.Encoder(), 5.0, 10.0


class Channel:
    """Sends and receives on threads of its own. ``take(message, body)`` is called for what comes, as ``kind`` says its
    form, and ``ended()`` once when the other side is gone. ``send`` never waits."""

    def __init__(
        self, own: socket.socket, kind: object, take: Callable[..., None], ended: Callable[[], None] = lambda: None
    ) -> None:
        self._connection = Connection(own.detach())
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(kind)  # pyright: ignore[reportArgumentType]
        self._take, self._ended = take, ended
        self._outgoing: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._receive, "jobs in"), (self._write, "jobs out"))
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def send(self, message: Message, body: bytes = b"") -> None:
        """Send a message and its body."""
        self._outgoing.put((_SEND.encode(message), body))

    def close(self) -> None:
        """Say nothing more once everything is sent; the other side learns of it."""
        self._outgoing.put(None)
        self._threads[1].join(_STOP_S)

    def _write(self) -> None:
        try:
            while (item := self._outgoing.get()) is not None:
                for part in item:
                    self._connection.send_bytes(part)
        except OSError:
            return  # the receiving thread says so
        self._shut()

    def _shut(self) -> None:
        with socket.socket(fileno=self._connection.fileno()) as own:
            try:
                own.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            finally:
                own.detach()

    def _receive(self) -> None:
        try:
            while True:
                message, body = self._connection.recv_bytes(), self._connection.recv_bytes()
                self._take(self._decoder.decode(message), body)
        except (EOFError, OSError):
            self._outgoing.put(None)  # else the writing thread would wait for ever, and keep the socket open
            self._ended()


class ComputeProcess:
    """Belongs to the running event loop, on which ``told`` gets its messages and their bodies, and ``lost`` its exit
    code where nobody stopped it. It ends with this process."""

    def __init__(
        self, options: ComputeOptions, told: Callable[[Told, bytes], None], lost: Callable[[int], None]
    ) -> None:
        self._options, self._tell, self._lose = msgspec.json.encode(options).decode(), told, lost
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    def start(self) -> None:
        """Start it, or a new one in place of one that has died."""
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [str(os.getpid()), "0", "realhf.tinker.compute", str(theirs.fileno()), self._options]
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "realhf.scheduler.child", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

        def told(message: Told, body: bytes) -> None:
            self._loop.call_soon_threadsafe(self._tell, message, body)

        def ended() -> None:
            self._loop.call_soon_threadsafe(self._lost, process)

        self._channel = Channel(ours, Told, told, ended)
        self._channel.start()

    def send(self, job: Job, body: bytes = b"") -> None:
        """Send a job; it never waits."""
        assert self._channel is not None, "it is started first"
        self._channel.send(job, body)

    async def stop(self) -> None:
        """End it; harmless before its start."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _lost(self, process: subprocess.Popen[bytes]) -> None:
        if process is self._process:
            process.kill()  # it may have closed its end only
            self._lose(process.wait())
