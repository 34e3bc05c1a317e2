"""The stream of finished samples on the worker that trains on them: what the master may ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.api.keys import KeyTable
from realhf.api.streaming import Arrival
from realhf.data.sample_limits import SampleLimits
from realhf.data.stream_dataset import StreamDataset
from realhf.transport.service.thread import BlockingServiceClient
from realhf.transport.tensors.store import TensorStore

NOTIFY_TIMEOUT_S = 60.0


class StreamHost:
    """``open`` makes the ``StreamDataset``; the rest belongs to it."""

    def __init__(self, run_id: str, worker: str, folder: Path, store: TensorStore) -> None:
        self._run_id, self._worker, self._folder, self._store = run_id, worker, folder, store
        self._master: BlockingServiceClient | None = None
        self._dataset: StreamDataset | None = None

    def open(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """{control: endpoint of the master's service, credits, keys, group_size, max_tokens} -> {endpoint}."""
        if self._dataset is None:
            self._master = BlockingServiceClient(payload["control"], "the master", self._worker, self._run_id)
            known = KeyTable()
            limits = SampleLimits(
                tuple(known[name] for name in payload["keys"]),
                min_sequences=payload["group_size"],
                max_sequences=payload["group_size"],
                max_tokens=payload["max_tokens"],
            )
            self._dataset = StreamDataset(
                self._run_id, self._folder, self._store, self._notify, credits=payload["credits"], limits=limits
            )
        return {"endpoint": self._dataset.endpoint}

    def restore(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """{items: [[id, attempt, ref]]} -> {arrivals}: what was logged before is in the store again."""
        arrivals = self._opened().restore((id, attempt, ref) for id, attempt, ref in payload["items"])
        return {"arrivals": [arrival.to_map() for arrival in arrivals]}

    def prune(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """{alive: refs that a recovery may need, newest: the last that was accepted} -> {deleted: segments}."""
        return {"deleted": self._opened().prune(payload["alive"], payload["newest"])}

    def check(self, payload: Any) -> dict[str, Any]:
        """Raises StreamFailed when nothing can arrive any more."""
        del payload
        self._opened().check()
        return {}

    def stats(self, payload: Any) -> dict[str, float]:
        """See ``StreamDataset.stats``; {} before ``open``."""
        del payload
        return self._dataset.stats() if self._dataset is not None else {}

    def close(self) -> None:
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
        fields = {"arrivals": [arrival.to_map() for arrival in arrivals]}
        return self._master.request("arrived", fields, timeout_s=NOTIFY_TIMEOUT_S)
