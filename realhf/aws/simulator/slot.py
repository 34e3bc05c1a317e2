"""Holds what a session leases: one simulator, the agent's CLI worker and folder, and the environment's own of both.

Source: docs/reference/environment.md 1 and 3.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from realhf.aws.cli.executor import CliExecutor, OutputLimits, SimulatorLost
from realhf.aws.cli.state_client import ClientFactory, StateClient
from realhf.aws.cli.virtual_folder import VirtualFolder
from realhf.aws.simulator.ministack_process import HOST, MiniStackProcess
from realhf.base import event_loops
from realhf.env.containment.fork_server import ForkedProcess, ForkServer

ACCOUNT = "000000000000"
START_TIMEOUT_S = 30.0
USABLE_S = 3.0
"""Seconds that a simulator, and a worker, has to answer before it is handed out. One that needs longer is replaced,
which costs little; whoever asked for it waits meanwhile, and a client of a server for ten seconds only."""
_CHECKED_BYTES = 1 << 20
"""Bytes kept of what a command of the environment's own prints: a check must see the whole answer."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PermittedReads:
    """Says how a real account is read: by the operations that ``permits(service, operation)`` knows, and at least in
    ``services`` (botocore's names), those that an agent may write to."""

    permits: Callable[[str, str], bool]
    services: frozenset[str]


class Slot:
    """Holds one slot. Use it from one thread at a time.

    The account id is the same in every slot and every lease: a slot has a simulator process of its own that is emptied
    between leases, so the id separates nothing, and ids and ARNs in observations stay the same for the same task and
    seed.
    """

    simulated = True
    """The world may be emptied, set up and disturbed."""
    reads: PermittedReads | None = None
    """The only way to read the account; None where it is read as a whole."""

    def __init__(
        self,
        index: int,
        ministack: MiniStackProcess,
        zygote: ForkServer,
        folder: Path,
        factory: ClientFactory,
        limits: OutputLimits,
    ) -> None:
        self.index = index
        self.account = ACCOUNT
        self.ministack = ministack
        self.files = VirtualFolder(folder)
        spawn = partial(self._spawn_worker, self.files, ministack.connect)
        self.executor = CliExecutor(spawn, ministack.alive, lambda: self.ministack.healthy(), limits)
        """The agent's shell."""
        self.own_files = VirtualFolder(folder.with_name(f"{folder.name}-environment"))
        spawn = partial(self._spawn_worker, self.own_files, ministack.connect_as_environment)
        self.own_executor = CliExecutor(
            spawn, ministack.alive, lambda: self.ministack.healthy(), replace(limits, stdout_bytes=_CHECKED_BYTES)
        )
        """Runs command lines of tasks (set-up, drift, checks) in a worker, over a connection and in a folder that no
        command of an agent ever reaches. The worker is forked when the first such line comes."""
        self.state = StateClient(f"http://{HOST}:{ministack.port}", ACCOUNT, ministack.connect_as_owner, factory)
        """Calls that set up, grade and list; never seen by the agent."""
        self._zygote = zygote
        self.reference_slots: ReferenceSlots | None = None
        """Plays the environment's own plays; None for the slot that it plays on."""

    @property
    def port(self) -> int:
        """Port of the simulator."""
        return self.ministack.port

    @property
    def endpoint(self) -> str:
        """Address of the simulator in messages."""
        return f"http://{HOST}:{self.port}"

    @property
    def worker_pid(self) -> int:
        """Pid of the agent's worker."""
        return self.executor.worker_pid

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Pids of every worker that may be busy with a command of this lease."""
        return tuple(pid for pid in (self.executor.worker_pid, self.own_executor.worker_pid) if pid > 0)

    def lease(self) -> Slot:
        """Return another handle of the same slot; what is leased is the handle, so that an old one gives nothing
        back."""
        return copy.copy(self)

    def start(self) -> None:
        """Start the agent's worker; called once the simulator is healthy."""
        self.executor.start()

    def usable(self) -> bool:
        """Return whether simulator and worker answer right now; a worker that does not is replaced."""
        if not self.ministack.alive() or not self.ministack.healthy(USABLE_S):
            return False
        try:
            self.executor.start()
            if not self.executor.responsive(USABLE_S):
                self.executor.stop()
                self.executor.start()
        except (OSError, RuntimeError):
            return False
        return True

    def reset(self, seed: int = 0) -> None:
        """Empty the world; its ids depend on ``seed`` alone from now on. The warm worker is kept.

        A simulator that is dead, hangs, or used much of its budget is respawned. Raises SimulatorLost when that fails
        too.
        """
        self._clear_files()
        try:
            if self.ministack.spent():
                raise OSError("a simulator that grew is not reset")
            self.ministack.reset(seed)
        except OSError:
            self.respawn()
            self.ministack.reset(seed)

    def scrub(self) -> None:
        """Make a used slot indistinguishable from a new one. Simulator and worker are new forks where a command reached
        them: a reset cannot vouch for all that a process holds. Raises SimulatorLost or OSError when the slot stays
        dirty."""
        if self._reached():
            self.respawn()
        else:
            self._stop_workers()
            self._clear_files()
            self.ministack.reset(0)
            self.start()
        leftovers = self.ministack.leftovers()
        if leftovers:
            raise SimulatorLost(f"slot {self.index} still has {leftovers} after its scrub")

    def _reached(self) -> bool:
        """Return whether the simulator took anything but the environment's own calls since it was started, or too much
        for them."""
        try:
            report = self.ministack.requests(after=sys.maxsize)
            return bool(report["refused"] or set(report["entrances"]) - {"owner"}) or self.ministack.spent()
        except OSError:
            return True

    def respawn(self) -> None:
        """Replace simulator and worker. Raises SimulatorLost with the reason."""
        try:
            self._stop_workers()
            if not self.ministack.alive():
                _LOG.warning("slot %d: its simulator had ended: %s", self.index, self.ministack.last_words())
            self.ministack.stop()
            self._clear_files()
            self.ministack.start()
            self.state.endpoint = self.endpoint
            self.ministack.wait_healthy(START_TIMEOUT_S)
            self.start()
        except (OSError, RuntimeError) as error:
            raise SimulatorLost(f"slot {self.index}: {error}") from error

    def stop(self) -> None:
        """End the workers and the simulator."""
        self._stop_workers()
        self.state.close()
        self.ministack.stop()

    def _stop_workers(self) -> None:
        self.executor.stop()
        self.own_executor.stop()

    def _clear_files(self) -> None:
        for files, executor in ((self.files, self.executor), (self.own_files, self.own_executor)):
            if not files.clear():
                executor.stop()  # the next command's worker begins in the folder's successor

    def _spawn_worker(
        self, files: VirtualFolder, connect: Callable[[], socket.socket]
    ) -> tuple[ForkedProcess, socket.socket]:
        try:
            connection = connect()
        except OSError as error:
            raise SimulatorLost(f"simulator of slot {self.index} is gone: {error}") from error
        ours, theirs = socket.socketpair()
        with connection, theirs:
            request = {"folder": os.path.realpath(files.path)}
            try:
                fds = [theirs.fileno(), connection.fileno()]
                return self._zygote.fork(request, fds, f"CLI worker {self.index}"), ours
            except BaseException:
                ours.close()
                raise


KEPT = 256
"""Results that are kept, the latest asked for."""


class ReferenceSlots:
    """Plays on ``slot``, which is started when first needed, on a thread of its own, one play after the other. A play
    over which its simulator is lost is played once more. Thread-safe."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._started = False
        self._lock = threading.Lock()
        self._results: OrderedDict[str, Future[Any]] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None
        self._ended = 0

    def begin(self, key: str, play: Callable[[Slot], Any]) -> Future[Any]:
        """Return what ``play`` will have found for ``key``. It is played once for all who ask, unless it failed."""
        with self._lock:
            known = self._results.get(key)
            if known is not None and not (known.done() and (known.cancelled() or known.exception() is not None)):
                self._results.move_to_end(key)
                return known
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "reference-slots")
            found = self._results[key] = self._thread.submit(self._played, play)
            while len(self._results) > KEPT:
                self._results.popitem(last=False)
            return found

    def result(self, found: Future[Any], patience_s: float) -> Any:
        """Return what was found once it is there. Raises what the play raised, and TimeoutError when no play has come
        to its end for ``patience_s`` seconds: however many are ahead of it, the queue must move."""
        while True:
            ended = self._ended
            try:
                return event_loops.result(found, patience_s)
            except TimeoutError:
                if found.done() or ended == self._ended:
                    raise

    def _played(self, play: Callable[[Slot], Any]) -> Any:
        try:
            return self._play(play)
        finally:
            self._ended += 1  # by one thread only

    def _play(self, play: Callable[[Slot], Any]) -> Any:
        try:
            self._start()
        except SimulatorLost:
            if self._thread is None:
                raise
            self._start()  # it was lost while it came up, and many sessions may wait for it
        try:
            return play(self._slot)
        except Exception:
            if self._thread is None or self._slot.ministack.alive():
                raise
        self._slot.respawn()  # it was lost over the play, and many sessions may wait for it
        return play(self._slot)

    def _start(self) -> None:
        if self._started:
            return
        try:
            self._slot.ministack.start()
            self._slot.ministack.wait_healthy(START_TIMEOUT_S)
        except (OSError, RuntimeError) as error:
            self._slot.ministack.stop()
            raise SimulatorLost(f"the slot for the environment's own plays: {error}") from error
        self._started = True

    def stop(self) -> None:
        """End the play under way and the slot. Idempotent."""
        with self._lock:
            thread = self._thread
            self._thread = None
            self._results.clear()
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)
        self._slot.stop()
        if thread is not None:
            thread.shutdown()
            self._slot.stop()  # the play may have begun a new simulator meanwhile
