"""Slots: a slot is a simulator, the agent's CLI worker and folder, and a second worker for the
environment itself.

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
"""Account id, the same in every slot."""
START_TIMEOUT_S = 30.0
"""Seconds within which a simulator must have started."""
USABLE_S = 3.0
"""Seconds within which a simulator and a worker must answer before they are leased. Slower ones are
replaced, which is cheap. The limit must be short, because the requester waits, and clients of the
environment server time out after ten seconds."""
_CHECKED_BYTES = 1 << 20
"""Output limit of the environment's own commands, in bytes. It is large, because a check must see
the complete output."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PermittedReads:
    """The reads that are permitted in a real account."""

    permits: Callable[[str, str], bool]
    """Function that returns whether an operation of a service is a permitted read, given (service,
    operation)."""
    services: frozenset[str]
    """Services (botocore's names) that must be read, because an agent may write to them."""


class Slot:
    """One slot of the pool. Use it from one thread at a time.

    The account id is the same in every slot and lease. Each slot has its own simulator process,
    which is emptied between leases, so different ids would separate nothing. With equal ids, the
    ids and ARNs in observations are equal for the same task and seed.
    """

    simulated = True
    """Whether the account is simulated, so that it may be emptied, set up and disturbed."""
    reads: PermittedReads | None = None
    """The reads permitted in a real account. None for a simulated account, which is read as a
    whole."""

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
        self.executor = CliExecutor(
            spawn, ministack.alive, lambda: self.ministack.healthy(), limits
        )
        """Runs the agent's commands."""
        self.own_files = VirtualFolder(folder.with_name(f"{folder.name}-environment"))
        spawn = partial(self._spawn_worker, self.own_files, ministack.connect_as_environment)
        self.own_executor = CliExecutor(
            spawn,
            ministack.alive,
            lambda: self.ministack.healthy(),
            replace(limits, stdout_bytes=_CHECKED_BYTES),
        )
        """Runs the command lines of tasks (set-up, drift, checks) in a worker of its own. The
        agent's commands have no access to its connection and folder. The worker is forked on first
        use."""
        self.state = StateClient(
            f"http://{HOST}:{ministack.port}", ACCOUNT, ministack.connect_as_owner, factory
        )
        """API client for set-up, grading and listing, which the agent cannot see."""
        self._zygote = zygote
        self.reference_slots: ReferenceSlots | None = None
        """Runs solutions on an extra slot. None for that extra slot itself."""

    @property
    def port(self) -> int:
        """Port of the slot's simulator."""
        return self.ministack.port

    @property
    def endpoint(self) -> str:
        """URL of the simulator, as shown in messages."""
        return f"http://{HOST}:{self.port}"

    @property
    def worker_pid(self) -> int:
        """Pid of the agent's CLI worker."""
        return self.executor.worker_pid

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Pids of all CLI workers that may be running a command of this lease."""
        return tuple(
            pid for pid in (self.executor.worker_pid, self.own_executor.worker_pid) if pid > 0
        )

    def lease(self) -> Slot:
        """Return a new handle of the slot, which stands for one lease. An old handle cannot give
        back a later lease."""
        return copy.copy(self)

    def start(self) -> None:
        """Start the agent's CLI worker. Call it once the simulator is healthy."""
        self.executor.start()

    def is_usable(self) -> bool:
        """Return whether simulator and CLI worker answer now. A worker that does not answer is
        replaced first."""
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
        """Empty the account. From now on its generated ids depend on ``seed`` alone. The CLI worker
        is kept.

        A simulator that is dead, hangs, or has used much of its budget is respawned. Raises
        SimulatorLost if that fails too.
        """
        self._clear_files()
        try:
            if self.ministack.is_worn_out():
                raise OSError("a simulator that grew is not reset")
            self.ministack.reset(seed)
        except OSError:
            self.respawn()
            self.ministack.reset(seed)

    def scrub(self) -> None:
        """Make a used slot indistinguishable from a new one.

        If a command reached the simulator, simulator and CLI worker are replaced by new forks,
        because a reset cannot clear everything that a process may hold. Raises SimulatorLost or
        OSError if the slot stays dirty.
        """
        if self._needs_respawn():
            self.respawn()
        else:
            self._stop_workers()
            self._clear_files()
            self.ministack.reset(0)
            self.start()
        leftovers = self.ministack.leftovers()
        if leftovers:
            raise SimulatorLost(f"slot {self.index} still has {leftovers} after its scrub")

    def _needs_respawn(self) -> bool:
        """Return whether a scrub must replace the simulator: since its start it received requests
        on other connections than the owner's, or is worn out. True if that cannot be determined."""
        try:
            report = self.ministack.requests(after=sys.maxsize)
            return (
                bool(report["refused"] or set(report["entrances"]) - {"owner"})
                or self.ministack.is_worn_out()
            )
        except OSError:
            return True

    def respawn(self) -> None:
        """Replace the simulator and the CLI worker. Raises SimulatorLost with the reason."""
        try:
            self._stop_workers()
            if not self.ministack.alive():
                _LOG.warning(
                    "slot %d: its simulator had ended: %s", self.index, self.ministack.last_words()
                )
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
        """Empty the folders of both workers. If a folder had to be replaced by a new one, end its
        worker."""
        for files, executor in ((self.files, self.executor), (self.own_files, self.own_executor)):
            if not files.clear():
                executor.stop()  # the next command starts a worker in the new folder

    def _spawn_worker(
        self, files: VirtualFolder, connect: Callable[[], socket.socket]
    ) -> tuple[ForkedProcess, socket.socket]:
        """Fork a CLI worker and return (its process, the channel to it). Raises SimulatorLost."""
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


MAX_RESULTS = 256
"""Maximum number of cached results. The least recently requested one is dropped first."""


class ReferenceSlots:
    """Runner of functions, such as playing a solution, one after another on an extra slot in a
    thread of its own.

    The slot is started on first use. If the simulator is lost while a function runs, the function
    is run once more. Thread-safe.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._started = False
        self._lock = threading.Lock()
        self._results: OrderedDict[str, Future[Any]] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None
        self._ended = 0

    def begin(self, key: str, play: Callable[[Slot], Any]) -> Future[Any]:
        """Return the future of ``play``'s result, cached under ``key``. ``play`` runs once for all
        callers with this key, unless it failed."""
        with self._lock:
            known = self._results.get(key)
            if known is not None and not (
                known.done() and (known.cancelled() or known.exception() is not None)
            ):
                self._results.move_to_end(key)
                return known
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "reference-slots")
            future = self._results[key] = self._thread.submit(self._run_counted, play)
            while len(self._results) > MAX_RESULTS:
                self._results.popitem(last=False)
            return future

    def result(self, future: Future[Any], patience_s: float) -> Any:
        """Return the result of a future.

        Raises what the function raised, or TimeoutError if no function at all has ended for
        ``patience_s`` seconds. The wait may be long, as long as the queue moves.
        """
        while True:
            ended = self._ended
            try:
                return event_loops.wait_for_future(future, patience_s)
            except TimeoutError:
                if future.done() or ended == self._ended:
                    raise

    def _run_counted(self, play: Callable[[Slot], Any]) -> Any:
        """Run a function and count its end."""
        try:
            return self._run(play)
        finally:
            self._ended += 1  # needs no lock: only this thread writes it

    def _run(self, play: Callable[[Slot], Any]) -> Any:
        """Run a function on the slot, which is started first. Retry once if the simulator is
        lost."""
        try:
            self._start()
        except SimulatorLost:
            if self._thread is None:
                raise
            self._start()  # lost while starting; retry, because many sessions may wait for it
        try:
            return play(self._slot)
        except Exception:
            if self._thread is None or self._slot.ministack.alive():
                raise
        self._slot.respawn()  # lost during the play; retry, because many sessions may wait for it
        return play(self._slot)

    def _start(self) -> None:
        """Start the slot unless it is running. Raises SimulatorLost."""
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
        """End the function in progress and the slot. Idempotent."""
        with self._lock:
            thread = self._thread
            self._thread = None
            self._results.clear()
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)
        self._slot.stop()
        if thread is not None:
            thread.shutdown()
            self._slot.stop()  # the function may have started a new simulator in between
