"""Serves the master's calls about the stream of finished samples, on a worker that trains on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from realhf.api.calls import (
    ARRIVED,
    STREAM_CHECK,
    STREAM_OPEN,
    STREAM_PRUNE,
    STREAM_RESTORE,
    ArrivedRequest,
    Nothing,
    OpenStreamAnswer,
    OpenStreamRequest,
    PruneStreamRequest,
    RestoreStreamAnswer,
    RestoreStreamRequest,
)
from realhf.api.keys import KeyTable
from realhf.api.streaming import Arrival
from realhf.data.sample_limits import SampleLimits
from realhf.data.stream_dataset import StreamDataset
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.service import BlockingServiceClient
from realhf.transport.tensor_store import TensorStore

NOTIFY_TIMEOUT_S = 60.0


class StreamHost:
    """Owns the worker's ``StreamDataset``: ``open`` makes it, the other calls are passed on to it."""

    def __init__(self, run_id: str, worker: str, folder: Path, store: TensorStore, network: Network = LOOPBACK) -> None:
        self._network = network
        self._run_id, self._worker, self._folder, self._store = run_id, worker, folder, store
        self._master: BlockingServiceClient | None = None
        self._dataset: StreamDataset | None = None

    def handlers(self) -> dict[str, Callable[[Any], Any]]:
        """Return the handlers of the immediate lane, by name."""
        return dict(
            [
                STREAM_OPEN.served_by(self.open),
                STREAM_RESTORE.served_by(self.restore),
                STREAM_PRUNE.served_by(self.prune),
                STREAM_CHECK.served_by(self.check),
            ]
        )

    def open(self, request: OpenStreamRequest) -> OpenStreamAnswer:
        """Make the dataset and its connection to the master, unless there is one already."""
        if self._dataset is None:
            self._master = BlockingServiceClient(
                request.control, "the master", self._worker, self._run_id, self._network
            )
            known = KeyTable()
            limits = SampleLimits(
                tuple(known[name] for name in request.keys),
                min_sequences=request.group_size,
                max_sequences=request.max_sequences,
                max_tokens=request.max_tokens,
            )
            self._dataset = StreamDataset(
                self._run_id,
                self._folder,
                self._store,
                self._notify,
                credits=request.credits,
                limits=limits,
                network=self._network,
                rank=request.rank,
            )
        return OpenStreamAnswer(self._dataset.endpoint)

    def restore(self, request: RestoreStreamRequest) -> RestoreStreamAnswer:
        """Put what was logged before back into the store, and return its arrivals."""
        return RestoreStreamAnswer(self._opened().restore(request.items))

    def prune(self, request: PruneStreamRequest) -> Nothing:
        """Delete what no recovery needs any more."""
        self._opened().prune(request.alive, request.newest, request.ranks)
        return Nothing()

    def check(self, request: Nothing) -> Nothing:
        """Raise StreamFailed when nothing can arrive any more."""
        del request
        self._opened().check()
        return Nothing()

    def close(self) -> None:
        """Close the connection to the master and the dataset, if ``open`` made them."""
        if self._master is not None:
            self._master.close()
        if self._dataset is not None:
            self._dataset.close()

    def _opened(self) -> StreamDataset:
        if self._dataset is None:
            raise RuntimeError("the stream is not open")
        return self._dataset

    def _notify(self, arrivals: Sequence[Arrival]) -> Sequence[str]:
        assert self._master is not None
        return self._master.ask(ARRIVED, ArrivedRequest(list(arrivals)), timeout_s=NOTIFY_TIMEOUT_S).answers
