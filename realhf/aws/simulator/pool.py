"""Defines MiniStackPool: one simulator, one CLI worker and one virtual folder per session.

Source: docs/reference/environment.md 1 and 3.
"""

from __future__ import annotations

import atexit
import logging
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from realhf.aws.cli.executor import OutputLimits, SimulatorLost
from realhf.aws.cli.state_client import ClientFactory
from realhf.aws.cli.virtual_folder import remove_folder
from realhf.aws.simulator.bench import Bench
from realhf.aws.simulator.health_loop import HealthLoop
from realhf.aws.simulator.lease_book import EXHAUSTED, LeaseBook, SlotState
from realhf.aws.simulator.ministack_process import (
    SIMULATOR_CPU_S,
    SIMULATOR_MEMORY_MB,
    MiniStackProcess,
    not_up,
    zygote_environment,
)
from realhf.aws.simulator.slot import ACCOUNT, START_TIMEOUT_S, Slot
from realhf.aws.simulator.startup_check import startup_check
from realhf.base.paths import IMPORT_ROOT
from realhf.env.containment.fork_server import ForkServer
from realhf.env.containment.probe import (
    LAMBDA_MODES,
    SANDBOX_MODES,
    SIMULATORS,
    WORKERS,
    Attempt,
    Containment,
    NotContained,
    judge,
    probe_layers,
)
from realhf.env.containment.sandbox import LAYERS, housekept, sandboxed

__all__ = ["ACCOUNT", "MiniStackPool", "Slot", "worker_environment"]

RETURN_WAIT_S = 8.0
"""Seconds that ``acquire`` waits for a slot that is being scrubbed or replaced. A client of a server waits for ten, and
has to hear that there is none."""
CONTAINED_PARTS = (
    "__init__.py",
    "base",
    "env/__init__.py",
    "env/containment",
    "aws/__init__.py",
    "aws/cli",
    "aws/simulator",
)
"""Parts of this package that simulators and CLI workers see: their own code, and neither tasks nor graders."""

logger = logging.getLogger(__name__)


class MiniStackPool:
    """Leases slots. ``base_port`` 0 lets the kernel choose the ports. Thread-safe.

    ``sandbox``: ``auto`` (bubblewrap where it works), ``bwrap`` (or do not start), ``plain`` (audit hooks, the system
    call filter and resource limits alone). ``lambda_mode``: ``stub`` (code never runs) or ``sandbox``. ``may_lack``:
    layers (``process_guard.LAYERS``) without which it starts all the same. ``memory_mb``: MiB that a simulator may
    take. Raises ValueError for other words.
    """

    def __init__(
        self,
        size: int,
        base_port: int = 0,
        *,
        sandbox: str = "auto",
        limits: OutputLimits | None = None,
        lambda_mode: str = "stub",
        may_lack: frozenset[str] = frozenset(),
        memory_mb: int = SIMULATOR_MEMORY_MB,
    ) -> None:
        if size < 1:
            raise ValueError(f"pool size must be at least 1, got {size}")
        for name, value, allowed in (("sandbox", sandbox, SANDBOX_MODES), ("lambda_mode", lambda_mode, LAMBDA_MODES)):
            if value not in allowed:
                raise ValueError(f"{name} is one of {', '.join(allowed)}, got {value!r}")
        self.size = size
        self.slots: list[Slot] = []
        self._base_port = base_port
        self._modes = (sandbox, lambda_mode)
        if unknown := may_lack - set(LAYERS):
            raise ValueError(f"may_lack names {', '.join(sorted(unknown))}; layers are {', '.join(LAYERS)}")
        self._may_lack = may_lack
        self._memory_mb = memory_mb
        self._limits = limits or OutputLimits()
        self._lock = threading.Lock()
        self._counters = {"acquired": 0, "exhausted": 0, "respawns": 0, "scrubs": 0, "scrub_seconds": 0.0}
        self._root: Path | None = None
        self._log: IO[bytes] | None = None
        self._zygotes: list[ForkServer] = []
        self._containment: Containment | None = None
        self._book: LeaseBook[Slot] = LeaseBook(())
        self._health: HealthLoop | None = None
        self._bench: Bench | None = None

    def start(self) -> None:
        """Start everything, prove the containment and wait until all slots are healthy. On any failure nothing is
        left running.

        Raises OSError naming a taken port, RuntimeError with the log of what did not come up or with what is not
        contained or not available."""
        atexit.register(self.stop)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        contained = self._containment = Containment.decide(*self._modes)
        root = self._root = Path(tempfile.mkdtemp(prefix="realhf-env-"))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the pool)
        self._make_slots(root, contained)
        for zygote in self._zygotes:
            zygote.start()
        for zygote, name in zip(self._zygotes, ("MiniStack", "the AWS CLI", "the Lambda broker"), strict=False):
            self._await(zygote, name)
        contained.observed = judge(
            self._probe(root, contained), contained.layers, self._may_lack, "AWS_RL_ENV_MAY_LACK (--may-lack)"
        )
        for slot in self.slots:
            slot.ministack.start()
        for slot in self.slots:
            slot.ministack.wait_healthy(START_TIMEOUT_S)
            slot.start()
        # All slots are forks of the zygotes, and each proves its own hooks at its start: one of each is enough.
        contained.tested = startup_check(self.slots[0].ministack, root, contained.lambda_mode)
        if self._modes[0] == "auto" and contained.program is None:
            logger.warning(
                "bubblewrap does not work here: simulators and CLI workers see the host's files and are "
                "kept from them by audit hooks alone"
            )
        for index in range(self.size):
            self._book.free(index)
        self._health.start()  # pyright: ignore[reportOptionalMemberAccess]

    def _make_slots(self, root: Path, contained: Containment) -> None:
        files, simulators = root / "files", root / "simulators"
        for folder in (files, simulators):
            folder.mkdir()
        prefixes: list[list[str]] = [[], []]
        if contained.program is not None:
            prefixes = [
                housekept(sandboxed(contained.program, CONTAINED_PARTS, private=[simulators]), root),
                housekept(sandboxed(contained.program, CONTAINED_PARTS, writable=[files]), root),
            ]
        assert self._log is not None
        mode = contained.network_mode
        environment, may_lack = zygote_environment(simulators), ",".join(sorted(self._may_lack))
        parent = ForkServer(
            "realhf.aws.simulator.ministack_server",
            self._log,
            environment,
            [mode, str(root), may_lack, str(self._memory_mb)],
            prefixes[0],
        )
        workers = ForkServer(
            "realhf.aws.cli.zygote", self._log, worker_environment(), [ACCOUNT, mode, may_lack], prefixes[1]
        )
        self._zygotes = [parent, workers]
        broker = None
        if contained.broker is not None:
            broker = ForkServer(
                "realhf.aws.simulator.lambda_broker", self._log, worker_environment(), [str(contained.broker)]
            )
            self._zygotes.append(broker)
        factory = ClientFactory()
        for index in range(self.size + 1):
            port = self._base_port + index if self._base_port and index < self.size else 0
            ministack = MiniStackProcess(port, parent, simulators / str(index), broker)
            ministack.bind()
            self.slots.append(Slot(index, ministack, workers, files / str(index), factory, self._limits))
        self._bench = Bench(self.slots.pop())
        for slot in self.slots:
            slot.bench = self._bench
        self._book = LeaseBook(self.slots)
        self._health = HealthLoop(self._book, tuple(self.slots))

    def _probe(self, root: Path, contained: Containment) -> dict[str, list[Attempt]]:
        probed: dict[str, ForkServer] = dict(zip((SIMULATORS, WORKERS), self._zygotes, strict=False))
        try:
            return probe_layers(probed, root, contained.layers)
        except NotContained as error:
            raise NotContained(f"{error}\n{self._log_tail()}") from error

    def _log_tail(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        return self._log.read()[-2000:].decode("utf-8", "replace")

    def _await(self, zygote: ForkServer, name: str) -> None:
        assert self._containment is not None
        try:
            greeting = zygote.wait_ready(2 * START_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError(not_up(name, error, self._log_tail())) from error
        if "isolated" in greeting:
            self._containment.no_network = greeting["isolated"]

    def containment(self) -> str:
        """Return the layers that are active, for the log at start. Raises RuntimeError before ``start``."""
        if self._containment is None:
            raise RuntimeError("the pool was not started")
        budget = f"{self._memory_mb} MiB of memory and {SIMULATOR_CPU_S} s of CPU, by limits of its process"
        whole = f"{self.size * self._memory_mb / 1024:.1f} GiB for all {self.size}"
        return f"{self._containment.statement()}\n  budget of a simulator: {budget}; {whole}"

    def acquire(self) -> Slot:
        """Lease a slot that answers right now, the least recently used first; give this very object back.

        Raises RuntimeError("MiniStack pool exhausted") when there is none, SimulatorLost when the only free ones are
        dead and cannot be replaced.
        """
        sick = -1
        while True:
            try:
                index = self._book.take(0.0 if sick >= 0 else RETURN_WAIT_S)
            except RuntimeError:
                if sick < 0:
                    self._count("exhausted")
                    raise
                return self._revive(sick)
            if self.slots[index].usable():
                if sick >= 0:
                    self._wake()
                return self._grant(index)
            self._book.fail(index)
            sick = index

    def _revive(self, index: int) -> Slot:
        if not self._book.begin_respawn(index):
            self._count("exhausted")
            raise RuntimeError(EXHAUSTED)
        try:
            self.slots[index].respawn()
        except SimulatorLost:
            self._book.fail(index)
            self._wake()
            raise
        self._count("respawns")
        self._book.adopt(index)
        self._wake()
        return self._grant(index)

    def _grant(self, index: int) -> Slot:
        lease = self.slots[index].lease()
        self._book.grant(index, lease)
        self._count("acquired")
        return lease

    def release(self, slot: Slot) -> None:
        """Scrub the slot and give it back. A slot that stays dirty is replaced by the health loop instead.

        Raises ValueError for a lease that is not in force; a second release changes nothing."""
        self._book.give_back(slot.index, slot)
        started = time.perf_counter()
        try:
            slot.scrub()
        except (OSError, RuntimeError) as error:
            logger.warning("slot %d is replaced: %s", slot.index, error)
            self._book.fail(slot.index)
            self._wake()
        else:
            self._book.free(slot.index)
        self._count("scrubs")
        self._count("scrub_seconds", time.perf_counter() - started)

    def _wake(self) -> None:
        if self._health is not None:
            self._health.wake()

    def _count(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counters[name] += amount

    @property
    def free_count(self) -> int:
        """How many slots are free."""
        return len(self._book.in_state(SlotState.FREE))

    def metrics(self) -> dict[str, Any]:
        """Return metrics for /metrics: slots by state, counters of leases, respawns, scrubs and commands."""
        numbers: dict[str, Any] = {"size": self.size, **self._book.counts()}
        with self._lock:
            numbers.update(self._counters)
        if self._health is not None:
            numbers["respawns"] += self._health.respawns
            numbers["respawn_failures"] = self._health.failures
        counters = [slot.executor.counters for slot in list(self.slots)]
        for name in ("commands", "seconds", "timeouts", "worker_starts", "worker_kills"):
            numbers[name] = sum(getattr(counter, name) for counter in counters)
        refusals: dict[str, int] = {}
        for counter in counters:
            for rule, count in list(counter.refusals.items()):
                refusals[rule] = refusals.get(rule, 0) + count
        numbers["refusals"] = refusals
        return numbers

    def stop(self) -> None:
        """End all processes, free all ports, remove all files. Idempotent."""
        atexit.unregister(self.stop)
        if self._health is not None:
            self._health.stop()
        for slot in self.slots:
            slot.stop()
        if self._bench is not None:
            self._bench.stop()
        for zygote in self._zygotes:
            zygote.stop()
        self.slots, self._zygotes, self._health, self._bench = [], [], None, None
        self._book = LeaseBook(())
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._root is not None:
            remove_folder(self._root)
            self._root = None


def worker_environment() -> dict[str, str]:
    """Return the whole environment of the CLI workers."""
    return {
        "PATH": "/nonexistent",
        "HOME": "/nonexistent",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(IMPORT_ROOT),
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
