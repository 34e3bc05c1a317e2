"""The compute process as the server sees it: its start, and a channel for jobs and replies over a socket pair.

A job is a numbered message and a body of bytes; its reply has the same number. Jobs of one model run in the order in
which they were sent.
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
    """Options of the compute process."""

    path: str
    """Folder of the base model."""
    dtype: str
    """Element type of the base model."""
    threads: int
    """Number of compute threads."""
    max_tokens_per_mb: int
    """Most positions of a micro-batch."""
    longest: int
    """Most tokens of a sequence; 0: as many as the model takes."""
    kv_cache_gib: float | None
    """Memory for keys and values in GiB; None: half of the free memory."""
    full_weights: bool = False
    """Whether all weights train, instead of adapters."""


class Create(Message, frozen=True, tag=True):
    """Create a model: adapters of this rank, or a full copy of the base (rank 0).

    ``folder``: load the weights saved there, and the optimizer state if ``moments``. ``keep``: then save the whole
    state into this folder; "": do not.
    """

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
    """Run the ``forward_backward`` request in the body. ``backward`` is false for a forward pass only."""

    model: str
    backward: bool = True


class Update(Message, frozen=True, tag=True):
    """Make an optimizer step; then save the whole state into the folder ``keep``, if not "". If the state cannot be
    saved, this job, ``Create`` and ``Load`` succeed all the same."""

    model: str
    params: dict[str, float]
    keep: str = ""


class Drop(Message, frozen=True, tag=True):
    """Drop the accumulated gradients, as a failed step does."""

    model: str


class Spoil(Message, frozen=True, tag=True):
    """Make the next optimizer step fail: one of its gradients is missing, for the reason ``why``."""

    model: str
    why: str


class Save(Message, frozen=True, tag=True):
    """Save weights into a folder: the trained ones (``sampler``), with the optimizer state (``training``), or a whole
    model with merged weights (``external``)."""

    model: str
    folder: str
    kind: Literal["sampler", "training", "external"]


class Load(Message, frozen=True, tag=True):
    """Load saved weights; then save the whole state into the folder ``keep``, if not ""."""

    model: str
    folder: str
    moments: bool
    keep: str = ""


class Unload(Message, frozen=True, tag=True):
    """Remove a model from memory."""

    model: str


class Sample(Message, frozen=True, tag=True):
    """Run the ``sample`` request in the body with the weights saved in ``folder``; "": with the base model."""

    folder: str


class Cancel(Message, frozen=True, tag=True):
    """Cancel the sample job of this number; it gets no reply."""

    job: int


Work = Create | Forward | Update | Drop | Spoil | Save | Load | Unload | Sample | Cancel


class Job(Message, frozen=True):
    """A job; its body follows. ``again``: it ran before, to restore the model. If it fails now, the model is removed,
    since later jobs would run with other weights."""

    number: int
    work: Work
    again: bool = False


class Began(Message, frozen=True, tag=True):
    """The job of this number has started."""

    number: int


class Done(Message, frozen=True, tag=True):
    """The result of a job; the body of the answer follows."""

    number: int
    """Number of the job."""
    error: str = ""
    """Why the job failed; "": it succeeded."""
    theirs: bool = False
    """Whether the request of the client was the cause of the failure."""
    kept: bool = False
    """Whether the whole state was saved into the folder ``keep`` of the job."""
    version: int = -1
    """Version of the weights that the job used or made."""
    digest: str = ""
    """Digest of these weights."""
    numbers: dict[str, float] = msgspec.field(default_factory=dict)
    """Statistics."""


class Ready(Message, frozen=True, tag=True):
    """The base model is loaded."""

    longest: int
    """Most tokens of a sequence."""
    vocabulary: int
    """Number of tokens of the vocabulary."""
    digest: str
    """Digest of the weights."""
    nbytes: int
    """Bytes of the weights."""


Told = Began | Done | Ready
_SEND, _STOP_S, _STOPS_WITHIN_S = msgspec.msgpack.Encoder(), 5.0, 10.0


class Channel:
    """A message channel over a socket, with a thread for each direction. ``send`` never blocks.

    ``kind``: type of the received messages. ``take(message, body)`` is called for each of them, and ``ended()`` once
    when the other side has closed.
    """

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
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def send(self, message: Message, body: bytes = b"") -> None:
        """Send a message and its body."""
        self._outgoing.put((_SEND.encode(message), body))

    def close(self) -> None:
        """Send everything that is queued, then close this direction; the other side notices."""
        self._outgoing.put(None)
        self._threads[1].join(_STOP_S)

    def _write(self) -> None:
        try:
            while (item := self._outgoing.get()) is not None:
                for part in item:
                    self._connection.send_bytes(part)
        except OSError:
            return  # the receiving thread reports it
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
            self._outgoing.put(None)  # else the writing thread would wait forever, and keep the socket open
            self._ended()


class ComputeProcess:
    """The compute process of the running event loop; it ends with this process.

    ``told`` is called on the loop with each message and its body, and ``lost`` with the exit code of a process that
    ends without ``stop``.
    """

    def __init__(
        self, options: ComputeOptions, told: Callable[[Told, bytes], None], lost: Callable[[int], None]
    ) -> None:
        self._options, self._tell, self._lose = msgspec.json.encode(options).decode(), told, lost
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    def start(self) -> None:
        """Start the process, or a new one after the process died."""
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
        """Send a job; never blocks."""
        assert self._channel is not None, "it is started first"
        self._channel.send(job, body)

    async def stop(self) -> None:
        """End the process, if it was started."""
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
