"""The workers of ``coordination.py``: everything is real but the engine, the environment and the
training, which answer at once.

    python -m benchmarks.harness.coordination_workers KIND --run-dir DIR --run-id ID --master URL --in-flight GROUPS
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import logging
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.fake_weights import FakeImmediateWeights, fake_publish
from realhf.api.calls import (
    CALL,
    PROBE_WEIGHTS,
    PUBLISH_WEIGHTS,
    STATUS,
    UPDATE_WEIGHTS,
    Nothing,
    RolloutLease,
    StatusAnswer,
)
from realhf.api.experiment import RunPlan
from realhf.api.rollout import PlayedTurn, RolloutOutcome
from realhf.rollout.group_player import PlayedGroup
from realhf.scheduler.process import run_guarded
from realhf.transport.rpc_worker import RpcWorker

PROMPT_TOKENS = 40
TURN_TOKENS = 20
OBSERVATION_TOKENS = 20
TURNS = 2
VARIETY = 16
"""Number of different groups that the fake environment repeats."""


class FakeImmediateFlight:
    """Queue that keeps a constant number of groups in flight. When ``groups`` of them are waiting,
    the oldest quarter is released, so groups wait only for each other."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._held: collections.deque[asyncio.Future[None]] = collections.deque()

    async def pass_through(self) -> None:
        """Wait until this group is released."""
        future = asyncio.get_running_loop().create_future()
        self._held.append(future)
        if len(self._held) >= self._groups:
            for _ in range(max(1, self._groups // 4)):
                self._held.popleft().set_result(None)
        await future


class FakeImmediatePlayer:
    """A ``Player`` without environment and engine. It returns groups that were made before the
    run."""

    def __init__(
        self, flight: FakeImmediateFlight, groups: Sequence[Sequence[RolloutOutcome]]
    ) -> None:
        self._flight = flight
        self._groups = groups

    async def play(self, lease: RolloutLease) -> PlayedGroup:
        """Return one of the prepared groups."""
        await self._flight.pass_through()
        return PlayedGroup(self._groups[lease.order % len(self._groups)], seconds=0.001)

    async def close(self) -> None:
        """Do nothing: there are no environments."""
        pass


def fake_groups(size: int, seed: int = 0) -> list[list[RolloutOutcome]]:
    """Return groups of ``size`` rollouts, each with two turns and about a hundred tokens."""
    rng = random.Random(seed)
    return [[_fake_rollout(rng) for _ in range(size)] for _ in range(VARIETY)]


def _fake_rollout(rng: random.Random) -> RolloutOutcome:
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    for turn in range(TURNS):
        sampled = TURN_TOKENS + rng.randrange(-4, 5)
        seen = OBSERVATION_TOKENS if turn + 1 < TURNS else 0
        ids += [rng.randrange(400) for _ in range(sampled + seen)]
        logprobs += [-rng.random() for _ in range(sampled)] + [0.0] * seen
        mask += [True] * sampled + [False] * seen
    turns = tuple(PlayedTurn("aws s3 ls", "", 0.5) for _ in range(TURNS))
    solved = rng.random() < 0.5
    return RolloutOutcome(
        status="achieved" if solved else "max_turns",
        prompt_ids=[rng.randrange(400) for _ in range(PROMPT_TOKENS)],
        completion_ids=ids,
        logprobs=logprobs,
        versions=[0 if flag else -1 for flag in mask],
        loss_mask=mask,
        reward=1.0 if solved else 0.25,
        achieved=solved,
        progress=0.5,
        turns=turns,
        task_id="1",
        group="warmup",
        seed=1,
        timings={"wall_s": 0.001},
    )


def rollout_worker(args: argparse.Namespace) -> None:
    """Run a real rollout worker whose players take no time."""
    import torch

    from workers.rollout_worker import RolloutWorker

    torch.set_num_threads(1)

    class FakeImmediateRolloutWorker(RolloutWorker):
        """The real rollout worker with fake players."""

        def _build_players(self, generation: Any, env_urls: Sequence[str]) -> Any:
            del generation, env_urls
            groups = fake_groups(self._spec.episodes.group_size)
            flight = FakeImmediateFlight(args.in_flight)
            self._feedback = None
            return [FakeImmediatePlayer(flight, groups) for _ in range(args.in_flight)]

    plan = RunPlan.read(args.run_dir)
    assert plan.spec.rollout is not None
    gc.freeze()
    FakeImmediateRolloutWorker(plan, plan.spec.rollout, 0, args.run_id, args.master).run()


class FakeImmediateEngine:
    """Engine without weights."""

    version = 0


class FakeImmediateCalls:
    """Interface of all calls on the model worker. It reads nothing and returns zeros."""

    def inference(self, model: Any, sample: Any, context: Any) -> Any:
        """Return log-probabilities of zero."""
        import torch

        from realhf.api.sample import SequenceSample

        del model, context
        lengths = [[n - 1 for n in inner] for inner in sample.lengths("packed_input_ids").nested()]
        zeros = torch.zeros(sum(map(sum, lengths)), dtype=torch.float32)
        name = "packed_ref_logprobs"
        return SequenceSample.from_tensors(sample.ids, {name: zeros}, {name: lengths}), {}

    def train_step(self, model: Any, sample: Any, context: Any) -> Any:
        """Return the result of a train step without doing one."""
        from realhf.api.model import TrainResult

        del model, context
        return TrainResult(
            {"tokens": float(sample.n_tokens("packed_input_ids"))}, grad_norm=0.0, skipped=False
        )


def model_worker(args: argparse.Namespace) -> None:
    """Run a real model worker without a model."""
    import torch

    from realhf.api.model import Model
    from realhf.data.stream_dataset import StreamHost
    from realhf.dataflow.model_host import ModelHost
    from realhf.transport.data_plane import DataPlane
    from realhf.transport.tensor_store import TensorStore

    torch.set_num_threads(1)
    plan = RunPlan.read(args.run_dir)
    name = "model_worker/0"
    store = TensorStore(name)
    plane = DataPlane(name, args.run_id, store)
    plane.start()
    engine: Any = FakeImmediateEngine()
    models = {role: Model(role, engine, None) for role in plan.spec.models}
    calls = {mfc.name: (mfc, FakeImmediateCalls()) for mfc in plan.spec.mfcs}
    host = ModelHost(models, calls, store, plane.fetch, run_dir=args.run_dir)
    stream = StreamHost(args.run_id, name, args.run_dir / "stream", store)

    worker = RpcWorker(
        name,
        "model_worker",
        0,
        args.run_id,
        args.master,
        data_endpoint=plane.endpoint,
        ordered=dict([CALL.with_handler(host.call), PUBLISH_WEIGHTS.with_handler(fake_publish)]),
        immediate={**host.immediate_handlers(), **stream.handlers()},
    )
    gc.freeze()
    try:
        worker.run()
    finally:
        stream.close()
        plane.close()


def generation(args: argparse.Namespace) -> None:
    """Run a generation worker that only accepts weights."""

    weights = FakeImmediateWeights()

    def status(request: Nothing) -> StatusAnswer:
        del request
        return StatusAnswer(0.0, 0.0, 0.0, 0.0, 0.0)

    RpcWorker(
        "generation/0",
        "generation",
        0,
        args.run_id,
        args.master,
        ordered=dict(
            [UPDATE_WEIGHTS.with_handler(weights.update), PROBE_WEIGHTS.with_handler(weights.probe)]
        ),
        immediate=dict([STATUS.with_handler(status)]),
    ).run()


KINDS = {"model_worker": model_worker, "rollout_worker": rollout_worker, "generation": generation}


def main() -> int:
    """Run a worker of the kind given on the command line. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--in-flight", type=int, required=True, help="groups")
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return run_guarded(lambda: KINDS[args.kind](args))


if __name__ == "__main__":
    sys.exit(main())
