"""MiniStackPool: one simulator, one CLI worker and one virtual folder per session (spec sections 1 and 3)."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

from realhf.env.executor import CliExecutor, OutputLimits, SimulatorLost
from realhf.env.fork_server import ForkedProcess, ForkServer
from realhf.env.ministack_process import MiniStackProcess, not_up, zygote_environment
from realhf.env.state_client import ClientFactory, StateClient
from realhf.env.vfs import VirtualFolder

ACCOUNT = "000000000000"
START_TIMEOUT_S = 60.0
_SANDBOX_MODES = ("auto", "plain")

logger = logging.getLogger(__name__)


class Slot:
    """What a session leases. Use from one thread at a time."""

    def __init__(self, index: int, ministack: MiniStackProcess, zygote: ForkServer, folder: Path,
                 factory: ClientFactory, limits: OutputLimits) -> None:  # fmt: skip
        self.index = index
        self.account = ACCOUNT
        self.ministack = ministack
        self.files = VirtualFolder(folder)
        self._zygote = zygote
        self.executor = CliExecutor(self._spawn_worker, lambda: self.ministack.healthy(), limits)
        self._state: StateClient | None = None
        self._factory = factory
        self.worker_pid = -1

    @property
    def port(self) -> int:
        return self.ministack.port

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def state(self) -> StateClient:
        """Calls that set up, grade and list; never seen by the agent."""
        if self._state is None:
            self._state = StateClient(self.endpoint, self.account, self._factory)
        return self._state

    def start(self) -> None:
        """Called once the simulator is healthy."""
        self.executor.start()

    def reset(self, seed: int = 0) -> None:
        """An empty world whose ids depend on ``seed`` alone; the warm worker is kept.

        A dead simulator is respawned. Raises SimulatorLost when that fails too."""
        self.files.clear()
        try:
            self.ministack.reset(seed)
        except OSError:
            self.respawn()
            self.ministack.reset(seed)

    def respawn(self) -> None:
        """Replace simulator and worker. Raises SimulatorLost with the reason."""
        self.executor.stop()
        self.ministack.stop()
        try:
            self.ministack.start()
            self.ministack.wait_healthy(START_TIMEOUT_S)
            self.start()
        except (OSError, RuntimeError) as error:
            raise SimulatorLost(f"slot {self.index}: {error}") from error

    def stop(self) -> None:
        self.executor.stop()
        if self._state is not None:
            self._state.close()
        self.ministack.stop()

    def _spawn_worker(self) -> tuple[ForkedProcess, socket.socket]:
        try:
            connection = self.ministack.connect()
        except OSError as error:
            raise SimulatorLost(f"simulator of slot {self.index} is gone: {error}") from error
        ours, theirs = socket.socketpair()
        with connection, theirs:
            request = {"folder": os.path.realpath(self.files.path)}
            process = self._zygote.fork(request, [theirs.fileno(), connection.fileno()], f"CLI worker {self.index}")
        self.worker_pid = process.pid
        return process, ours


class MiniStackPool:
    """A free list of slots. ``base_port`` 0 lets the kernel choose the ports. Thread-safe.

    Children are always contained by audit hooks and resource limits; with ``sandbox="auto"`` they also live
    without any network where the kernel allows it, with ``"plain"`` they do not try."""

    def __init__(
        self, size: int, base_port: int = 0, *, sandbox: str = "auto", limits: OutputLimits | None = None
    ) -> None:
        if size < 1:
            raise ValueError(f"pool size must be at least 1, got {size}")
        if sandbox not in _SANDBOX_MODES:
            raise ValueError(f"sandbox is one of {', '.join(_SANDBOX_MODES)}, got {sandbox!r}")
        self.size = size
        self._base_port = base_port
        self._sandbox = sandbox
        self._limits = limits or OutputLimits()
        self._lock = threading.Lock()
        self._free: deque[Slot] = deque()
        self._leased: dict[int, Slot] = {}
        self._counters = {"acquired": 0, "exhausted": 0, "respawns": 0, "scrub_seconds": 0.0}
        self._root: Path | None = None
        self._log: IO[bytes] | None = None
        self._zygotes: list[ForkServer] = []
        self.slots: list[Slot] = []

    def start(self) -> None:
        """Start everything and wait until all slots are healthy. On any failure nothing is left running.

        Raises OSError naming a taken port, RuntimeError with the log of what did not come up."""
        atexit.register(self.stop)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        root = self._root = Path(tempfile.mkdtemp(prefix="realhf-env-"))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the pool)
        simulators = ForkServer(
            "realhf.env.ministack_server", self._log, zygote_environment(root), [self._sandbox, str(root)]
        )
        workers = ForkServer("realhf.env.cli_zygote", self._log, worker_environment(), [ACCOUNT, self._sandbox])
        self._zygotes = [simulators, workers]
        factory = ClientFactory()
        for index in range(self.size):
            port = self._base_port + index if self._base_port else 0
            ministack = MiniStackProcess(port, simulators, root / f"simulator-{index}")
            slot = Slot(index, ministack, workers, root / f"files-{index}", factory, self._limits)
            self.slots.append(slot)
            ministack.bind()
        for zygote in self._zygotes:
            zygote.start()
        for zygote, name in ((simulators, "MiniStack"), (workers, "the AWS CLI")):
            self._await(zygote, name)
        for slot in self.slots:
            slot.ministack.start()
        for slot in self.slots:
            slot.ministack.wait_healthy(START_TIMEOUT_S)
            slot.start()
        self._free.extend(self.slots)

    def _await(self, zygote: ForkServer, name: str) -> None:
        try:
            greeting = zygote.wait_ready(START_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            assert self._log is not None
            self._log.seek(0)
            tail = self._log.read()[-2000:].decode("utf-8", "replace")
            raise RuntimeError(not_up(name, error, tail)) from error
        if self._sandbox == "auto" and not greeting["isolated"]:
            logger.warning("the kernel gives no network namespace: egress is stopped by audit hooks alone")

    def acquire(self) -> Slot:
        """A free, living slot, least recently used first. Raises RuntimeError when there is none."""
        with self._lock:
            if not self._free:
                self._counters["exhausted"] += 1
                raise RuntimeError("MiniStack pool exhausted")
            slot = self._free.popleft()
            self._leased[slot.index] = slot
            self._counters["acquired"] += 1
        if not slot.ministack.alive():
            self._respawn_leased(slot)
        return slot

    def _respawn_leased(self, slot: Slot) -> None:
        """Raises SimulatorLost; the slot is then free again, and dead: the next lease tries again."""
        self._counters["respawns"] += 1
        try:
            slot.respawn()
        except SimulatorLost:
            with self._lock:
                del self._leased[slot.index]
                self._free.append(slot)
            raise

    def release(self, slot: Slot) -> None:
        """Scrub the slot and give it back. Raises ValueError for a slot that is not leased."""
        with self._lock:
            if self._leased.get(slot.index) is not slot:
                raise ValueError(f"slot {slot.index} is not leased from this pool")
            del self._leased[slot.index]
        started = time.perf_counter()
        try:
            slot.executor.restart()
            slot.reset()
        except (SimulatorLost, OSError, RuntimeError) as error:
            logger.warning("slot %d ends and is replaced at its next lease: %s", slot.index, error)
            slot.stop()
        self._counters["scrub_seconds"] += time.perf_counter() - started
        with self._lock:
            self._free.append(slot)

    @property
    def free_count(self) -> int:
        with self._lock:
            return len(self._free)

    def metrics(self) -> dict[str, Any]:
        """Counters for /metrics."""
        with self._lock:
            numbers: dict[str, Any] = {"size": self.size, "free": len(self._free), "leased": len(self._leased)}
        numbers.update(self._counters)
        counters = [slot.executor.counters for slot in self.slots]
        for name in ("commands", "seconds", "timeouts", "worker_starts"):
            numbers[name] = sum(getattr(counter, name) for counter in counters)
        refusals: dict[str, int] = {}
        for counter in counters:
            for rule, count in counter.refusals.items():
                refusals[rule] = refusals.get(rule, 0) + count
        numbers["refusals"] = refusals
        return numbers

    def stop(self) -> None:
        """End all processes, free all ports, remove all files. Idempotent."""
        atexit.unregister(self.stop)
        for slot in self.slots:
            slot.stop()
        for zygote in self._zygotes:
            zygote.stop()
        with self._lock:
            self.slots, self._zygotes = [], []
            self._free.clear()
            self._leased.clear()
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None


def worker_environment() -> dict[str, str]:
    """The whole environment of the CLI workers."""
    return {
        "PATH": "/nonexistent",
        "HOME": "/nonexistent",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "AWS_ACCESS_KEY_ID": ACCOUNT,
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_DEFAULT_OUTPUT": "json",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_PAGER": "",
    }
