"""An asynchronous run in simulated time: admission, rollouts of random length, the gate, training,
new weights."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from realhf.dataflow.rollouts.staleness import StalenessManager, StragglerGate


@dataclass(frozen=True)
class Conditions:
    """``total`` samples are to be drawn; ``ahead`` step batches may wait for the trainer;
    ``crashes`` restarts happen at random times, each from a checkpoint up to two steps back, with
    other options if ``changes``."""

    batch_size: int
    eta: int
    max_concurrent: int
    total: int
    ahead: int
    crashes: int
    wait: bool = True
    changes: bool = False

    @staticmethod
    def draw(
        random: Random, *, wait: bool = True, crashes: int = 0, changes: bool = False
    ) -> Conditions:
        batch_size = random.randint(1, 5)
        eta = random.randint(0, 4)
        concurrent = random.randint(1, (eta + 2) * batch_size)
        total = random.randint(1, 14 * batch_size)
        return Conditions(
            batch_size, eta, concurrent, total, random.randint(0, 2), crashes, wait, changes
        )


@dataclass
class Simulation:
    """15 % of the rollouts fail, half of these are tried again. ``ages``: of every sample released,
    from its admission version to its step; ``lost``: failed for good. Raises AssertionError at a
    deadlock, a gate that can never open and an incomplete step batch in the middle."""

    on: Conditions
    random: Random
    ages: list[int] = field(default_factory=list)
    trained: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = 0.0
        self.life = 0
        self.serial = 0
        self.events: list[tuple[float, int, int, Callable[[], None]]] = []
        self.drawn = self.orders = self.lost = 0
        self.retries: list[str] = []
        self.versions: dict[str, int] = {}
        self.arrived: list[str] = []
        self.running: set[str] = set()
        self.released: dict[int, list[str]] = {}
        self.replay: dict[int, list[str]] = {}
        self._start(0, 0)

    def _start(self, version: int, recovered: int) -> None:
        on = self.on
        done = sum(len(ids) for ids in self.trained.values())
        self.manager = StalenessManager(
            batch_size=on.batch_size,
            max_head_offpolicyness=on.eta,
            max_concurrent=on.max_concurrent,
            version=version,
            accepted=done + recovered,
            consumed=done,
        )
        self.gate = StragglerGate(on.batch_size, on.eta, wait=on.wait)
        self.training = False
        self.over = False

    def run(self) -> None:
        for _ in range(self.on.crashes):
            self._later(self.random.expovariate(0.1), self._crash, for_ever=True)
        self._move()
        while self.events and not self.over:
            self.now, _, life, act = heapq.heappop(self.events)
            if life in (-1, self.life):
                act()
                self._move()
        assert self.over, (
            f"deadlock: {self.manager.counters()}, waits for "
            f"{self.gate.stragglers(self._next_step())}"
        )

    def _later(self, delay: float, act: Callable[[], None], *, for_ever: bool = False) -> None:
        self.serial += 1
        heapq.heappush(
            self.events, (self.now + delay, self.serial, -1 if for_ever else self.life, act)
        )

    def _next_step(self) -> int:
        return len(self.trained) + self.training + len(self.released)

    def _move(self) -> None:
        while self.manager.capacity and (self.retries or self.drawn < self.on.total):
            self._admit()
        while len(self.released) <= self.on.ahead and self._release():
            pass
        if self.released and not self.training:
            self._train()

    def _admit(self) -> None:
        if self.retries:
            id = self.retries.pop(0)
        else:
            id = f"s{self.drawn}"
            self.drawn = self.drawn + 1
        self.manager.admit()
        self.versions[id] = self.manager.version
        self.gate.admit(id, self.manager.version, self.orders)
        self.orders += 1
        self.running.add(id)
        self._later(0.05 * self.random.paretovariate(0.9), lambda: self._finish(id))

    def _finish(self, id: str) -> None:
        self.running.discard(id)
        luck = self.random.random()
        if luck < 0.85:
            self.manager.accept()
            self.gate.stage(id)
            self.arrived.append(id)
            return
        self.manager.reject()
        self.gate.forget(id)
        if luck > 0.92:
            self.retries.append(id)
        else:
            self.lost += 1

    def _release(self) -> bool:
        step = self._next_step()
        final = self.drawn == self.on.total and not self.retries
        ids = self.replay.pop(step, None) or self.gate.release(step, final=final)
        if ids is None:
            assert self.gate.n_staged < self.on.batch_size or self.gate.stragglers(step), (
                "the gate can never open"
            )
            return False
        if not ids:
            self.over = not self.released and not self.training and not self.replay
            return False
        assert len(ids) == self.on.batch_size or final
        self.ages += [step - self.versions[id] for id in ids]
        self.released[step] = ids
        return True

    def _train(self) -> None:
        step = min(self.released)
        ids = self.released.pop(step)
        self.training = True

        def trained() -> None:
            self.training = False
            self.trained[step] = ids
            self.arrived = [id for id in self.arrived if id not in ids]
            self.manager.consume(len(ids))
            self._later(self.random.expovariate(2.0), lambda: self._loaded(step + 1))

        self._later(self.random.expovariate(2.0), trained)

    def _loaded(self, version: int) -> None:
        self.manager.set_version(max(version, self.manager.version))

    def _crash(self) -> None:
        """The last steps are undone and will be repeated as they were; what runs is to be played
        again."""
        self.life += 1
        if self.on.changes:
            eta = self.random.randint(0, 4)
            concurrent = self.random.randint(1, 10)
            self.on = replace(self.on, eta=eta, max_concurrent=concurrent)
        kept = max(0, len(self.trained) - self.random.randint(0, 2))
        undone = {step: self.trained.pop(step) for step in range(kept, len(self.trained))}
        waiting = [id for ids in undone.values() for id in ids] + self.arrived
        planned = {step: ids for step, ids in self.replay.items() if step >= kept}
        self.replay = {**undone, **planned}
        self.arrived = waiting
        self.released = {}
        self.retries = sorted(self.running, key=lambda id: int(id[1:])) + self.retries
        self.running = set()
        self._start(kept, len(waiting))
        again = {id for ids in self.replay.values() for id in ids}
        for order, id in enumerate(waiting):
            if id not in again:
                self.gate.admit(id, self.versions[id], order)
                self.gate.stage(id)
