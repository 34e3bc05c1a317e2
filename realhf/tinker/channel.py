"""The compute process and its message channel, a socket pair between the server and the process.

A job is a message with a number and a body of bytes; its reply has the same number. Jobs of one
model run in the order in which they were sent.
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
    """Options of the compute process, passed at its start."""

    path: str
    """Folder of the base model."""
    dtype: str
    """Element type of the base model: ``float32`` or ``bfloat16``."""
    threads: int
    """Number of compute threads."""
    max_tokens_per_mb: int
    """Maximum number of positions of a micro-batch."""
    longest: int
    """Maximum sequence length in tokens; 0: the context length of the model."""
    kv_cache_gib: float | None
    """Size of the key-value cache in GiB; None: half of the free memory."""
    full_weights: bool = False
    """Whether all weights train instead of adapters."""


class Create(Message, frozen=True, tag=True):
    """Job: create a model with new adapters, or load a saved one."""

    model: str
    """Id of the model."""
    rank: int
    """Rank of the adapters; 0 if all weights train."""
    seed: int
    """Seed of the initial adapter weights."""
    mlp: bool
    """Whether MLP layers get adapters."""
    attention: bool
    """Whether attention layers get adapters."""
    unembedding: bool
    """Whether the unembedding layer gets an adapter."""
    folder: str = ""
    """Folder with saved weights to start from; "": start from scratch."""
    moments: bool = True
    """Whether the optimizer state of ``folder`` is loaded as well."""
    keep: str = ""
    """Folder to save the whole state into afterwards; "": do not save."""


class Forward(Message, frozen=True, tag=True):
    """Job: run the ``forward_backward`` request in the body."""

    model: str
    """Id of the model."""
    backward: bool = True
    """Whether the request has a backward pass."""


class Update(Message, frozen=True, tag=True):
    """Job: run an optimizer step. Like ``Create`` and ``Load``, it succeeds even if the state
    cannot be saved because the disk is full."""

    model: str
    """Id of the model."""
    params: dict[str, float]
    """Parameters of AdamW for this step."""
    keep: str = ""
    """Folder to save the whole state into afterwards; "": do not save."""


class Drop(Message, frozen=True, tag=True):
    """Job: drop the accumulated gradients, as a failed step does."""

    model: str
    """Id of the model."""


class Spoil(Message, frozen=True, tag=True):
    """Job: make the next optimizer step fail, because a gradient that belongs in it is missing."""

    model: str
    """Id of the model."""
    why: str
    """Reason why the gradient is missing."""


class Save(Message, frozen=True, tag=True):
    """Job: save the weights of a model."""

    model: str
    """Id of the model."""
    folder: str
    """Target folder."""
    kind: Literal["sampler", "training", "external"]
    """``sampler``: the trained weights; ``training``: the trained weights and the optimizer state;
    ``external``: a whole model with merged weights."""


class Load(Message, frozen=True, tag=True):
    """Job: load saved weights into a model."""

    model: str
    """Id of the model."""
    folder: str
    """Folder of the saved weights."""
    moments: bool
    """Whether the optimizer state is loaded as well."""
    keep: str = ""
    """Folder to save the whole state into afterwards; "": do not save."""


class Unload(Message, frozen=True, tag=True):
    """Job: remove a model from memory."""

    model: str
    """Id of the model."""


class Sample(Message, frozen=True, tag=True):
    """Job: run the ``sample`` request in the body."""

    folder: str
    """Folder of the saved weights to sample with; "": the base model."""


class Cancel(Message, frozen=True, tag=True):
    """Job: cancel another job, which then gets no reply."""

    job: int
    """Number of the job."""


Work = Create | Forward | Update | Drop | Spoil | Save | Load | Unload | Sample | Cancel
"""Any of the jobs for the compute process."""


class Job(Message, frozen=True):
    """A numbered job for the compute process; its body follows as a second message."""

    number: int
    """Number of the job, repeated in its replies."""
    work: Work
    """What the job does."""
    again: bool = False
    """Whether the job is a replay, which rebuilds a model. If a replay fails the model is removed,
    because the jobs after it would run with the wrong weights."""


class Began(Message, frozen=True, tag=True):
    """Reply: a job has started."""

    number: int
    """Number of the job."""


class Done(Message, frozen=True, tag=True):
    """Reply: a job has ended; the body of the response follows as a second message."""

    number: int
    """Number of the job."""
    error: str = ""
    """Why the job failed; "" if it succeeded."""
    theirs: bool = False
    """Whether the client is responsible for the error; ``is_client_error`` of the stored reply. The
    column of the request store has this name too."""
    kept: bool = False
    """Whether the state was saved into the ``keep`` folder of the job."""
    version: int = -1
    """Version of the weights that the job computed with."""
    digest: str = ""
    """Digest of these weights."""
    numbers: dict[str, float] = msgspec.field(default_factory=dict)
    """Metrics of the job."""


class Ready(Message, frozen=True, tag=True):
    """Reply: the base model is loaded."""

    longest: int
    """Maximum sequence length in tokens."""
    vocabulary: int
    """Size of the vocabulary."""
    digest: str
    """Digest of the weights of the base model."""
    nbytes: int
    """Bytes of these weights."""


ComputeReply = Began | Done | Ready
"""Any message from the compute process."""
_ENCODER = msgspec.msgpack.Encoder()
_FLUSH_TIMEOUT_S = 5.0
"""Seconds that ``Channel.close`` waits for the outgoing messages to be sent."""
_EXIT_TIMEOUT_S = 10.0
"""Seconds that the compute process gets to exit after SIGTERM before it is killed."""


class Channel:
    """One end of a message channel, which sends and receives on its own threads.

    ``on_message(message, body)`` is called on the receiving thread for each message, decoded as
    ``message_type``; ``on_end()`` is called once, when the other end has closed. ``send`` never
    blocks.
    """

    def __init__(
        self,
        own: socket.socket,
        message_type: object,
        on_message: Callable[..., None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = Connection(own.detach())
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(message_type)  # pyright: ignore[reportArgumentType]
        self._on_message = on_message
        self._on_end = on_end
        self._outgoing: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._receiver = threading.Thread(target=self._receive, name="jobs in", daemon=True)
        self._sender = threading.Thread(target=self._write, name="jobs out", daemon=True)

    def start(self) -> None:
        """Start sending and receiving."""
        self._receiver.start()
        self._sender.start()

    def send(self, message: Message, body: bytes = b"") -> None:
        """Queue a message and its body for sending."""
        self._outgoing.put((_ENCODER.encode(message), body))

    def close(self) -> None:
        """Send the queued messages, then close this end for writing; the other end sees the end of
        the stream."""
        self._outgoing.put(None)
        self._sender.join(_FLUSH_TIMEOUT_S)

    def _write(self) -> None:
        try:
            while (item := self._outgoing.get()) is not None:
                for part in item:
                    self._connection.send_bytes(part)
        except OSError:
            return  # the receiving thread reports the end of the channel
        self._shut_down_writing()

    def _shut_down_writing(self) -> None:
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
                message = self._connection.recv_bytes()
                body = self._connection.recv_bytes()
                self._on_message(self._decoder.decode(message), body)
        except (EOFError, OSError):
            self._outgoing.put(None)  # stop the sending thread, which would keep the socket open
            self._on_end()


class ComputeProcess:
    """Handle of the compute process.

    ``on_reply(reply, body)`` and ``on_exit(exit_code)`` are called on the event loop that is
    running when the handle is created; ``on_exit`` is not called after ``stop``. The compute
    process ends when this process does.
    """

    def __init__(
        self,
        options: ComputeOptions,
        on_reply: Callable[[ComputeReply, bytes], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._options = msgspec.json.encode(options).decode()
        self._on_reply = on_reply
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    def start(self) -> None:
        """Start the process. May be called again after it has died."""
        own_end, child_end = socket.socketpair()
        with child_end:
            arguments = [
                str(os.getpid()),
                "0",
                "realhf.tinker.compute",
                str(child_end.fileno()),
                self._options,
            ]
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "realhf.scheduler.child", *arguments],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
            )

        def on_message(message: ComputeReply, body: bytes) -> None:
            self._loop.call_soon_threadsafe(self._on_reply, message, body)

        def on_end() -> None:
            self._loop.call_soon_threadsafe(self._reap, process)

        self._channel = Channel(own_end, ComputeReply, on_message, on_end)
        self._channel.start()

    def send(self, job: Job, body: bytes = b"") -> None:
        """Send a job without blocking."""
        assert self._channel is not None, "it is started first"
        self._channel.send(job, body)

    async def stop(self) -> None:
        """Stop the process; does nothing before ``start``."""
        process = self._process
        self._process = None
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        if process is self._process:
            process.kill()  # it may have closed only its end of the channel
            self._on_exit(process.wait())
