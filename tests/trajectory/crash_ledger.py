"""Kills trajectory servers with ``kill -9`` while producers push and trainers pull, and balances
the books.

    python -m tests.trajectory.crash_ledger --store sqlite --pushes 2000 --kill-every 2
    python -m tests.trajectory.crash_ledger --store redis  --pushes 2000 --kill-every 2
    python -m tests.trajectory.crash_ledger --store sqlite --fault-rate 0.03     the store fails at random, too
    python -m tests.trajectory.crash_ledger --store redis --forget-every 5       Redis comes back empty, again and again

Every acknowledged group must be delivered, none may come again after its acknowledgement, none may
be twice in one batch, and every new batch has a step of its own; environments keep their ids; in
the end all servers give the same answers. Trainer 0 acknowledges by asking again, as stock trainers
do; the others acknowledge explicitly. Source: docs/reference/trajectory.md 5.

Where Redis itself forgets, servers are not killed, so that there is somebody to notice: each loss
must be told and begin a new epoch, and what was acknowledged in the last one must be delivered.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from realhf.base.loopback import free_port
from tests.trajectory.conftest import REGISTRATION
from tests.trajectory.groups import group
from tests.trajectory.redis_server import RedisServer

GROUP_SIZE = 2
BATCH_SIZE = 8
DEADLINE_S = 600.0
LOSS = "Redis came back without its data"


class ServerProcess:
    """``run-api`` over the store of an address, on a port of its own; killed without warning and
    started again."""

    def __init__(self, store: str, log: Path, fault_rate: float = 0.0) -> None:
        self._fault_rate = fault_rate
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._store = store
        self._log = log
        self.kills = 0
        self.restart_s: list[float] = []
        self.failed_starts = 0
        self.start()

    def start(self) -> None:
        """Start, and wait until the server is ready. One whose store fails while it starts ends at
        once, as it should, and is started again, as a supervisor would."""
        began = time.monotonic()
        self._spawn()
        while not self._ready():
            if self._process.poll() is not None:
                assert self._fault_rate, f"the server ended: {self._log.read_text()[-2000:]}"
                self.failed_starts += 1
                self._spawn()
            assert time.monotonic() - began < 60, "the server does not come up"
            time.sleep(0.02)
        self.restart_s.append(time.monotonic() - began)

    def _spawn(self) -> None:
        command = [sys.executable, "-m", "realhf.trajectory", "--store", self._store]
        if self._fault_rate:
            faults = [
                "--fault-rate",
                str(self._fault_rate),
                "--fault-seed",
                str(self.kills + self.failed_starts),
            ]
            command[2:3] = ["tests.trajectory.faulty_server", *faults]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)], stdout=log, stderr=log
            )

    def said(self, text: str) -> int:
        """How often its log says something."""
        return self._log.read_text().count(text)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)
        self.kills += 1

    def kill_and_start(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=300).status_code == 200
        except httpx.TransportError:
            return False


@dataclass
class Ledger:
    """What clients know for certain. ``pushed``: the epoch in which each id was acknowledged;
    ``delivered``: times each id arrived; ``acked``: epochs and ids whose batch was certainly
    acknowledged; ``steps``: what each step of each epoch held; ``broken``: what must never happen,
    in words."""

    pushed: dict[int, int] = field(default_factory=dict)
    delivered: Counter[int] = field(default_factory=Counter)
    acked: set[tuple[int, int]] = field(default_factory=set)
    steps: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    retries: int = 0
    epochs: set[int] = field(default_factory=lambda: {0})
    """All that any server named."""

    def receive(self, step: int, ids: list[int], epoch: int = 0) -> None:
        """A whole batch arrived."""
        if len(set(ids)) != len(ids):
            self.broken.append(f"step {step}: a group is twice in one batch")
        if again := self.acked & {(epoch, number) for number in ids}:
            self.broken.append(
                f"step {step}: {len(again)} groups came again after their acknowledgement"
            )
        if self.steps.setdefault((epoch, step), frozenset(ids)) != frozenset(ids):
            self.broken.append(f"step {step} named two different batches")
        self.delivered.update(ids)

    def acknowledge(self, ids: list[int], epoch: int = 0) -> None:
        """The batch that held these is certainly done with."""
        self.acked.update((epoch, number) for number in ids)

    def forgotten(self) -> int:
        """Groups of ended epochs that were never delivered."""
        return sum(
            epoch < max(self.epochs) and not self.delivered[number]
            for number, epoch in self.pushed.items()
        )

    def balance(self) -> list[str]:
        """Everything that is wrong at the end."""
        lost = {number for number, epoch in self.pushed.items() if epoch == max(self.epochs)} - set(
            self.delivered
        )
        unknown = set(self.delivered) - set(self.pushed)
        found = list(self.broken)
        if lost:
            found.append(f"{len(lost)} acknowledged groups were never delivered")
        if unknown:
            found.append(f"{len(unknown)} delivered groups were never pushed")
        if len(self.epochs) == 1 and len(self.steps) != len(self.pushed) * GROUP_SIZE // BATCH_SIZE:
            found.append(f"{len(self.steps)} steps for {len(self.pushed)} groups")
        return found


class Clients:
    """Producers and trainers that hold out until somebody answers."""

    def __init__(self, servers: Sequence[ServerProcess], ledger: Ledger, seed: int) -> None:
        self._servers, self._ledger, self._rng = servers, ledger, random.Random(seed)
        self._http = httpx.AsyncClient(timeout=300)
        self._deadline = time.monotonic() + DEADLINE_S

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, method: str, path: str, **request: object) -> httpx.Response:
        """The first answer that is no failure of the server, from whichever server is there."""
        while True:
            assert time.monotonic() < self._deadline, f"no answer to {method} {path}"
            url = self._rng.choice(self._servers).url + path
            try:
                answer = await self._http.request(method, url, **request)  # type: ignore[arg-type]
                if answer.status_code < 500:
                    self._ledger.epochs.add(_epoch(answer))
                    return answer
            except httpx.TransportError:
                pass
            self._ledger.retries += 1
            await asyncio.sleep(0.05)

    async def register(self) -> None:
        """Start the run; of a server that forgot it, once more."""
        await self.ask(
            "POST",
            "/register",
            json=REGISTRATION | {"batch_size": BATCH_SIZE},
            headers={"Idempotency-Key": "register"},
        )

    async def register_env(self, name: str) -> int:
        """Id of an environment, once a trainer has asked for its first batch."""
        env = {
            "max_token_length": 64,
            "desired_name": name,
            "weight": 1.0,
            "group_size": GROUP_SIZE,
        }
        while True:
            answer = await self.ask(
                "POST", "/register-env", json=env, headers={"Idempotency-Key": f"env {name}"}
            )
            if answer.json()["status"] == "success":
                return answer.json()["env_id"]
            await asyncio.sleep(0.05)

    async def produce(self, ids: Sequence[int], duration_s: float, env_id: int | None) -> None:
        """Push groups one by one, sometimes two at once, spread over a time."""
        position = 0
        while position < len(ids):
            some = ids[position : position + self._rng.choice((1, 1, 2))]
            position += len(some)
            groups = [
                group(GROUP_SIZE, 16, seed=number, group_overrides={"id": number}, env_id=env_id)
                for number in some
            ]
            single = len(some) == 1
            answer = await self.ask(
                "POST",
                "/scored_data" if single else "/scored_data_list",
                json=groups[0] if single else groups,
                headers={"Idempotency-Key": f"push-{some[0]}"},
            )
            assert answer.status_code == 200, answer.text
            self._ledger.pushed.update(dict.fromkeys(some, _epoch(answer)))
            await asyncio.sleep(self._rng.uniform(0, 2) * duration_s * len(some) / len(ids))

    async def fill_up(self, first: int) -> None:
        """What a forgetful Redis left need not fill a batch: push what is missing, with ids from
        ``first`` on."""
        queued = (await self.ask("GET", "/status")).json()["queue_size"]
        await self.produce(range(first, first + -queued % (BATCH_SIZE // GROUP_SIZE)), 0.0, None)

    async def train(self, name: str, explicit: bool, done: Callable[[], bool]) -> None:
        """Pull batches until there are none and the producers are done."""
        headers = {"X-Trainer-Id": name} | ({"X-Ack-Mode": "explicit"} if explicit else {})
        held = list[int]()
        held_in = 0
        lease = ""
        while True:
            finished = done()
            answer = await self.ask("GET", "/batch", headers=headers)
            assert answer.status_code == 200, answer.text
            if answer.json().get("status") == "error":
                await self.register()
                continue
            if (
                held
                and not explicit
                and not _same(answer, held)
                and await self._was_acknowledged(lease)
            ):
                self._ledger.acknowledge(held, held_in)
            batch = answer.json()["batch"]
            if batch is None:
                held = []
                if finished:
                    return
                await asyncio.sleep(0.02)
                continue
            held = _ids(batch)
            held_in = _epoch(answer)
            lease = answer.headers["x-lease-id"]
            self._ledger.receive(int(answer.headers["x-batch-step"]), held, held_in)
            if explicit:
                acked = await self.ask("POST", "/batch/ack", json={"lease_id": lease})
                if acked.status_code == 200:
                    self._ledger.acknowledge(held, held_in)

    async def _was_acknowledged(self, lease: str) -> bool:
        """Whether the last request acknowledged a batch, as the server remembers it. It does not if
        it never knew that the batch had been sent, and gave it to somebody else."""
        answer = await self.ask("POST", "/batch/nack", json={"lease_id": lease})
        return answer.status_code == 409 and "already acknowledged" in answer.text


def _ids(batch: list[dict]) -> list[int]:  # type: ignore[type-arg]
    return [item["group_overrides"]["id"] for item in batch]


def _epoch(answer: httpx.Response) -> int:
    """In which it was made."""
    return int(answer.headers["x-epoch"])


def _same(answer: httpx.Response, held: list[int]) -> bool:
    """The held batch again: the server never knew that it had been sent, so nothing was
    acknowledged."""
    batch = answer.json()["batch"]
    return batch is not None and _ids(batch) == held


async def run(
    servers: Sequence[ServerProcess],
    *,
    pushes: int,
    producers: int,
    trainers: int,
    duration_s: float,
    kill_every_s: float,
    seed: int,
    redis: RedisServer | None = None,
) -> Ledger:
    """Everybody at work while the servers are killed in turn, or instead of them a Redis that
    forgets (``redis``), then until the queue is empty."""
    assert pushes * GROUP_SIZE % BATCH_SIZE == 0
    ledger = Ledger()
    clients = Clients(servers, ledger, seed)
    await clients.register()
    pushing = asyncio.ensure_future(_push(clients, ledger, pushes, producers, duration_s))
    training = [
        clients.train(f"trainer-{index}", index > 0, pushing.done) for index in range(trainers)
    ]
    harm = [redis.restart] if redis else [server.kill_and_start for server in servers]
    killer = asyncio.create_task(_harm(harm, kill_every_s, random.Random(seed + 1)))
    try:
        work = asyncio.gather(pushing, *training)
        await asyncio.wait({work, killer}, return_when=asyncio.FIRST_COMPLETED)
        if killer.done():
            await killer  # it ends by an error only: without this everybody would wait for a server that is no more
        await work
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        if redis:
            await clients.fill_up(pushes)
            await clients.train("trainer-0", explicit=False, done=lambda: True)
    finally:
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        await clients.close()
    return ledger


async def _push(
    clients: Clients, ledger: Ledger, pushes: int, producers: int, duration_s: float
) -> None:
    """All producers, each with an environment of its own."""
    envs = list(
        await asyncio.gather(*(clients.register_env(f"env{index}") for index in range(producers)))
    )
    shares = [range(index, pushes, producers) for index in range(producers)]
    await asyncio.gather(
        *(clients.produce(share, duration_s, env) for share, env in zip(shares, envs, strict=True))
    )
    envs.append(await clients.register_env("one more"))
    if {*envs} != {*range(producers + 1)} and len(ledger.epochs) == 1:
        ledger.broken.append(f"environments are not numbered on: {envs}")


def compare(servers: Sequence[ServerProcess]) -> list[str]:
    """Where servers of one state answer differently, in words."""
    found = []
    for path in ("/info", "/status", "/wandb_info", "/status-env?env_id=0", "/status-env?env_id=3"):
        answers = {httpx.get(server.url + path, timeout=300).text for server in servers}
        if len(answers) != 1:
            found.append(f"{path}: {sorted(answers)}")
    return found


async def _harm(acts: Sequence[Callable[[], None]], every_s: float, rng: random.Random) -> None:
    """Do one after the other, again and again."""
    for act in itertools.cycle(acts):
        await asyncio.sleep(rng.uniform(0.5, 1.5) * every_s)
        await asyncio.shield(asyncio.to_thread(act))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the balance. Returns 1 when it does not balance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", choices=("sqlite", "redis"), default="sqlite")
    parser.add_argument("--pushes", type=int, default=2000)
    parser.add_argument("--producers", type=int, default=8)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument(
        "--duration", type=float, default=60.0, help="seconds over which the pushes are spread"
    )
    parser.add_argument(
        "--kill-every", type=float, default=2.0, help="seconds between kills, plus or minus half"
    )
    parser.add_argument(
        "--fault-rate",
        type=float,
        default=0.0,
        help="share of the store's steps that fail (sqlite)",
    )
    parser.add_argument(
        "--forget-every",
        type=float,
        default=0.0,
        help="seconds between restarts of a Redis without persistence, in place of kills",
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    for flag, given, store in (
        ("fault-rate", arguments.fault_rate, "sqlite"),
        ("forget-every", arguments.forget_every, "redis"),
    ):
        if given and arguments.store != store:
            parser.error(f"--{flag} needs --store {store}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers, redis = start_servers(
            arguments.store,
            folder,
            stack,
            fault_rate=arguments.fault_rate,
            forgetful=bool(arguments.forget_every),
        )
        began = time.monotonic()
        ledger = asyncio.run(
            run(
                servers,
                pushes=arguments.pushes,
                producers=arguments.producers,
                trainers=arguments.trainers,
                duration_s=arguments.duration,
                kill_every_s=arguments.forget_every or arguments.kill_every,
                seed=arguments.seed,
                redis=redis,
            )
        )
        wall = time.monotonic() - began
        problems = ledger.balance() + compare(servers) + untold(servers, ledger)
        if arguments.fault_rate or redis:
            print(
                f"faults set off "
                f"{sum(server.said('fault that was set off') for server in servers)}, restarts of "
                f"Redis {redis.restarts if redis else 0}, epochs {len(ledger.epochs)}, groups of "
                f"ended epochs that "
                f"were forgotten {ledger.forgotten()}"
            )
    again = sum(times - 1 for times in ledger.delivered.values())
    print(
        f"store {arguments.store}: {len(servers)} server(s), "
        f"{sum(server.kills for server in servers)} kills "
        f"in {wall:.0f} s, {ledger.retries} requests tried again"
    )
    print(
        f"groups acknowledged {len(ledger.pushed)}, delivered {len(ledger.delivered)}, delivered "
        f"again before their "
        f"acknowledgement {again}, after it {sum('again after' in text for text in ledger.broken)}"
    )
    print(
        f"steps {len(ledger.steps)}; slowest restart "
        f"{max(max(server.restart_s) for server in servers):.2f} s"
    )
    print("\n".join(problems) or "the books balance: nothing lost, nothing twice")
    return 1 if problems else 0


def untold(servers: Sequence[ServerProcess], ledger: Ledger) -> list[str]:
    """Losses of Redis that were not told, in words. Each new epoch was begun by a server that told
    why; two losses in a row may be one to a server."""
    told = [server.said(LOSS) for server in servers]
    least = len(ledger.epochs) - 1
    enough = min(told) >= min(1, least) and sum(told) >= least
    return [] if enough else [f"{told} losses were told, and there were {least} or more"]


def start_servers(
    store: str, folder: Path, stack: ExitStack, *, fault_rate: float = 0.0, forgetful: bool = False
) -> tuple[list[ServerProcess], RedisServer | None]:
    """One server over SQLite, or two over a Redis of their own; stopped with the stack. The Redis
    is given only where it is ``forgetful``."""
    address = f"sqlite:{folder / 'data'}"
    number = 1
    redis = None
    if store == "redis":
        assert shutil.which("redis-server"), "redis-server is not installed"
        redis = RedisServer(folder, persistent=not forgetful)
        stack.callback(redis.stop)
        address = redis.url
        number = 2
    servers = []
    for index in range(number):
        servers.append(ServerProcess(address, folder / f"server{index}.log", fault_rate))
        stack.callback(servers[-1].stop)
    return servers, redis if forgetful else None


if __name__ == "__main__":
    sys.exit(main())
