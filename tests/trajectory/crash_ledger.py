"""Kills trajectory servers with ``kill -9`` while producers push and trainers pull, and balances the books.

    python -m tests.trajectory.crash_ledger --store sqlite --pushes 2000 --kill-every 2
    python -m tests.trajectory.crash_ledger --store redis  --pushes 2000 --kill-every 2
    python -m tests.trajectory.crash_ledger --store original     the Atropos server, which loses what it holds

Every acknowledged group must be delivered, none may come again after its acknowledgement, none may be twice in one
batch, and every new batch has a step of its own; environments keep their ids; in the end all servers give the same
answers. Trainer 0 acknowledges by asking again, as stock trainers do; the others acknowledge explicitly. Specification
tests 27 and 31.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import socket
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

from tests.trajectory.conftest import REGISTRATION
from tests.trajectory.groups import group

GROUP_SIZE = 2
BATCH_SIZE = 8
DEADLINE_S = 600.0
PEER_PYTHON = Path(__file__).resolve().parents[2] / ".venv-atropos" / "bin" / "python"


class ServerProcess:
    """``run-api`` (``store``: an address), or the ``original``, on a port of its own; killed without warning and
    started again."""

    def __init__(self, store: str, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._store, self._log = store, log
        self.kills = 0
        self.forgetful = store == "original"
        self.restart_s: list[float] = []
        self.start()

    def start(self) -> None:
        """Start, and wait until the server is ready."""
        began = time.monotonic()
        command = [sys.executable, "-m", "realhf.trajectory", "--store", self._store]
        if self.forgetful:
            command = [str(PEER_PYTHON), "-m", "uvicorn", "atroposlib.api.server:app"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*command, "--port", str(self.port)], stdout=log, stderr=log)
        while not self._ready():
            assert self._process.poll() is None, f"the server ended: {self._log.read_text()[-2000:]}"
            assert time.monotonic() - began < 60, "the server does not come up"
            time.sleep(0.02)
        self.restart_s.append(time.monotonic() - began)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)
        self.kills += 1

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()

    def _ready(self) -> bool:
        try:
            return httpx.get(self.url + ("/" if self.forgetful else "/readyz"), timeout=2).status_code == 200
        except httpx.TransportError:
            return False


@dataclass
class Ledger:
    """What clients know for certain. ``delivered``: times each id arrived; ``acked``: ids whose batch was certainly
    acknowledged; ``broken``: what must never happen, in words."""

    pushed: set[int] = field(default_factory=set)
    delivered: Counter[int] = field(default_factory=Counter)
    acked: set[int] = field(default_factory=set)
    steps: dict[int, frozenset[int]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    retries: int = 0

    def receive(self, step: int, ids: list[int]) -> None:
        """A whole batch arrived."""
        if len(set(ids)) != len(ids):
            self.broken.append(f"step {step}: a group is twice in one batch")
        if again := self.acked & set(ids):
            self.broken.append(f"step {step}: {len(again)} groups came again after their acknowledgement")
        if self.steps.setdefault(step, frozenset(ids)) != frozenset(ids):
            self.broken.append(f"step {step} named two different batches")
        self.delivered.update(ids)

    def balance(self) -> list[str]:
        """Everything that is wrong at the end."""
        lost = self.pushed - set(self.delivered)
        unknown = set(self.delivered) - self.pushed
        found = list(self.broken)
        if lost:
            found.append(f"{len(lost)} acknowledged groups were never delivered")
        if unknown:
            found.append(f"{len(unknown)} delivered groups were never pushed")
        if len(self.steps) != len(self.pushed) * GROUP_SIZE // BATCH_SIZE:
            found.append(f"{len(self.steps)} steps for {len(self.pushed)} groups")
        return found


class Clients:
    """Producers and trainers that hold out until somebody answers."""

    def __init__(self, servers: Sequence[ServerProcess], ledger: Ledger, seed: int) -> None:
        self._servers, self._ledger, self._rng = servers, ledger, random.Random(seed)
        self._http = httpx.AsyncClient(timeout=20)
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
                    return answer
            except httpx.TransportError:
                pass
            self._ledger.retries += 1
            await asyncio.sleep(0.05)

    async def register(self) -> None:
        """Start the run; of a server that forgot it, once more."""
        await self.ask("POST", "/register", json=REGISTRATION | {"batch_size": BATCH_SIZE},
                       headers={"Idempotency-Key": "register"})  # fmt: skip

    async def register_env(self, name: str) -> int:
        """Id of an environment, once a trainer has asked for its first batch."""
        env = {"max_token_length": 64, "desired_name": name, "weight": 1.0, "group_size": GROUP_SIZE}
        while True:
            answer = await self.ask("POST", "/register-env", json=env, headers={"Idempotency-Key": f"env {name}"})
            if answer.json()["status"] == "success":
                return answer.json()["env_id"]
            await asyncio.sleep(0.05)

    async def produce(self, ids: Sequence[int], duration_s: float, env_id: int | None) -> None:
        """Push groups one by one, sometimes two at once, spread over a time."""
        position = 0
        while position < len(ids):
            some = ids[position : position + self._rng.choice((1, 1, 2))]
            position += len(some)
            groups = [group(GROUP_SIZE, 16, seed=number, group_overrides={"id": number}, env_id=env_id)
                      for number in some]  # fmt: skip
            single = len(some) == 1
            answer = await self.ask("POST", "/scored_data" if single else "/scored_data_list",
                                    json=groups[0] if single else groups,
                                    headers={"Idempotency-Key": f"push-{some[0]}"})  # fmt: skip
            assert answer.status_code == 200, answer.text
            self._ledger.pushed.update(some)
            await asyncio.sleep(self._rng.uniform(0, 2) * duration_s * len(some) / len(ids))

    async def train(self, name: str, explicit: bool, done: Callable[[], bool]) -> None:
        """Pull batches until there are none and the producers are done."""
        headers = {"X-Trainer-Id": name} | ({"X-Ack-Mode": "explicit"} if explicit else {})
        held: list[int] = []
        while True:
            finished = done()
            answer = await self.ask("GET", "/batch", headers=headers)
            assert answer.status_code == 200, answer.text
            if answer.json().get("status") == "error":
                await self.register()
                continue
            if not explicit:
                self._ledger.acked.update(() if _same(answer, held) else held)
            batch = answer.json()["batch"]
            if batch is None:
                held = []
                if finished:
                    return
                await asyncio.sleep(0.02)
                continue
            held = _ids(batch)
            self._ledger.receive(int(answer.headers.get("x-batch-step", len(self._ledger.steps))), held)
            if explicit and "x-lease-id" in answer.headers:
                acked = await self.ask("POST", "/batch/ack", json={"lease_id": answer.headers["x-lease-id"]})
                if acked.status_code == 200:
                    self._ledger.acked.update(held)


def _ids(batch: list[dict]) -> list[int]:  # type: ignore[type-arg]
    return [item["group_overrides"]["id"] for item in batch]


def _same(answer: httpx.Response, held: list[int]) -> bool:
    """The held batch again: the server never knew that it had been sent, so nothing was acknowledged."""
    batch = answer.json()["batch"]
    return batch is not None and _ids(batch) == held


async def run(servers: Sequence[ServerProcess], *, pushes: int, producers: int, trainers: int, duration_s: float,
              kill_every_s: float, seed: int) -> Ledger:  # fmt: skip
    """Everybody at work while the servers are killed in turn, then until the queue is empty."""
    assert pushes * GROUP_SIZE % BATCH_SIZE == 0
    ledger = Ledger()
    clients = Clients(servers, ledger, seed)
    await clients.register()
    pushing = asyncio.ensure_future(_push(clients, servers, ledger, pushes, producers, duration_s))
    training = [clients.train(f"trainer-{index}", index > 0, pushing.done) for index in range(trainers)]
    killer = asyncio.create_task(_kill(servers, kill_every_s, random.Random(seed + 1)))
    try:
        await asyncio.gather(pushing, *training)
    finally:
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        await clients.close()
    return ledger


async def _push(clients: Clients, servers: Sequence[ServerProcess], ledger: Ledger, pushes: int, producers: int,
                duration_s: float) -> None:  # fmt: skip
    """All producers, each with an environment of its own where the server remembers such things."""
    envs: list[int | None] = [None] * producers
    if not servers[0].forgetful:
        envs = list(await asyncio.gather(*(clients.register_env(f"env{index}") for index in range(producers))))
    shares = [range(index, pushes, producers) for index in range(producers)]
    await asyncio.gather(*(clients.produce(share, duration_s, env)
                           for share, env in zip(shares, envs, strict=True)))  # fmt: skip
    if not servers[0].forgetful:
        envs.append(await clients.register_env("one more"))
        if {*envs} != {*range(producers + 1)}:
            ledger.broken.append(f"environments are not numbered on: {envs}")


def compare(servers: Sequence[ServerProcess]) -> list[str]:
    """Where servers of one state answer differently, in words."""
    found = []
    for path in ("/info", "/status", "/wandb_info", "/status-env?env_id=0", "/status-env?env_id=3"):
        answers = {httpx.get(server.url + path, timeout=20).text for server in servers}
        if len(answers) != 1:
            found.append(f"{path}: {sorted(answers)}")
    return found


async def _kill(servers: Sequence[ServerProcess], every_s: float, rng: random.Random) -> None:
    turn = 0
    while True:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * every_s)
        server = servers[turn % len(servers)]
        turn += 1
        await asyncio.shield(asyncio.to_thread(lambda server=server: (server.kill(), server.start())))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the balance. Returns 1 when it does not balance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=("sqlite", "redis", "original"), default="sqlite")
    parser.add_argument("--pushes", type=int, default=2000)
    parser.add_argument("--producers", type=int, default=8)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--duration", type=float, default=60.0, help="seconds over which the pushes are spread")
    parser.add_argument("--kill-every", type=float, default=2.0, help="seconds between kills, plus or minus half")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = start_servers(arguments.store, folder, stack)
        began = time.monotonic()
        ledger = asyncio.run(run(servers, pushes=arguments.pushes, producers=arguments.producers,
                                 trainers=arguments.trainers, duration_s=arguments.duration,
                                 kill_every_s=arguments.kill_every, seed=arguments.seed))  # fmt: skip
        wall, differences = time.monotonic() - began, compare(servers)
    again = sum(times - 1 for times in ledger.delivered.values())
    print(f"store {arguments.store}: {len(servers)} server(s), {sum(server.kills for server in servers)} kills "
          f"in {wall:.0f} s, {ledger.retries} requests tried again")  # fmt: skip
    print(f"groups acknowledged {len(ledger.pushed)}, delivered {len(ledger.delivered)}, delivered again before their "
          f"acknowledgement {again}, after it {sum('again after' in text for text in ledger.broken)}")  # fmt: skip
    print(f"steps {len(ledger.steps)}; slowest restart {max(max(server.restart_s) for server in servers):.2f} s")
    problems = ledger.balance() + differences
    print("\n".join(problems) or "the books balance: nothing lost, nothing twice")
    return 1 if problems else 0


def start_servers(store: str, folder: Path, stack: ExitStack) -> list[ServerProcess]:
    """One server over SQLite, two over a Redis of their own, or the original; stopped with the stack."""
    address, number = "original" if store == "original" else f"sqlite:{folder / 'data'}", 1
    if store == "redis":
        from tests.trajectory.redis_server import RedisServer

        assert shutil.which("redis-server"), "redis-server is not installed"
        redis = RedisServer(folder)
        stack.callback(redis.stop)
        address, number = redis.url, 2
    servers = []
    for index in range(number):
        servers.append(ServerProcess(address, folder / f"server{index}.log"))
        stack.callback(servers[-1].stop)
    return servers


if __name__ == "__main__":
    sys.exit(main())
