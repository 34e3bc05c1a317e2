"""The simulated trainer and generation workers of ``python -m benchmarks.scale``: they say what
true ones say, at once.

    python -m benchmarks.scale.trainer --run-dir DIR --run-id ID --master URL --generation N --patience S

Finished samples come from the simulated rollout workers as lists [id, attempt, order, version];
what the master hears of them is what ``StreamDataset`` would tell: rounds of at most 64, one at a
time.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any, cast

import msgpack
import zmq

from benchmarks.harness.coordination_workers import fake_groups
from benchmarks.harness.fake_weights import FakeImmediateWeights, fake_publish
from realhf.api.calls import (
    ARRIVED,
    CALL,
    CLEAR,
    PROBE_WEIGHTS,
    PUBLISH_WEIGHTS,
    STATUS,
    STREAM_CHECK,
    STREAM_OPEN,
    STREAM_PRUNE,
    STREAM_RESTORE,
    UPDATE_WEIGHTS,
    Arrival,
    ArrivedRequest,
    CallAnswer,
    CallRequest,
    ClearRequest,
    Nothing,
    OpenStreamAnswer,
    OpenStreamRequest,
    PruneStreamRequest,
    RestoreStreamAnswer,
    RestoreStreamRequest,
    RolloutLease,
    StatusAnswer,
)
from realhf.api.experiment import RunPlan
from realhf.api.model import CallContext
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.data.stream_dataset import MAX_ROUND
from realhf.rollout.group_player import PlayedGroup
from realhf.rollout.rollout_loop import SampleEncoder
from realhf.scheduler.process import run_guarded
from realhf.transport.codec import decode_sample, encode_sample
from realhf.transport.rpc_worker import RpcWorker
from realhf.transport.service import BlockingServiceClient

NAME = "model_worker/0"
NOTIFY_S = 120.0
TOKENS = "packed_input_ids"


class FakeImmediateTrainer:
    """Simulated model worker. It stores only the sequence lengths of the samples that have arrived,
    and answers each call with metadata of the right format."""

    def __init__(self, plan: RunPlan, run_id: str) -> None:
        self._outputs = {mfc.name: mfc.output_keys for mfc in plan.spec.mfcs}
        self._run_id = run_id
        self._templates = _templates(plan)
        self._held: dict[str, int] = {}
        self._client: BlockingServiceClient | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"

    def handlers(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (handlers of the ordered lane, handlers of the immediate lane)."""
        ordered = [CALL.with_handler(self._call), PUBLISH_WEIGHTS.with_handler(fake_publish)]
        immediate = [
            CLEAR.with_handler(self._clear),
            STREAM_OPEN.with_handler(self._open),
            STREAM_RESTORE.with_handler(self._restore),
            STREAM_PRUNE.with_handler(self._prune),
            STREAM_CHECK.with_handler(self._check),
        ]
        return dict(ordered), dict(immediate)

    def _open(self, request: OpenStreamRequest) -> OpenStreamAnswer:
        if self._client is None:
            self._client = BlockingServiceClient(request.control, "the master", NAME, self._run_id)
            threading.Thread(target=self._receive, name="stream", daemon=True).start()
        return OpenStreamAnswer(self.endpoint)

    def _restore(self, request: RestoreStreamRequest) -> RestoreStreamAnswer:
        return RestoreStreamAnswer(
            [Arrival(i, attempt, "", error="not kept") for i, attempt, _ in request.items]
        )

    def _prune(self, request: PruneStreamRequest) -> Nothing:
        del request
        return Nothing()

    def _check(self, request: Nothing) -> Nothing:
        del request
        return Nothing()

    def _clear(self, request: ClearRequest) -> Nothing:
        for sample_id in request.ids:
            self._held.pop(sample_id, None)
        return Nothing()

    def _call(self, request: CallRequest) -> CallAnswer:
        keys = self._outputs[request.mfc]
        if not keys:
            return CallAnswer(None, {"tokens": 1.0, "grad_norm": 0.0, "skipped": False}, 0.001, 0.0)
        lengths = [[n - 1 for n in self._lengths(sample_id)] for sample_id in request.ids]
        meta = SequenceSample(
            request.ids,
            dict.fromkeys(keys, lengths),
            dict.fromkeys(keys, "f32"),
            dict.fromkeys(keys, ()),
            None,
            {},
        )
        return CallAnswer([bytes(frame) for frame in encode_sample(meta)], {}, 0.001, 0.0)

    def _lengths(self, sample_id: str) -> list[int]:
        return self._templates[self._held[sample_id]][1]

    # ---- the stream

    def _receive(self) -> None:
        waiting: deque[tuple[bytes, list[Any]]] = deque()
        while True:
            self._socket.poll(1000 if not waiting else 0)
            while len(waiting) < 100 * MAX_ROUND and self._socket.poll(0):
                identity, frame = self._socket.recv_multipart()
                waiting.extend((identity, entry) for entry in msgpack.unpackb(frame))
            if waiting:
                self._round([waiting.popleft() for _ in range(min(MAX_ROUND, len(waiting)))])

    def _round(self, finished: list[tuple[bytes, list[Any]]]) -> None:
        assert self._client is not None
        arrivals = [self._arrival(*entry) for _, entry in finished]
        self._client.ask(ARRIVED, ArrivedRequest(arrivals), timeout_s=NOTIFY_S)
        by_sender: dict[bytes, int] = {}
        for identity, _ in finished:
            by_sender[identity] = by_sender.get(identity, 0) + 1
        for identity, count in by_sender.items():
            self._socket.send_multipart([identity, cast(bytes, msgpack.packb(count))])

    def _arrival(self, sample_id: str, attempt: int, order: int, version: int) -> Arrival:
        number = order % len(self._templates)
        template, _ = self._templates[number]
        self._held[sample_id] = number
        meta = SequenceSample(
            [sample_id],
            {key: template.lengths(key).nested() for key in template.keys},
            template.dtypes,
            template.trailing_shapes,
            None,
            {**template.metadata, "admitted": [version]},
        )
        frames = [bytes(frame) for frame in encode_sample(meta)]
        return Arrival(sample_id, attempt, "simulated", [1, order * 1000, 1000], frames)


def _templates(plan: RunPlan) -> list[tuple[SequenceSample, list[int]]]:
    """Return (metadata, sequence lengths) of some encoded samples."""
    assert plan.spec.rollout is not None
    options = plan.spec.rollout.episodes
    spec = plan.spec
    encode = SampleEncoder(
        plan.spec.rollout.calls[1:],
        CallContext(0, spec.seed, MicroBatchSpec(), spec.run_dir),
        min_group_size=options.min_group_size,
        transcripts=0,
        batch_size=spec.n_seqs,
        turns=options.turn_rewards,
    )
    found = []
    for order, group in enumerate(fake_groups(options.group_size)):
        lease = RolloutLease(f"template-{order}", 0, order, 0, 1.0)
        meta = decode_sample(
            [bytes(frame) for frame in encode(lease, PlayedGroup(group, seconds=0.001))]
        ).meta()
        found.append((meta, meta.lengths(TOKENS).nested()[0]))
    return found


def generation(index: int, run_id: str, master: str, patience_s: float) -> None:
    """Run a generation worker that only accepts weights."""
    weights, rng = FakeImmediateWeights(), random.Random(index)

    def status(request: Nothing) -> StatusAnswer:
        del request
        return StatusAnswer(rng.random(), 0.0, 0.0, 0.0, 0.0)

    RpcWorker(
        f"generation/{index}",
        "generation",
        index,
        run_id,
        master,
        ordered=dict(
            [UPDATE_WEIGHTS.with_handler(weights.update), PROBE_WEIGHTS.with_handler(weights.probe)]
        ),
        immediate=dict([STATUS.with_handler(status)]),
        endpoints={"generation": "tcp://127.0.0.1:1"},
        connect_timeout_s=patience_s,
        master_lost_after_s=patience_s,
    ).run()


def serve(args: argparse.Namespace) -> None:
    """Run all simulated workers, each on its own thread, until the master ends the run."""
    trainer = FakeImmediateTrainer(RunPlan.read(args.run_dir), args.run_id)
    for index in range(args.generation):
        threading.Thread(
            target=generation, args=(index, args.run_id, args.master, args.patience), daemon=True
        ).start()
    ordered, immediate = trainer.handlers()
    gc.freeze()
    patience_s = args.patience
    RpcWorker(
        NAME,
        "model_worker",
        0,
        args.run_id,
        args.master,
        ordered=ordered,
        immediate=immediate,
        connect_timeout_s=patience_s,
        master_lost_after_s=patience_s,
    ).run()


def main() -> int:
    """Run the program. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--generation", type=int, required=True, help="generation workers")
    parser.add_argument(
        "--patience", type=float, required=True, help="seconds without a sign of the master"
    )
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return run_guarded(lambda: serve(args))


if __name__ == "__main__":
    sys.exit(main())
