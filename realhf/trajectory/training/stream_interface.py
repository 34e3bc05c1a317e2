"""Streamed runs: the ``stream_gen`` call, which pulls the next batch from a trajectory server, and
the source of the run's sample ids.

A model worker pulls the batch. Only then does the server decide which groups fill the samples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from realhf.api.model import CallContext, Engine, Model
from realhf.api.sample import SequenceSample
from realhf.api.source import SampleResult, SourceItem
from realhf.trajectory.client import TrajectoryClient
from realhf.trajectory.training.dataset import StreamRun, TrajectoryDataset
from realhf.trajectory.training.stream_sample import RowLimits

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class TrajectoryStreamInterface:
    """Model interface that pulls a batch from a trajectory server at every ``generate``.

    The lease of a batch is acknowledged once a checkpoint taken after its train step is complete
    (``committed``). After a crash before that point the batch is delivered again; after a later
    crash it is not.
    """

    group: str
    """Group of the run; part of its name."""
    project: str
    """Project of the run; part of its name."""
    batch_size: int
    """Number of sequences in a batch."""
    num_steps: int
    """Number of steps of the run."""
    max_tokens: int
    """Maximum length of a sequence, in tokens."""
    min_group_size: int
    """A group with fewer valid sequences gets no gradient."""
    temperature: float
    """Sampling temperature of the producers, for log-probabilities that they did not send."""
    wait_s: float
    """Seconds that a step waits for its batch."""
    url: str = ""
    """Address of the server; "" for the server that belongs to this run."""
    token_file: str = ""
    """File with the bearer token."""
    ca_file: str = ""
    """PEM file of the certificate authority for an https server."""
    max_staleness: int | None = None
    """Largest number of policy versions that a group may lag; None for no bound."""
    fresh: bool = False
    """Whether to start a new run on the server."""
    transcripts: int = 2
    """Number of sequences per step that are returned as text."""
    _dataset: TrajectoryDataset | None = field(default=None, init=False)
    _saved: list[str] = field(default_factory=list, init=False)
    _untrained: set[str] = field(default_factory=set, init=False)
    """Leases of the last batch; they count as trained on once the engine has a newer version."""
    _pulled_at: int = field(default=-1, init=False)
    """Policy version for which the last batch was pulled."""
    _engine: Engine | None = field(default=None, init=False)

    def generate(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, Any]]:
        """Fill ``sample`` with the groups of the next batch. Raises TrajectoryError."""

        def rescore(own: SequenceSample) -> Tensor:
            return model.engine.logprobs(own, temperature=self.temperature, mb_spec=context.mb_spec)

        dataset = self._get_dataset(model, context)
        before = set(dataset.lease_ids)
        self._engine = model.engine
        self._pulled_at = context.step
        try:
            filled, stats = dataset.next(
                sample.ids, version=context.step, wait_s=self.wait_s, rescore=rescore
            )
        finally:
            self._untrained = set(dataset.lease_ids) - before
        return filled, {
            **stats,
            "episodes": self._build_transcripts(filled, model.tokenizer, context.step),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the leases of the batches that were trained on. The lease of a batch that was
        pulled but not trained on is left out, so the server delivers that batch again."""
        leases = self._dataset.lease_ids if self._dataset else []
        trained = self._engine is None or self._engine.version > self._pulled_at
        self._saved = (
            leases if trained else [lease for lease in leases if lease not in self._untrained]
        )
        return {"leases": self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the leases of batches that were already trained on."""
        self._saved = list(state.get("leases", ()))

    def committed(self) -> None:
        """Acknowledge the leases of the last ``state_dict``, because its checkpoint is complete."""
        if self._dataset is not None:
            self._dataset.acknowledge(self._saved)

    def close(self) -> None:
        """Close the connection to the server."""
        if self._dataset is not None:
            self._dataset.close()
            self._dataset = None

    def _get_dataset(self, model: Model, context: CallContext) -> TrajectoryDataset:
        if self._dataset is None:
            url = self.url or next(iter(context.endpoints.get("trajectory", ())), "")
            if not url:
                raise RuntimeError(
                    "no trajectory server is registered; stream_gen needs one (kind 'trajectory')"
                )
            limits = RowLimits(len(model.tokenizer), self.max_tokens, self.min_group_size)
            run = StreamRun(
                self.group,
                self.project,
                self.batch_size,
                self.max_tokens,
                self.num_steps,
                self.max_staleness,
                self.fresh,
            )
            self._dataset = TrajectoryDataset(
                self._client(url), run, limits, step=context.step, consumed=self._saved
            )
        return self._dataset

    def _client(self, url: str) -> TrajectoryClient:
        token = (
            Path(self.token_file).expanduser().read_text(encoding="utf-8").strip()
            if self.token_file
            else ""
        )
        parts = urlsplit(url)
        if parts.password:  # the token of a server of this run
            url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
            token = token or parts.password
        name = quote(f"{self.group}/{self.project}")
        return TrajectoryClient(
            url, token=token, trainer_id=name, explicit_acks=True, ca_file=self.ca_file
        )

    def _build_transcripts(
        self, sample: SequenceSample, tokenizer: Any, step: int
    ) -> Sequence[str]:
        texts = []
        start = 0
        for sample_id, lengths in zip(sample.ids, sample.seqlens["packed_input_ids"], strict=True):
            if lengths and len(texts) < self.transcripts:
                ids = sample["packed_input_ids"][start : start + lengths[0]].tolist()
                text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
                texts.append(f"step {step}, sample {sample_id}\n{text}")
            start += sum(lengths)
        return texts


class BatchSlotSource:
    """Infinite source of the sample ids ``slot<i>@<n>``, where n counts up from 0. Its items have
    no values and no metadata."""

    def __init__(self, seed: int) -> None:
        del seed
        self._drawn_count = 0

    def next_batch(self, n: int) -> list[SourceItem]:
        """Return exactly ``n`` items."""
        first = self._drawn_count
        self._drawn_count = self._drawn_count + n
        return [SourceItem(f"slot{index}@{first + index}") for index in range(n)]

    def record(self, results: Sequence[SampleResult]) -> None:
        """Do nothing: the producer of a group does not wait for its result."""

    def state_dict(self) -> dict[str, Any]:
        """Return the number of items drawn."""
        return {"drawn": self._drawn_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position: continue after the items drawn before it was saved."""
        self._drawn_count = int(state["drawn"])

    def stats(self) -> dict[str, float]:
        """Return no statistics."""
        return {}
