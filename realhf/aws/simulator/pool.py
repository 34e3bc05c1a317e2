r"""MiniStackPool: checks its containment, leases slots, monitors their health and replaces dead
ones.

starting -> free -> leased -> scrubbing -> free
                  \________\___________\-> unhealthy -> respawning -> free

Every transition is one call under one lock, so a slot has exactly one owner at any time: the free
list, a lease, or the thread that scrubs or respawns it. The self-test speaks plain HTTP to one
simulator; all others are forks of the same zygote. Source: docs/reference/environment.md 1, 3 and
5.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import enum
import io
import json
import logging
import select
import socket
import tempfile
import threading
import time
import urllib.parse
import zipfile
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from realhf.aws.cli.executor import OutputLimits, SimulatorLost
from realhf.aws.cli.state_client import ClientFactory
from realhf.aws.cli.virtual_folder import remove_folder
from realhf.aws.simulator.ministack_process import (
    ANSWER_S,
    BARE_ENVIRONMENT,
    SIMULATOR_CPU_S,
    SIMULATOR_MEMORY_MB,
    MiniStackProcess,
    start_failure,
    tail,
    zygote_environment,
)
from realhf.aws.simulator.slot import ACCOUNT, START_TIMEOUT_S, ReferenceSlots, Slot
from realhf.base import process_clock
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

EXHAUSTED = "MiniStack pool exhausted"
"""Message of the error if no slot is free."""


class SlotPhase(enum.StrEnum):
    """State of a slot between start, lease, scrub and respawn."""

    STARTING = "starting"
    FREE = "free"
    LEASED = "leased"
    SCRUBBING = "scrubbing"
    UNHEALTHY = "unhealthy"
    RESPAWNING = "respawning"


class LeaseBook:
    """States and leases of ``size`` slots, by index. All slots start as STARTING. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._states = [SlotPhase.STARTING] * size
        self._free: deque[int] = deque()
        self._leases: dict[int, object] = {}
        self._lock = threading.Condition()

    def take(self, patience_s: float = 0.0) -> int:
        """Mark the least recently used free slot as LEASED and return its index.

        Waits up to ``patience_s`` seconds for a slot that is about to return. Raises
        RuntimeError("MiniStack pool exhausted") if none becomes free.
        """
        with self._lock:
            deadline = process_clock.now() + patience_s
            while not self._free:
                left = deadline - process_clock.now()
                if left <= 0 or all(state is SlotPhase.LEASED for state in self._states):
                    raise RuntimeError(EXHAUSTED)
                self._lock.wait(left)
            index = self._free.popleft()
            self._states[index] = SlotPhase.LEASED
            return index

    def grant(self, index: int, lease: object) -> None:
        """Record the lease object of a taken slot."""
        with self._lock:
            self._leases[index] = lease

    def give_back(self, index: int, lease: object) -> None:
        """End a lease; the slot is SCRUBBING from now on. Raises ValueError if this lease is not in
        force."""
        with self._lock:
            if index not in self._leases or self._leases[index] is not lease:
                raise ValueError(f"slot {index} is not leased from this pool")
            del self._leases[index]
            self._states[index] = SlotPhase.SCRUBBING

    def free(self, index: int) -> None:
        """Mark a started, scrubbed or respawned slot as FREE. Raises ValueError if it is free or
        leased."""
        with self._lock:
            if self._states[index] in (SlotPhase.FREE, SlotPhase.LEASED):
                raise ValueError(f"slot {index} is {self._states[index]}; it cannot become free")
            self._states[index] = SlotPhase.FREE
            self._free.append(index)
            self._lock.notify()

    def fail(self, index: int) -> None:
        """Mark a slot as UNHEALTHY, because its owner found it dead or dirty."""
        with self._lock:
            self._states[index] = SlotPhase.UNHEALTHY

    def fail_if_free(self, index: int) -> bool:
        """Mark a slot as UNHEALTHY if it is free, because a health check found it dead.

        Returns False if the slot was taken in the meantime; its new owner will notice.
        """
        with self._lock:
            if self._states[index] is not SlotPhase.FREE:
                return False
            self._free.remove(index)
            self._states[index] = SlotPhase.UNHEALTHY
            return True

    def begin_respawn(self, index: int) -> bool:
        """Mark an UNHEALTHY slot as RESPAWNING. Returns False if another thread respawns it."""
        with self._lock:
            if self._states[index] is not SlotPhase.UNHEALTHY:
                return False
            self._states[index] = SlotPhase.RESPAWNING
            return True

    def adopt(self, index: int) -> None:
        """Lease a respawned slot directly to the caller, without making it free first."""
        with self._lock:
            if self._states[index] is not SlotPhase.RESPAWNING:
                raise ValueError(f"slot {index} is {self._states[index]}, not respawning")
            self._states[index] = SlotPhase.LEASED

    def in_state(self, state: SlotPhase) -> list[int]:
        """Return the indices of the slots in a state."""
        with self._lock:
            return [index for index, current in enumerate(self._states) if current is state]

    def counts(self) -> dict[str, int]:
        """Return the number of slots by state."""
        with self._lock:
            return {str(state): self._states.count(state) for state in SlotPhase}


INTERVAL_S = 5.0
"""Seconds between two health checks."""
FIRST_BACK_OFF_S = 0.5
"""Seconds until the second attempt to respawn a slot; doubled after each failure."""
MAX_BACK_OFF_S = 30.0
"""Longest delay between two attempts, in seconds."""
_STOP_S = 10.0
"""Seconds to wait for the health thread to end."""
logger = logging.getLogger(__name__)


def back_off_s(failures: int) -> float:
    """Return the delay in seconds after ``failures`` failed attempts in a row: 0, 0.5, 1, 2, ...,
    30."""
    return min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2 ** (failures - 1)) if failures else 0.0


class HealthLoop:
    """A thread that checks every free slot every ``interval_s`` seconds and respawns UNHEALTHY
    ones."""

    def __init__(
        self, book: LeaseBook, slots: Sequence[Slot], interval_s: float = INTERVAL_S
    ) -> None:
        self.respawns = 0
        """Number of simulators replaced."""
        self.failures = 0
        """Number of failed attempts to replace one."""
        self._book = book
        self._slots = slots
        self._interval_s = interval_s
        self._failed = [0] * len(slots)
        """Failed attempts in a row, by slot."""
        self._due = [0.0] * len(slots)
        """Time of the next attempt, by slot."""
        self._woken = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="ministack-health", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Start the next round at once, because a slot is unhealthy."""
        self._woken.set()

    def stop(self) -> None:
        """End the thread after the check or respawn in progress. Idempotent."""
        self._ending = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def sweep(self) -> None:
        """Run one round: check the free slots, then respawn the unhealthy ones that are due."""
        for index in self._book.in_state(SlotPhase.FREE):
            if self._ending:
                return
            if not self._slots[index].ministack.answers(ANSWER_S) and self._book.fail_if_free(
                index
            ):
                logger.warning("slot %d: its simulator does not answer and is replaced", index)
        for index in self._book.in_state(SlotPhase.UNHEALTHY):
            if (
                not self._ending
                and process_clock.now() >= self._due[index]
                and self._book.begin_respawn(index)
            ):
                self._respawn(index)

    def _respawn(self, index: int) -> None:
        """Respawn one slot; after a failure, schedule the next attempt with back-off."""
        try:
            self._slots[index].respawn()
        except SimulatorLost as error:
            self.failures += 1
            self._failed[index] += 1
            wait_s = back_off_s(self._failed[index])
            self._due[index] = process_clock.now() + wait_s
            self._book.fail(index)
            logger.error(
                "slot %d cannot be respawned, next attempt in %g s: %s", index, wait_s, error
            )
        else:
            self.respawns += 1
            self._failed[index] = 0
            self._book.free(index)

    def _run(self) -> None:
        next_round = process_clock.now() + self._interval_s
        while not self._ending:
            waiting = [self._due[index] for index in self._book.in_state(SlotPhase.UNHEALTHY)]
            self._woken.wait(max(0.01, min([next_round, *waiting]) - process_clock.now()))
            self._woken.clear()
            if self._ending:
                return
            self.sweep()
            next_round = process_clock.now() + self._interval_s


_ROLE = "arn:aws:iam::000000000000:role/self-test"
"""Role and API path of the self-test's Lambda function."""
_FUNCTION = "/2015-03-31/functions"
_EFFECT_S = 0.1
"""Seconds to wait for an unwanted effect of the self-test."""
_ANSWER_S = 30.0
"""Seconds to wait for an answer. A simulator answers within milliseconds, but on a machine that
starts many processes at once it may take seconds."""
_CODE = """
import os, socket
def touch(path):
    try:
        open(path, "w").close()
    except OSError:
        pass
for path in {paths!r}:
    touch(path)
def handler(event, context):
    for path in {paths!r}:
        touch(path)
    try:
        socket.create_connection(("127.0.0.1", {port}), timeout=1)
    except OSError:
        return "ran, contained"
    return "ran, connected"
"""
"""The function of the self-test: tries to create marker files, and to connect to a port of the
host."""


def run_self_test(simulator: MiniStackProcess, root: Path, lambda_mode: str) -> tuple[str, ...]:
    """Run code in a simulator that tries to break out; return descriptions of the attempts that
    failed.

    Raises NotContained if one had an effect, and TimeoutError if the simulator does not answer.
    ``root`` is the pool's folder; markers would appear there, in the simulator's own folder or in
    /tmp.
    """
    with socket.create_server(("127.0.0.1", 0)) as canary:
        port = canary.getsockname()[1]
        marker = root / "self-test-marker"
        markers = [
            marker,
            root / "simulators" / "0" / marker.name,
            Path("/tmp") / f"{root.name}-marker",
        ]
        with _explain_timeouts():
            answer = _invoke_and_trigger(simulator, [str(path) for path in markers], port)
        called = bool(select.select([canary], [], [], _EFFECT_S)[0])
        inside = Path(f"/proc/{simulator.pid}/root")
        seen = [str(path) for path in markers if path.exists() or (inside / str(path)[1:]).exists()]
        for path in markers:
            path.unlink(missing_ok=True)
    if seen:
        raise NotContained(f"self-test: code of a Lambda function wrote {', '.join(seen)}")
    if called:
        raise NotContained("self-test: something inside the sandbox connected out")
    expected = "ran, contained" if lambda_mode == "sandbox" else "stub"
    if expected not in answer:
        raise NotContained(
            f"self-test: LAMBDA={lambda_mode} should answer {expected!r}, got {answer[:200]!r}"
        )
    with _explain_timeouts():
        simulator.reset(0, _ANSWER_S)
    return ("function invoked and event-triggered: no marker", "connect-out: failed")


@contextlib.contextmanager
def _explain_timeouts() -> Iterator[None]:
    """Turn an OSError of the self-test into a TimeoutError that explains the likely cause."""
    try:
        yield
    except OSError as error:
        raise TimeoutError(
            f"the self-test at start got no answer from its simulator within {_ANSWER_S:g} s "
            f"({error}); "
            "the machine may be overloaded: start again, or with fewer sessions"
        ) from error


def _invoke_and_trigger(simulator: MiniStackProcess, markers: list[str], port: int) -> str:
    """Invoke the function directly, by an event and through outgoing HTTP calls.

    Returns the answer to the direct invocation.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("index.py", _CODE.format(paths=markers, port=port))
    function = {
        "FunctionName": "self-test",
        "Runtime": "python3.12",
        "Handler": "index.handler",
        "Role": _ROLE,
        "Code": {"ZipFile": base64.b64encode(archive.getvalue()).decode()},
    }
    created = simulator.ask(
        "POST", _FUNCTION, "lambda", _ANSWER_S, body=json.dumps(function).encode()
    )
    arn = json.loads(created)["FunctionArn"]
    path = f"{_FUNCTION}/self-test/invocations"
    answer = simulator.ask("POST", path, "lambda", _ANSWER_S, body=b"{}").decode()
    simulator.ask("POST", path, "lambda", _ANSWER_S, {"X-Amz-Invocation-Type": "Event"}, b"{}")
    topic = _ask_sns(simulator, Action="CreateTopic", Name="self-test")
    arn_of_topic = topic.partition("<TopicArn>")[2].partition("<")[0]
    _ask_sns(simulator, Action="Subscribe", TopicArn=arn_of_topic, Protocol="lambda", Endpoint=arn)
    _ask_sns(
        simulator,
        Action="Subscribe",
        TopicArn=arn_of_topic,
        Protocol="http",
        Endpoint=f"http://127.0.0.1:{port}/",
    )
    _ask_sns(simulator, Action="Publish", TopicArn=arn_of_topic, Message="self-test")
    time.sleep(_EFFECT_S)
    return answer


def _ask_sns(simulator: MiniStackProcess, **parameters: str) -> str:
    """Send a request to SNS and return the answer."""
    body = urllib.parse.urlencode({"Version": "2010-03-31", **parameters}).encode()
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    return simulator.ask("POST", "/", "sns", _ANSWER_S, headers, body).decode()


RETURN_WAIT_S = 8.0
"""Seconds that ``acquire`` waits for a slot that is being scrubbed or replaced. Clients of a server
time out after 10 s, so the error must reach them before."""
CONTAINED_PARTS = (
    "__init__.py",
    "base",
    "env/__init__.py",
    "env/containment",
    "aws/__init__.py",
    "aws/cli",
    "aws/simulator",
)
"""Parts of this package that simulators and CLI workers can read: their own code, but neither tasks
nor graders."""


class MiniStackPool:
    """A pool of slots for leasing. Thread-safe.

    ``base_port``: first port of the simulators, 0 lets the kernel choose. ``sandbox``: ``auto``
    (bubblewrap if it works), ``bwrap`` (fail without it) or ``plain`` (only audit hooks, system
    call filter and resource limits). ``lambda_mode``: ``stub`` (code never runs) or ``sandbox``.
    ``may_lack``: layers (``sandbox.LAYERS``) whose absence is accepted. ``memory_mb``: memory limit
    of a simulator in MiB. Raises ValueError for other values.
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
        for name, value, allowed in (
            ("sandbox", sandbox, SANDBOX_MODES),
            ("lambda_mode", lambda_mode, LAMBDA_MODES),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is one of {', '.join(allowed)}, got {value!r}")
        self.size = size
        self.slots: list[Slot] = []
        self._base_port = base_port
        self._modes = (sandbox, lambda_mode)
        if unknown := may_lack - set(LAYERS):
            raise ValueError(
                f"may_lack names {', '.join(sorted(unknown))}; layers are {', '.join(LAYERS)}"
            )
        self._may_lack = may_lack
        self._memory_mb = memory_mb
        self._limits = limits or OutputLimits()
        self._lock = threading.Lock()
        self._counters = {
            "acquired": 0,
            "exhausted": 0,
            "respawns": 0,
            "scrubs": 0,
            "scrub_seconds": 0.0,
        }
        self._root: Path | None = None
        self._log: IO[bytes] | None = None
        self._zygotes: list[ForkServer] = []
        self._containment: Containment | None = None
        self._book = LeaseBook(0)
        self._health: HealthLoop | None = None
        self._reference_slots: ReferenceSlots | None = None

    def start(self) -> None:
        """Start all processes, test the containment and wait until all slots are healthy.

        After a failure no process is left. Raises OSError naming a taken port, RuntimeError with
        the log of a process that did not start, or with the layer that is missing or ineffective.
        """
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
        self._create_slots(root, contained)
        for zygote in self._zygotes:
            zygote.start()
        for zygote, name in zip(
            self._zygotes, ("MiniStack", "the AWS CLI", "the Lambda broker"), strict=False
        ):
            self._wait_for_zygote(zygote, name)
        contained.observed = judge(
            self._probe(root, contained),
            contained.layers,
            self._may_lack,
            "AWS_RL_ENV_MAY_LACK (--may-lack)",
        )
        for slot in self.slots:
            slot.ministack.start()
        for slot in self.slots:
            slot.ministack.wait_healthy(START_TIMEOUT_S)
            slot.start()
        # All slots are forks of the same zygotes, and each verifies its own hooks at its start, so
        # the self-test of one slot is enough.
        contained.tested = run_self_test(self.slots[0].ministack, root, contained.lambda_mode)
        if self._modes[0] == "auto" and contained.program is None:
            logger.warning(
                "bubblewrap does not work here: simulators and CLI workers see the host's files "
                "and are "
                "kept from them by audit hooks alone"
            )
        for index in range(self.size):
            self._book.free(index)
        self._health.start()  # pyright: ignore[reportOptionalMemberAccess]

    def _create_slots(self, root: Path, contained: Containment) -> None:
        """Create the zygotes, the slots, and an extra slot for the environment's own plays."""
        files = root / "files"
        simulators = root / "simulators"
        for folder in (files, simulators):
            folder.mkdir()
        prefixes: list[list[str]] = [[], []]
        if contained.program is not None:
            prefixes = [
                housekept(
                    sandboxed(contained.program, CONTAINED_PARTS, private=[simulators]), root
                ),
                housekept(sandboxed(contained.program, CONTAINED_PARTS, writable=[files]), root),
            ]
        assert self._log is not None
        mode = contained.network_mode
        environment = zygote_environment(simulators)
        may_lack = ",".join(sorted(self._may_lack))
        parent = ForkServer(
            "realhf.aws.simulator.ministack_server",
            self._log,
            environment,
            [mode, str(root), may_lack, str(self._memory_mb)],
            prefixes[0],
        )
        workers = ForkServer(
            "realhf.aws.cli.zygote",
            self._log,
            worker_environment(),
            [ACCOUNT, mode, may_lack],
            prefixes[1],
        )
        self._zygotes = [parent, workers]
        broker = None
        if contained.broker is not None:
            broker = ForkServer(
                "realhf.aws.simulator.lambda_broker",
                self._log,
                worker_environment(),
                [str(contained.broker)],
            )
            self._zygotes.append(broker)
        factory = ClientFactory()
        for index in range(self.size + 1):
            port = self._base_port + index if self._base_port and index < self.size else 0
            ministack = MiniStackProcess(port, parent, simulators / str(index), broker)
            ministack.bind()
            self.slots.append(
                Slot(index, ministack, workers, files / str(index), factory, self._limits)
            )
        self._reference_slots = ReferenceSlots(self.slots.pop())
        for slot in self.slots:
            slot.reference_slots = self._reference_slots
        self._book = LeaseBook(self.size)
        self._health = HealthLoop(self._book, tuple(self.slots))

    def _probe(self, root: Path, contained: Containment) -> dict[str, list[Attempt]]:
        """Probe the layers in the zygotes. Raises NotContained with the end of the log."""
        probed: dict[str, ForkServer] = dict(
            zip((SIMULATORS, WORKERS), self._zygotes, strict=False)
        )
        try:
            return probe_layers(probed, root, contained.layers)
        except NotContained as error:
            assert self._log is not None
            raise NotContained(f"{error}\n{tail(self._log)}") from error

    def _wait_for_zygote(self, zygote: ForkServer, name: str) -> None:
        """Wait until a zygote is ready. Raises RuntimeError with the end of the log."""
        assert self._containment is not None and self._log is not None
        try:
            greeting = zygote.wait_ready(2 * START_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError(start_failure(name, error, tail(self._log))) from error
        if "isolated" in greeting:
            self._containment.no_network = greeting["isolated"]

    def containment(self) -> str:
        """Describe the active layers, for the log at start. Raises RuntimeError before
        ``start``."""
        if self._containment is None:
            raise RuntimeError("the pool was not started")
        budget = (
            f"{self._memory_mb} MiB of memory and {SIMULATOR_CPU_S} s of CPU, by limits of its "
            f"process"
        )
        whole = f"{self.size * self._memory_mb / 1024:.1f} GiB for all {self.size}"
        return f"{self._containment.statement()}\n  budget of a simulator: {budget}; {whole}"

    def acquire(self) -> Slot:
        """Lease the least recently used slot that answers now; pass the returned object to
        ``release``.

        Raises RuntimeError("MiniStack pool exhausted") if there is none, SimulatorLost if the only
        free ones are dead and cannot be replaced.
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
            if self.slots[index].is_usable():
                if sick >= 0:
                    self._wake()
                return self._grant(index)
            self._book.fail(index)
            sick = index

    def _revive(self, index: int) -> Slot:
        """Respawn a dead slot and lease it to the caller."""
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
        """Return a new lease of a taken slot."""
        lease = self.slots[index].lease()
        self._book.grant(index, lease)
        self._count("acquired")
        return lease

    def release(self, slot: Slot) -> None:
        """Scrub a slot and free it; a slot that stays dirty is left to the health loop for
        replacement.

        Raises ValueError for a lease that is not in force, so a second release has no effect.
        """
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
        """The number of free slots."""
        return len(self._book.in_state(SlotPhase.FREE))

    def metrics(self) -> dict[str, Any]:
        """Return metrics for /metrics: slots by state, and counters of leases, respawns, scrubs and
        commands."""
        numbers: dict[str, Any] = {"size": self.size, **self._book.counts()}
        with self._lock:
            numbers.update(self._counters)
        if self._health is not None:
            numbers["respawns"] += self._health.respawns
            numbers["respawn_failures"] = self._health.failures
        counters = [slot.executor.counters for slot in list(self.slots)]
        for name in ("commands", "seconds", "timeouts", "worker_starts", "worker_kills"):
            numbers[name] = sum(getattr(counter, name) for counter in counters)
        numbers["refusals"] = sum((counter.refusals.copy() for counter in counters), Counter())
        return numbers

    def stop(self) -> None:
        """End all processes, free all ports and remove all files. Idempotent."""
        atexit.unregister(self.stop)
        if self._health is not None:
            self._health.stop()
        for slot in self.slots:
            slot.stop()
        if self._reference_slots is not None:
            self._reference_slots.stop()
        for zygote in self._zygotes:
            zygote.stop()
        self.slots = []
        self._zygotes = []
        self._health = None
        self._reference_slots = None
        self._book = LeaseBook(0)
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._root is not None:
            remove_folder(self._root)
            self._root = None


def worker_environment() -> dict[str, str]:
    """Return the complete environment variables of the CLI workers."""
    return BARE_ENVIRONMENT | {
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
