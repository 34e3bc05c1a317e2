r"""MiniStackPool: a pool of simulator slots that are leased to sessions. It tests its containment
at start, monitors the slots' health and replaces dead simulators.

    starting -> free -> leased -> scrubbing -> free
                      \________\___________\-> unhealthy -> respawning -> free

Every transition is one call under one lock, so a slot has exactly one owner at any time: the free
list, a lease, or the thread that scrubs or respawns it. At start, the self-test runs hostile code
in one simulator. That is enough, because all others are forks of the same zygote. Source:
docs/reference/environment.md 1, 3 and 5.
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
    describe_layers,
    probe_layers,
)
from realhf.env.containment.sandbox import LAYERS, sandbox_command, wrap_with_cleanup

EXHAUSTED = "MiniStack pool exhausted"
"""Message of the RuntimeError that is raised if no slot is free."""


class SlotPhase(enum.StrEnum):
    """Phase of a slot, from start through lease and scrub to respawn."""

    STARTING = "starting"
    FREE = "free"
    LEASED = "leased"
    SCRUBBING = "scrubbing"
    UNHEALTHY = "unhealthy"
    RESPAWNING = "respawning"


class LeaseBook:
    """Phases and leases of ``size`` slots, by index. All slots begin as STARTING. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._states = [SlotPhase.STARTING] * size
        self._free: deque[int] = deque()
        self._leases: dict[int, object] = {}
        self._lock = threading.Condition()

    def take(self, patience_s: float = 0.0) -> int:
        """Mark the least recently used free slot as LEASED and return its index.

        If no slot is free, wait up to ``patience_s`` seconds, unless all slots are leased. Raises
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
        """Record which lease object belongs to a taken slot."""
        with self._lock:
            self._leases[index] = lease

    def give_back(self, index: int, lease: object) -> None:
        """End a lease and mark the slot as SCRUBBING. Raises ValueError if ``lease`` is not the
        slot's present lease."""
        with self._lock:
            if index not in self._leases or self._leases[index] is not lease:
                raise ValueError(f"slot {index} is not leased from this pool")
            del self._leases[index]
            self._states[index] = SlotPhase.SCRUBBING

    def free(self, index: int) -> None:
        """Mark a started, scrubbed or respawned slot as FREE. Raises ValueError if it is already
        free, or leased."""
        with self._lock:
            if self._states[index] in (SlotPhase.FREE, SlotPhase.LEASED):
                raise ValueError(f"slot {index} is {self._states[index]}; it cannot become free")
            self._states[index] = SlotPhase.FREE
            self._free.append(index)
            self._lock.notify()

    def fail(self, index: int) -> None:
        """Mark a slot as UNHEALTHY. Called by its owner, who found it dead or dirty."""
        with self._lock:
            self._states[index] = SlotPhase.UNHEALTHY

    def fail_if_free(self, index: int) -> bool:
        """Mark a slot as UNHEALTHY if it is free, because a health check found it dead.

        Returns False if the slot is no longer free; its new owner will find it dead.
        """
        with self._lock:
            if self._states[index] is not SlotPhase.FREE:
                return False
            self._free.remove(index)
            self._states[index] = SlotPhase.UNHEALTHY
            return True

    def begin_respawn(self, index: int) -> bool:
        """Mark an UNHEALTHY slot as RESPAWNING. Returns False if the slot is not UNHEALTHY, because
        another thread respawns it."""
        with self._lock:
            if self._states[index] is not SlotPhase.UNHEALTHY:
                return False
            self._states[index] = SlotPhase.RESPAWNING
            return True

    def adopt(self, index: int) -> None:
        """Mark a RESPAWNING slot as LEASED, so that the caller gets it without other callers seeing
        it free. Raises ValueError for a slot in another phase."""
        with self._lock:
            if self._states[index] is not SlotPhase.RESPAWNING:
                raise ValueError(f"slot {index} is {self._states[index]}, not respawning")
            self._states[index] = SlotPhase.LEASED

    def in_state(self, state: SlotPhase) -> list[int]:
        """Return the indices of the slots in a phase."""
        with self._lock:
            return [index for index, current in enumerate(self._states) if current is state]

    def counts(self) -> dict[str, int]:
        """Return the number of slots in each phase."""
        with self._lock:
            return {str(state): self._states.count(state) for state in SlotPhase}


INTERVAL_S = 5.0
"""Seconds between health checks."""
FIRST_BACK_OFF_S = 0.5
"""Seconds between the first and second attempt to respawn a slot. The delay is doubled after each
failure."""
MAX_BACK_OFF_S = 30.0
"""Maximum delay between two attempts, in seconds."""
_STOP_S = 10.0
"""Seconds to wait for the health thread to end."""
logger = logging.getLogger(__name__)


def back_off_s(failures: int) -> float:
    """Return the delay in seconds after ``failures`` consecutive failed attempts: 0, 0.5, 1, 2,
    ..., 30."""
    return min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2 ** (failures - 1)) if failures else 0.0


class HealthLoop:
    """Thread that checks every free slot every ``interval_s`` seconds and respawns UNHEALTHY
    slots."""

    def __init__(
        self, book: LeaseBook, slots: Sequence[Slot], interval_s: float = INTERVAL_S
    ) -> None:
        self.respawns = 0
        """Number of simulators that were replaced."""
        self.failures = 0
        """Number of failed attempts to replace a simulator."""
        self._book = book
        self._slots = slots
        self._interval_s = interval_s
        self._failed = [0] * len(slots)
        """Number of consecutive failed attempts, by slot."""
        self._due = [0.0] * len(slots)
        """Time of the next attempt (``process_clock``, s), by slot."""
        self._woken = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="ministack-health", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Start the next round immediately, because a slot is unhealthy."""
        self._woken.set()

    def stop(self) -> None:
        """End the thread; a check or respawn in progress is completed first. Idempotent."""
        self._ending = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def sweep(self) -> None:
        """Run one round: check the free slots, then respawn the unhealthy ones whose next attempt
        is due."""
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
        """Respawn one slot. After a failure, schedule the next attempt with back-off."""
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
"""Seconds to wait for an effect that the self-test's code must not have."""
_ANSWER_S = 30.0
"""Seconds to wait for an answer in the self-test. A simulator usually answers within milliseconds,
but on a machine that starts many processes at once it may take seconds."""
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
"""Code of the self-test's Lambda function. It tries to create marker files and to connect to a port
of the host."""


def run_self_test(simulator: MiniStackProcess, root: Path, lambda_mode: str) -> tuple[str, ...]:
    """Run code in a simulator that tries to break out, and return descriptions of the attempts that
    were contained.

    Raises NotContained if an attempt had an effect, and TimeoutError if the simulator does not
    answer. ``root``: the pool's folder. The code tries to create markers there, in the simulator's
    own folder and in /tmp.
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
    """Context manager that turns an OSError in the self-test into a TimeoutError with the likely
    cause."""
    try:
        yield
    except OSError as error:
        raise TimeoutError(
            f"the self-test at start got no answer from its simulator within {_ANSWER_S:g} s "
            f"({error}); "
            "the machine may be overloaded: start again, or with fewer sessions"
        ) from error


def _invoke_and_trigger(simulator: MiniStackProcess, markers: list[str], port: int) -> str:
    """Create the self-test's Lambda function. Invoke it directly and as an event, and let a topic
    call both the function and an HTTP endpoint on ``port``.

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
"""Seconds that ``acquire`` waits for a slot that is being scrubbed or replaced. It must be less
than the 10 s after which clients of the environment server time out, so that they receive the
error."""
CONTAINED_PARTS = (
    "__init__.py",
    "base",
    "env/__init__.py",
    "env/containment",
    "aws/__init__.py",
    "aws/cli",
    "aws/simulator",
)
"""Parts of the ``realhf`` package that simulators and CLI workers can read: the code that they run,
but neither tasks nor graders."""


class MiniStackPool:
    """A pool of slots that can be leased. Thread-safe.

    ``base_port``: the first simulator's port; the others follow. 0 lets the kernel choose.
    ``sandbox``: ``auto`` (use bubblewrap if it works), ``bwrap`` (fail without bubblewrap) or
    ``plain`` (only audit hooks, system call filter and resource limits). ``lambda_mode``: ``stub``
    (the code of Lambda functions never runs) or ``sandbox``. ``may_lack``: containment layers (see
    ``sandbox.LAYERS``) that may be missing. ``memory_mb``: memory limit of a simulator in MiB.
    Raises ValueError for invalid values.
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

        After a failure, no process is left running. Raises OSError that names a port if it is
        taken, and RuntimeError if a process does not start (with its log) or if a containment layer
        is missing or has no effect (with its name).
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
        contained.observed = describe_layers(
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
        """Create the zygotes, the slots, and an extra slot on which the environment plays
        solutions."""
        files = root / "files"
        simulators = root / "simulators"
        for folder in (files, simulators):
            folder.mkdir()
        prefixes: list[list[str]] = [[], []]
        if contained.program is not None:
            prefixes = [
                wrap_with_cleanup(
                    sandbox_command(contained.program, CONTAINED_PARTS, private=[simulators]), root
                ),
                wrap_with_cleanup(
                    sandbox_command(contained.program, CONTAINED_PARTS, writable=[files]), root
                ),
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
        """Return the result of probing the containment layers in the zygotes. Raises NotContained
        with the end of the log."""
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
        """Describe the active containment layers, for the log at start. Raises RuntimeError before
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
        """Lease the least recently used free slot that answers. Pass the returned object to
        ``release`` later.

        Raises RuntimeError("MiniStack pool exhausted") if no slot is free, and SimulatorLost if the
        only free ones are dead and cannot be replaced.
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
        """Return a new lease of a slot that was taken."""
        lease = self.slots[index].lease()
        self._book.grant(index, lease)
        self._count("acquired")
        return lease

    def release(self, slot: Slot) -> None:
        """End a lease: scrub the slot and free it. If the scrub fails, the health loop replaces the
        slot.

        Raises ValueError if ``slot`` is not a present lease, so a second release has no effect.
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
        """Return the metrics shown at /metrics: the number of slots in each phase, and counters of
        leases, respawns, scrubs and commands."""
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
        """End all processes, free all ports and delete all files. Idempotent."""
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
    """Return all environment variables of the CLI workers."""
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
