"""How many bytes of streamed samples the ranks of a trainer fetch from each other, with one
receiver and with one on each rank: made-up samples, the real choice of receivers, partition and
transfer plan. Prints a table; needs no model.

    python -m benchmarks.scale.moved
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence

from realhf.base.partition import balanced_parts, balanced_parts_near_homes
from realhf.dataflow.storage_map import StorageMap

TOKEN_BYTES = 18
PRODUCERS = 4
KEY = "packed_input_ids"


def step(
    rng: random.Random, ranks: int, per_rank: int, receivers: int, *, near: bool
) -> tuple[int, int, int]:
    """Return the bytes of a random batch, the bytes that the ranks fetch for an inference, and the
    largest number of bytes that one rank sends to others for a group call."""
    names = [f"model_worker/{rank}" for rank in range(ranks)]
    tokens = [int(rng.lognormvariate(9, 0.6)) for _ in range(ranks * per_rank)]
    storage = StorageMap()
    hosts = dict.fromkeys(names, "here")
    sent = [[0] * receivers for _ in range(PRODUCERS)]
    homes: list[int] = []
    for number, length in enumerate(tokens):
        loads = sent[rng.randrange(PRODUCERS)]
        home = min(range(receivers), key=loads.__getitem__)
        loads[home] += length
        homes.append(home)
        storage.record([str(number)], [KEY], names[home])
    parts = (
        balanced_parts_near_homes(tokens, homes, ranks) if near else balanced_parts(tokens, ranks)
    )
    apart = {name: [str(i) for i in part] for name, part in zip(names, parts, strict=True)}
    scored = _moved(storage, apart, hosts, tokens)
    together = {name: [str(i) for i in range(len(tokens))] for name in names}
    return (
        TOKEN_BYTES * sum(tokens),
        sum(scored.values()),
        max(_moved(storage, together, hosts, tokens).values(), default=0),
    )


def _moved(
    storage: StorageMap,
    placement: dict[str, list[str]],
    hosts: dict[str, str],
    tokens: Sequence[int],
) -> Counter[str]:
    """Return the bytes that each rank sends for this placement of samples."""
    moved: Counter[str] = Counter()
    for fetch in storage.plan(placement, [KEY], hosts):
        moved[fetch.src] += TOKEN_BYTES * sum(tokens[int(i)] for i in fetch.ids)
    return moved


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samples", type=int, default=16, help="of a batch, for each rank")
    args = parser.parse_args()
    print(
        "| ranks | receivers | partition | an inference fetches | the busiest rank sends for a "
        "group call |"
    )
    print("|---|---|---|---|---|")
    for ranks in (2, 4, 8, 64):
        for receivers, near in ((1, False), (1, True), (ranks, False), (ranks, True)):
            rng = random.Random(7)
            batch, scored, busiest = map(
                sum,
                zip(
                    *(
                        step(rng, ranks, args.samples, receivers, near=near)
                        for _ in range(args.steps)
                    ),
                    strict=True,
                ),
            )
            how = "near to the holder" if near else "by length alone"
            print(
                f"| {ranks} | {receivers} | {how} | {scored / batch:.0%} | {busiest / batch:.0%} |"
            )


if __name__ == "__main__":
    main()
