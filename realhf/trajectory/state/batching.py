"""Batch selection: fair shares, packs, exact fill, minimum allocations, and the original server's
rule.

The original server's rule can deadlock if group sizes are not powers of two; ``strict`` accepts
that. Source: docs/reference/trajectory.md 1.1, 3.3, 3.4, 3.6, 3.12.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, repeat, takewhile
from math import ceil, floor, lcm
from typing import Any

from realhf.trajectory.records import Encoding, GroupPlace, GroupRecord, Payload
from realhf.trajectory.state.queue_index import Lane, QueueIndex, Unit


@dataclass(frozen=True)
class FairShare:
    """Shares of environments and their virtual times before a batch is selected. Environments
    without a share have one common account with the key None."""

    shares: Mapping[int | None, float]
    """Share of each known environment."""
    times: Mapping[int | None, float]
    """Virtual time of each account: served sequences divided by share."""
    clock: float
    """Virtual time of the account that was served last."""
    default_share: float
    """Share of the common account of environments without a share (key None)."""


@dataclass
class Ledger:
    """Virtual times and served sequences per account while one batch is being formed."""

    fair: FairShare
    """Shares and virtual times before this batch."""
    clock: float = field(init=False)
    """Virtual time of the account that was served last."""
    times: dict[int | None, float] = field(default_factory=dict)
    """Virtual times that this batch has changed."""
    served: dict[int | None, int] = field(default_factory=dict)
    """Sequences taken from each environment."""

    def __post_init__(self) -> None:
        self.clock = self.fair.clock

    def key(self, env_id: int | None) -> int | None:
        """Return the key of an environment's account: its own id, or None if it has no share."""
        return env_id if env_id in self.fair.shares else None

    def time(self, key: int | None) -> float:
        """Return the virtual time of an account, including the charges of this batch."""
        time = self.times.get(key)
        return self.fair.times.get(key, 0.0) if time is None else time

    def charge(self, env_id: int | None, sequences: int) -> None:
        """Charge an environment for sequences taken from it."""
        key = self.key(env_id)
        self.times[key] = self.time(key) + sequences / self.fair.shares.get(
            key, self.fair.default_share
        )
        self.served[env_id] = self.served.get(env_id, 0) + sequences


@dataclass(frozen=True)
class Selected:
    """Result of a selection that formed a batch."""

    groups: list[GroupRecord]
    """Groups in the order of delivery."""
    ledger: Ledger
    """Virtual times and served sequences after this batch."""


@dataclass(frozen=True)
class NotSelected:
    """Result of a selection that cannot form a batch."""

    reason: str
    """A value of ``X-Batch-Reason``."""


Pack = list[Unit]
"""Units that are selected together."""


def chunks(units: Iterable[Unit], length: int) -> Iterator[Pack]:
    """Yield packs of exactly ``length`` units; units left over at the end are dropped."""
    iterator = iter(units)
    while len(pack := list(islice(iterator, length))) == length:
        yield pack


class FairDraw:
    """Weighted fair queueing of packs: always draws the oldest pack of the account with the
    smallest virtual time.

    Sources yield packs in the order of their oldest member. A pack is drawn on the account of its
    oldest member, but each environment is charged for its own members.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._heads: dict[int | None, list[tuple[int, int, Pack, Iterator[Pack]]]] = {}
        self._turns: list[tuple[float, int, int, int | None]] = []
        self._current: dict[int | None, tuple[float, int]] = {}
        self._ticket = count()

    def offer(self, source: Iterator[Pack]) -> None:
        """Add a source of packs, beginning with its next pack."""
        pack = next(source, None)
        if pack is None:
            return
        key = self.ledger.key(pack[0].env_id)
        heads = self._heads.setdefault(key, [])
        heapq.heappush(heads, (pack[0].order, next(self._ticket), pack, source))
        self._queue_turn(key)

    def draw(self) -> tuple[Pack, Iterator[Pack]] | None:
        """Return the next pack and its source. The source is removed until it is offered again.
        None if no packs are left."""
        while self._turns:
            time, order, _, key = heapq.heappop(self._turns)
            if self._current.get(key) != (time, order):
                continue
            del self._current[key]
            heads = self._heads[key]
            if (time, order) != (self.ledger.time(key), heads[0][0]):
                self._queue_turn(key)
                continue
            _, _, pack, source = heapq.heappop(heads)
            return pack, source
        return None

    def charge(self, pack: Pack) -> None:
        """Add the pack to the batch and charge its environments."""
        key = self.ledger.key(pack[0].env_id)
        self.ledger.clock = self.ledger.time(key)
        for unit in pack:
            self.ledger.charge(unit.env_id, unit.size)
        self._queue_turn(key)

    def skip(self, pack: Pack) -> None:
        """Leave out a pack that does not fit. Its environment is not charged and keeps its turn."""
        self._queue_turn(self.ledger.key(pack[0].env_id))

    def _queue_turn(self, key: int | None) -> None:
        """Add the account's next turn to the heap, if it has packs. A turn that has become outdated
        stays in the heap, but is no longer in ``_current``."""
        if not (heads := self._heads.get(key)):
            self._current.pop(key, None)
            return
        turn = self.ledger.time(key), heads[0][0]
        if self._current.get(key) != turn:
            self._current[key] = turn
            heapq.heappush(self._turns, (*turn, next(self._ticket), key))


def build_selection(packs: list[Pack], ledger: Ledger) -> Selected:
    """Return a batch of these packs, ordered by their oldest members."""
    packs = sorted(packs, key=lambda pack: pack[0].order)
    groups = [member for pack in packs for unit in pack for member in unit.members]
    return Selected(groups, ledger)


def find_size_problem(size: int, batch_size: int, strict: bool) -> str | None:
    """Return why a unit of ``size`` sequences can never be part of a batch, or None if it can."""
    if size < 1:
        return "zero_sequences"
    if batch_size < 1:
        return None
    if size > batch_size:
        return "larger_than_batch"
    return "size_does_not_divide_batch" if batch_size % size and not strict else None


def select_exact(index: QueueIndex, batch_size: int, fair: FairShare) -> Selected | NotSelected:
    """Select a batch from packs whose length is the least common multiple of all queued sizes. If
    these packs do not fill it, try again without the largest size, so that a large group never
    blocks the others."""
    by_size: dict[int, list[Lane]] = {}
    for (_, size), lane in index.lanes.items():
        if find_size_problem(size, batch_size, strict=False) is None:
            by_size.setdefault(size, []).append(lane)
    sizes = sorted(by_size)
    if sum(size * len(lane) for size in sizes for lane in by_size[size]) < batch_size:
        return NotSelected("not_enough_sequences" if index.groups else "empty")
    while sizes:
        unit = lcm(*sizes)
        if (
            sum(sum(map(len, by_size[size])) // (unit // size) for size in sizes) * unit
            >= batch_size
        ):
            sources = (
                source for size in sizes for source in _list_sources(by_size[size], unit // size)
            )
            return _draw_batch(sources, batch_size // unit, Ledger(fair))
        sizes.pop()
    return NotSelected("no_complete_packs")


def _list_sources(lanes: Sequence[Lane], length: int) -> Iterator[Iterator[Pack]]:
    """Yield sources of packs: first packs of a single environment each, then packs of units left
    over from several environments."""
    remainders = []
    for lane in lanes:
        pack_count, remainder = divmod(len(lane), length)
        if pack_count:
            yield (
                pack
                for pack, _ in zip(chunks(lane, length), repeat(None, pack_count), strict=False)
            )
        remainders.append((lane, remainder))
    if sum(remainder for _, remainder in remainders) >= length:
        yield chunks(
            heapq.merge(
                *(lane.newest(remainder) for lane, remainder in remainders),
                key=lambda unit: unit.order,
            ),
            length,
        )


def _draw_batch(sources: Iterator[Iterator[Pack]], n_packs: int, ledger: Ledger) -> Selected:
    """Return a batch of ``n_packs`` packs, drawn fairly from the sources. There must be enough."""
    fair_draw = FairDraw(ledger)
    selected = []
    for source in sources:
        fair_draw.offer(source)
    for _ in range(n_packs):
        result = fair_draw.draw()
        assert result is not None, "the packs were counted before"
        pack, source = result
        fair_draw.charge(pack)
        fair_draw.offer(source)
        selected.append(pack)
    return build_selection(selected, ledger)


Minimums = Sequence[tuple[int, float]]
Lanes = dict[int | None, dict[int, list[Unit]]]


def select_with_minimums(
    index: QueueIndex,
    batch_size: int,
    fair: FairShare,
    minimums: Minimums,
    *,
    rounding: str = "floor",
    recheck: bool = True,
) -> Selected | NotSelected:
    """Select the minimums first, in order of registration, then fill the batch by weight from all
    environments.

    ``minimums``: (env_id, fraction of the batch). If no batch results, try again without the
    largest size; if all attempts fail, return the first reason.
    """
    sizes = sorted(
        {
            size
            for _, size in index.lanes
            if find_size_problem(size, batch_size, strict=False) is None
        }
    )
    if index.sequences < batch_size:
        return NotSelected("not_enough_sequences" if index.groups else "empty")
    first: NotSelected | None = None
    while sizes:
        attempt = _Attempt(batch_size, Ledger(fair), _complete_units(index, sizes, batch_size))
        result = attempt.run(compute_needs(batch_size, minimums, rounding), recheck)
        if isinstance(result, Selected):
            return result
        first = first or result
        sizes.pop()
    return first or NotSelected("no_complete_packs")


def compute_needs(batch_size: int, minimums: Minimums, rounding: str) -> dict[int, int]:
    """Return the minimum number of sequences of each environment that has one above 0."""
    required = {}
    for env_id, allocation in minimums:
        exact = batch_size * allocation
        need = floor(exact + 1e-9) if rounding == "floor" else ceil(exact - 1e-9)
        if need > 0:
            required[env_id] = need
    return required


def _complete_units(index: QueueIndex, sizes: Sequence[int], batch_size: int) -> Lanes:
    """Return the units that form complete packs of one environment, by environment and size, oldest
    first. Each list is limited to what one batch can contain."""
    unit = lcm(*sizes)
    lanes = {}
    for (env_id, size), lane in index.lanes.items():
        if size in sizes:
            complete = len(lane) - len(lane) % (unit // size)
            if complete:
                unit_count = min(complete, batch_size // size)
                lanes.setdefault(env_id, {})[size] = list(islice(lane, unit_count))
    return lanes


@dataclass
class _Attempt:
    """One attempt to form a batch from units of a given set of sizes."""

    batch_size: int
    """Number of sequences in the batch."""
    ledger: Ledger
    """Virtual times and served sequences of this attempt."""
    lanes: Lanes
    """Units by environment and size; they are removed when they are chosen."""
    selected: list[Pack] = field(default_factory=list)
    """Packs chosen so far."""
    taken_by_env: dict[int | None, int] = field(default_factory=dict)
    """Sequences taken from each environment."""
    room: int = field(init=False)
    """Number of sequences that the batch still lacks."""
    remaining: Counter[int] = field(default_factory=Counter)
    """Number of units not yet chosen, by size."""

    def __post_init__(self) -> None:
        self.room = self.batch_size
        for lanes in self.lanes.values():
            for size, units in lanes.items():
                self.remaining[size] += len(units)

    def run(self, need: dict[int, int], recheck: bool) -> Selected | NotSelected:
        """Take the minimum of every environment in ``need``, then fill the batch."""
        for env_id in need:
            if env_id not in self.lanes:
                return NotSelected(f"min_unmet:{env_id}")
        need = self._scale_needs(need)
        reserved = sum(need.values())
        for env_id, required in need.items():
            reserved -= required
            self._take_minimum(env_id, required, reserved)
        self._fill()
        unmet = next(
            (
                env_id
                for env_id, required in need.items()
                if self.taken_by_env.get(env_id, 0) < required
            ),
            None,
        )
        if unmet is not None and recheck:
            return NotSelected(f"min_unmet:{unmet}")
        return (
            NotSelected("no_complete_packs")
            if self.room
            else build_selection(self.selected, self.ledger)
        )

    def _scale_needs(self, required_by_env: dict[int, int]) -> dict[int, int]:
        """Return the required numbers of sequences, scaled down in proportion if together they
        exceed the batch, but at least the smallest group of each environment: less than one group
        cannot be taken."""
        total = sum(required_by_env.values())
        if total <= self.batch_size:
            return required_by_env
        return {
            env_id: max(min(self.lanes[env_id]), required * self.batch_size // total)
            for env_id, required in required_by_env.items()
        }

    def _take_minimum(self, env_id: int, required: int, reserved: int) -> None:
        """Choose the oldest units of one environment until it has its minimum. ``reserved``: number
        of sequences that must stay free for other environments' minimums."""
        lanes = self.lanes[env_id]
        heads = [(units[0].order, size, 0) for size, units in lanes.items()]
        heapq.heapify(heads)
        used = dict.fromkeys(lanes, 0)
        while heads and self.taken_by_env.get(env_id, 0) < required:
            _, size, position = heapq.heappop(heads)
            if self.room - size < reserved or not self._can_fill_after(size):
                continue
            self._choose([lanes[size][position]])
            used[size] = position + 1
            if position + 1 < len(lanes[size]):
                heapq.heappush(heads, (lanes[size][position + 1].order, size, position + 1))
        for size, number in used.items():
            del lanes[size][:number]

    def _fill(self) -> None:
        """Choose the rest of the batch by weight from all units that can still be packed."""
        draw = FairDraw(self.ledger)
        for lanes in self.lanes.values():
            for units in lanes.values():
                draw.offer(_single_packs(units))
        while self.room and (draw_result := draw.draw()):
            pack, source = draw_result
            if not self._can_fill_after(pack[0].size):
                draw.skip(pack)
                continue
            draw.charge(pack)
            self._choose(pack, charge=False)
            draw.offer(source)

    def _can_fill_after(self, size: int) -> bool:
        """Return whether the remaining units can exactly fill the rest of the batch after a unit of
        this size is taken."""
        room = self.room - size
        if room < 0:
            return False
        remaining = dict(self.remaining)
        remaining[size] -= 1
        smallest = min(remaining)
        if room % smallest == 0 and remaining[smallest] * smallest >= room:
            return True
        reachable = 1
        mask = (1 << (room + 1)) - 1
        for other_size, number in remaining.items():
            step = 1
            while number > 0:
                step = min(step, number)
                reachable |= reachable << (other_size * step) & mask
                number = number - step
                step = step * 2
        return bool(reachable >> room & 1)

    def _choose(self, pack: Pack, charge: bool = True) -> None:
        for unit in pack:
            self.remaining[unit.size] -= 1
            if charge:
                self.ledger.charge(unit.env_id, unit.size)
            self.room -= unit.size
            self.taken_by_env[unit.env_id] = self.taken_by_env.get(unit.env_id, 0) + unit.size
        self.selected.append(pack)


def _single_packs(units: Sequence[Unit]) -> Iterator[Pack]:
    return ([unit] for unit in units)


def select_strict(index: QueueIndex, batch_size: int, fair: FairShare) -> Selected | NotSelected:
    """Select packs of any environments, in the order of arrival if ``fair`` has no shares, until
    their sizes sum to the batch size. No batch is formed if the sum overshoots."""
    if index.sequences < batch_size:
        return NotSelected("not_enough_sequences" if index.groups else "empty")
    largest = index.max_group_size()
    by_size = {}
    for (_, size), lane in index.lanes.items():
        if size and largest % size == 0:
            by_size.setdefault(size, []).append(lane)
    sources = [chunks(_merge_lanes(lanes), largest // size) for size, lanes in by_size.items()]
    ledger = Ledger(fair)
    selected = []
    room = batch_size
    for unit in (
        unit for pack in _draw_packs(sources, ledger, arrival=not fair.shares) for unit in pack
    ):
        selected.append(unit)
        room -= unit.size
        if room <= 0:
            break
    return NotSelected("no_complete_packs") if room else _select_units(selected, ledger)


def select_strict_with_minimums(
    index: QueueIndex,
    batch_size: int,
    fair: FairShare,
    minimums: Minimums,
    *,
    recheck: bool = False,
) -> Selected | NotSelected:
    """Select each environment's minimum number of sequences, then fill the batch in queue order.

    The minimums are met with complete packs: groups of one environment and size whose sizes add up
    to that of the largest group. Groups without an environment form no packs."""
    largest = index.max_group_size()
    need = compute_needs(batch_size, minimums, "floor")
    lanes = {
        key: lane
        for key, lane in index.lanes.items()
        if key[0] is not None
        and key[1]
        and largest % key[1] == 0
        and len(lane) >= largest // key[1]
    }
    for env_id in need:
        if not any(env_id == key[0] for key in lanes):
            return NotSelected(f"min_unmet:{env_id}")
    total = sum(need.values())
    if total > batch_size:
        need = {
            env_id: max(
                min(size for env, size in lanes if env == env_id), required * batch_size // total
            )
            for env_id, required in need.items()
        }
    ledger = Ledger(fair)
    room = batch_size
    selected: list[Unit] = []
    for env_id, required in need.items():
        env_packs = [
            chunks(_take_complete(lane, largest // size), largest // size)
            for (env, size), lane in lanes.items()
            if env == env_id
        ]
        first = len(selected)
        sequences = 0
        for unit in (unit for pack in _merge_by_completion(env_packs) for unit in pack):
            if sequences >= required or not room:
                break
            if unit.size <= room:
                selected.append(unit)
                sequences = sequences + unit.size
                room = room - unit.size
        if recheck and sum(unit.size for unit in selected[first:]) < required:
            return NotSelected(f"min_unmet:{env_id}")
    selected_orders = {unit.order for unit in selected}
    queue_units = heapq.merge(
        *(
            islice(_take_complete(lane, largest // size), 2 * batch_size // size)
            for (_, size), lane in lanes.items()
        ),
        key=_unit_order,
    )
    for unit in (unit for unit in queue_units if unit.order not in selected_orders):
        if not room:
            break
        if unit.size <= room:
            selected.append(unit)
            room -= unit.size
    for unit in selected:
        ledger.charge(unit.env_id, unit.size)
    return NotSelected("no_complete_packs") if room else _select_units(selected, ledger)


def _unit_order(unit: Unit) -> int:
    return unit.order


def _merge_lanes(lanes: list[Lane]) -> Iterator[Unit]:
    return heapq.merge(*lanes, key=_unit_order)


def _take_complete(lane: Lane, length: int) -> Iterator[Unit]:
    return islice(lane, len(lane) - len(lane) % length)


def _merge_by_completion(sources: list[Iterator[Pack]]) -> Iterator[Pack]:
    return heapq.merge(*sources, key=lambda pack: pack[-1].order)


def _draw_packs(sources: list[Iterator[Pack]], ledger: Ledger, arrival: bool) -> Iterator[Pack]:
    """Yield packs in the order in which they were completed if ``arrival`` is true, otherwise by
    weight."""
    if arrival:
        for pack in _merge_by_completion(sources):
            for unit in pack:
                ledger.charge(unit.env_id, unit.size)
            yield pack
        return
    draw = FairDraw(ledger)
    for source in sources:
        draw.offer(source)
    for pack, source in takewhile(bool, iter(draw.draw, None)):
        draw.charge(pack)
        draw.offer(source)
        yield pack


def _select_units(units: Iterable[Unit], ledger: Ledger) -> Selected:
    return Selected([member for unit in units for member in unit.members], ledger)


Group = Mapping[str, Any]
_NO_PAYLOAD = Payload(b"", 0, Encoding.JSON, 0, 0)
"""Placeholder payload for ``select_batch``."""


def select_batch(
    groups: Sequence[Group],
    batch_size: int,
    envs: Sequence[Mapping[str, Any]] = (),
    *,
    strict: bool = False,
) -> tuple[list[Group] | None, list[Group], str]:
    """Select the next batch from a queue whose groups are ordered from oldest to newest. Return
    (batch or None, remaining queue, reason why there is no batch).

    A group is a mapping with a list of ``tokens`` and optionally an ``env_id``; an environment has
    ``registered_id`` and optionally ``connected``, ``weight`` and ``min_batch_allocation``. Groups
    of a size that can never be served stay in the queue. ``strict``: use the original server's
    packing rule.
    """
    index = QueueIndex()
    for order, group in enumerate(groups):
        size = len(group["tokens"])
        if find_size_problem(size, batch_size, strict) is None:
            index.add(
                GroupRecord(
                    order, order, GroupPlace.QUEUE, group.get("env_id"), size, _NO_PAYLOAD, 0, 0.0
                )
            )
    if batch_size < 1:
        return None, list(groups), "batch_size_not_positive"
    connected = [env for env in envs if env.get("connected", True)]
    minimums = [
        (env["registered_id"], min(1e12, max(0.0, env["min_batch_allocation"])))
        for env in connected
        if env.get("min_batch_allocation") is not None
    ]
    fair = _fair_share(connected, strict)
    if minimums:
        select = select_strict_with_minimums if strict else select_with_minimums
        selection = select(index, batch_size, fair, minimums)
    else:
        selection = (select_strict if strict else select_exact)(index, batch_size, fair)
    if isinstance(selection, NotSelected):
        return None, list(groups), selection.reason
    batch_ids = {record.id for record in selection.groups}
    remaining_groups = [group for order, group in enumerate(groups) if order not in batch_ids]
    return [groups[record.id] for record in selection.groups], remaining_groups, ""


def _fair_share(envs: Sequence[Mapping[str, Any]], strict: bool) -> FairShare:
    """Return shares by weight with nothing served so far; in strict mode only the order of arrival
    counts."""
    if strict:
        return FairShare({}, {}, 0.0, float("inf"))
    weights: dict[int | None, float] = {
        env["registered_id"]: max(0.0, env.get("weight", 1.0)) for env in envs
    }
    total = sum(weights.values()) + 1.0
    return FairShare(
        {key: max(0.01, weight / total) for key, weight in weights.items()}, {}, 0.0, 1.0 / total
    )
