"""Engines say what they hold and what they compute: what is right, what ends the run, and what is
written down. The prefix after which engines are probed: long enough for a block of a prefix cache,
and never too long. Digests beside the weights of a checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from realhf.api.calls import ChangedTensor, Probe, UpdateWeightsAnswer
from realhf.api.generation import HeldTensor, TensorSlot, WeightsManifest
from realhf.api.model import Engine
from realhf.base.tensor_digest import digest_tensors, joint_digest
from realhf.dataflow.model_host import DIGESTS_FILE, check_digests, write_digests
from realhf.dataflow.weight_proof import (
    LONG_PREFIX,
    NEW_TOKENS,
    SHORT_PREFIX,
    WEIGHTS_FILE,
    WeightRecord,
    WeightTrial,
    WrongWeights,
    check_engine_weights,
    find_probe_error,
    probe_ids,
)

SLOTS = (TensorSlot("a", "f32", (2,), 0, 8, "d-a"), TensorSlot("b", "f32", (2,), 64, 8, "d-b"))
MANIFEST = WeightsManifest(3, "shm", "here", 128, "", SLOTS)
GOOD = {"a": HeldTensor("f32", "d-a"), "b": HeldTensor("bf16", "d-b16", "d-b16")}


def answer(held: dict[str, HeldTensor] | None, *changed: ChangedTensor) -> UpdateWeightsAnswer:
    return UpdateWeightsAnswer(1.0, 1.0, 1.0, held, list(changed))


def test_an_engine_that_holds_the_weights_also_in_another_type_passes() -> None:
    check_engine_weights("generation/0", MANIFEST, answer(GOOD), 2)
    check_engine_weights("generation/0", MANIFEST, answer(None), 2)


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (
            {**GOOD, "a": HeldTensor("f32", "d-x")},
            "a should have digest d-a, found d-x .f32. .1 of 2",
        ),
        (
            {**GOOD, "b": HeldTensor("bf16", "d-b", "d-b16")},
            "b should have digest d-b16, found d-b .bf16.",
        ),
        ({"b": GOOD["b"]}, "a should have digest d-a, found nothing of that name"),
        ({}, r"a should .* nothing of that name \(2 of 2 tensors\)"),
    ],
)
def test_a_difference_names_engine_version_tensor_and_both_digests(
    held: dict[str, HeldTensor], text: str
) -> None:
    with pytest.raises(
        WrongWeights, match=f"generation/0 does not hold the weights of version 3: {text}"
    ):
        check_engine_weights("generation/0", MANIFEST, answer(held), 2)


def test_weights_that_changed_between_two_updates_are_found_at_the_next_though_it_is_right_again() -> (
    None
):
    changed = ChangedTensor("b", "d-b", "d-z")
    with pytest.raises(
        WrongWeights, match=r"generation/1: b changed while version 2 was in use: .* d-b and is d-z"
    ):
        check_engine_weights("generation/1", MANIFEST, answer(GOOD, changed), 2)


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / WEIGHTS_FILE).read_text().splitlines() if line]
    return [{name: value for name, value in row.items() if name != "time"} for row in found]


def test_the_digest_of_every_version_and_who_held_it_is_written_down(tmp_path: Path) -> None:
    warned: list[str] = []
    record = WeightRecord(tmp_path, warned.append)
    record.record_published(MANIFEST)
    record.record_loaded(
        "generation/0", MANIFEST, answer({"a": GOOD["a"], "b": HeldTensor("f32", "d-b")})
    )
    record.record_published(MANIFEST)
    record.record_self_test(3, ["generation/0"])
    for _ in range(2):
        record.record_loaded("generation/1", MANIFEST, answer(None))
    assert rows(tmp_path) == [
        {
            "event": "published",
            "version": 3,
            "digest": MANIFEST.digest,
            "tensors": 2,
            "nbytes": 128,
        },
        {"event": "held", "version": 3, "digest": MANIFEST.digest, "engine": "generation/0"},
        {"event": "self-test", "version": 3, "engines": ["generation/0"]},
    ]
    assert len(warned) == 1 and "generation/1 cannot report" in warned[0]


def test_what_an_engine_cannot_prove_passes_and_is_counted_with_a_warning(tmp_path: Path) -> None:
    warned: list[str] = []
    record = WeightRecord(tmp_path, warned.append)
    held = {"a": GOOD["a"], "b": HeldTensor("", "")}
    check_engine_weights("generation/0", MANIFEST, answer(held), 2)
    for _ in range(2):
        record.record_loaded("generation/0", MANIFEST, answer(held))
    digest = joint_digest({"a": "d-a"})
    row = {"event": "held", "version": 3, "digest": digest, "engine": "generation/0", "unproven": 1}
    assert rows(tmp_path) == [row, row]
    assert len(warned) == 1 and "cannot report digests of 1 of 2 tensors, e.g. b;" in warned[0]


def test_a_version_that_a_run_did_not_publish_before_it_stopped_is_not_missed(
    tmp_path: Path,
) -> None:
    """A run that went on after Ctrl-C in a training call warned that its weights could not be
    compared."""
    record = WeightRecord(tmp_path, lambda _: None)
    record.record_published(MANIFEST)
    record.record_unpublished(4)
    warned: list[str] = []
    for step in (3, 4):
        WeightRecord(tmp_path, warned.append, completed_steps=step)
    assert warned == []
    WeightRecord(tmp_path, warned.append, completed_steps=5)
    assert len(warned) == 1 and "does not say which weights version 5 had" in warned[0]


def test_a_run_that_goes_on_with_other_weights_than_it_published_is_warned_of(
    tmp_path: Path,
) -> None:
    other = replace(MANIFEST, slots=SLOTS[:1])
    WeightRecord(tmp_path, lambda _: None).record_published(MANIFEST)
    with (tmp_path / WEIGHTS_FILE).open("a") as file:
        file.write('{"event": "published", "version"')  # a kill tore the last line
    warned: list[str] = []
    WeightRecord(tmp_path, warned.append).record_published(MANIFEST)
    assert warned == []
    WeightRecord(tmp_path, warned.append).record_published(other)
    assert len(warned) == 1 and MANIFEST.digest in warned[0] and other.digest in warned[0]
    assert (tmp_path / WEIGHTS_FILE).read_text().count('"published"') == 4


IDS = [5, 6, 7, 8]


def probe(*logprobs: float, ids: list[int] = IDS) -> Probe:
    return Probe(ids, list(logprobs))


OLD, NEW, SCORES = probe(-1.0, -2.0), probe(-4.0, -3.0), ([-4.001, -3.0], [-1.0, -2.5])


def test_an_engine_that_follows_the_trainer_there_and_back_passes() -> None:
    assert find_probe_error(OLD, NEW, OLD, SCORES) == ""
    assert find_probe_error(OLD, NEW, OLD, None) == ""


@pytest.mark.parametrize(
    ("old", "new", "back", "scores", "text"),
    [
        (OLD, OLD, OLD, SCORES, "ignores updates"),
        (OLD, OLD, OLD, None, "ignores updates"),
        (
            OLD,
            probe(-2.9, -2.2),
            OLD,
            SCORES,
            "a part of its weights, or of its cache, is not of this version",
        ),
        (OLD, NEW, NEW, SCORES, "did not take all of the update"),
        (OLD, NEW, probe(-1.1, -2.0), SCORES, "did not take all of the update"),
        (OLD, NEW, probe(-1.0, -2.0, ids=[5, 6, 7, 9]), SCORES, "did not take all of the update"),
        (OLD, probe(-4.0, float("nan")), OLD, SCORES, "not finite"),
        (OLD, probe(), OLD, None, "sampled nothing"),
    ],
)
def test_what_is_wrong_with_an_engine_is_said(
    old: Probe, new: Probe, back: Probe, scores: tuple[list[float], list[float]] | None, text: str
) -> None:
    assert text in find_probe_error(old, new, back, scores)


class TableEngine:
    """Scores a token by row 0 of a table, which is the whole model; ``copies``: its weights are
    given as copies."""

    def __init__(self, *, copies: bool = False) -> None:
        self.table, self.norm = torch.arange(20.0).reshape(10, 2), torch.ones(3)
        self.copies = copies

    def weights(self) -> dict[str, torch.Tensor]:
        own = {
            "other": self.table + 1,
            "table": self.table,
            "norm": self.norm,
            "step": torch.arange(4),
        }
        return {name: tensor.clone() for name, tensor in own.items()} if self.copies else own

    def logprobs(self, sample: Any, **_: Any) -> torch.Tensor:
        return self.table[0, 0].repeat(len(sample.data["packed_input_ids"]) - 1)


def test_the_trainer_changes_weights_of_each_shape_and_changes_them_back_to_the_bit() -> None:
    engine = TableEngine()
    trial = WeightTrial()
    typed: Engine = engine  # pyright: ignore[reportAssignmentType]
    before = digest_tensors(engine.weights())
    assert trial.step(0, typed, engine.weights(), []) == ([], [])
    assert trial.step(1, typed, engine.weights(), []) == ([], [])
    changed = digest_tensors(engine.weights())
    assert changed["table"] != before["table"] and changed["step"] == before["step"]
    assert trial.step(2, typed, engine.weights(), [NEW]) == ([[18.0, 18.0]], [[0.0, 0.0]])
    assert digest_tensors(engine.weights()) == before


def test_weights_that_are_copies_are_changed_for_others_and_not_scored() -> None:
    engine = TableEngine(copies=True)
    trial = WeightTrial()
    typed: Engine = engine  # pyright: ignore[reportAssignmentType]
    given = engine.weights()
    before = digest_tensors(engine.weights())
    trial.step(1, typed, given, [])
    assert digest_tensors(given) != before
    given = engine.weights()
    assert trial.step(2, typed, given, [NEW]) == ([], []) and digest_tensors(given) == before


def test_a_step_of_the_self_test_out_of_turn_is_refused() -> None:
    engine = TableEngine()
    trial = WeightTrial()
    typed: Engine = engine  # pyright: ignore[reportAssignmentType]
    with pytest.raises(RuntimeError, match="out of turn"):
        trial.step(2, typed, engine.weights(), [])
    trial.step(1, typed, engine.weights(), [])
    for step in (0, 1):
        with pytest.raises(RuntimeError, match="out of turn"):
            trial.step(step, typed, engine.weights(), [])


class Letters:
    """A tokenizer of single letters; ``knows`` none of them where it is empty."""

    def __init__(self, knows: bool = True) -> None:
        self.knows = knows

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text] if self.knows else []


@pytest.mark.parametrize(
    ("engine", "policy", "limit", "length"),
    [
        ("vllm", "recompute", None, LONG_PREFIX),
        ("vllm", "recompute", 100, 100 - NEW_TOKENS),
        ("vllm", "keep", 4096, SHORT_PREFIX),
        ("embedded", "recompute", None, SHORT_PREFIX),
        ("embedded", "recompute", 3, 1),
    ],
)
def test_it_has_the_length_that_the_engine_needs_and_takes(
    engine: str, policy: str, limit: int | None, length: int
) -> None:
    for tokenizer in (Letters(), Letters(knows=False)):
        assert len(probe_ids(tokenizer, engine, policy, limit)) == length


def engine(value: float) -> Any:
    """Return what the functions ask an engine for: its version and its weights."""
    return SimpleNamespace(version=3, weights=lambda: {"a": torch.full((3,), value)})


def test_other_weights_are_refused_with_the_name_of_the_tensor(tmp_path: Path) -> None:
    write_digests(tmp_path, engine(1.0))
    check_digests(tmp_path, engine(1.0))
    with pytest.raises(ValueError, match="a was saved with digest"):
        check_digests(tmp_path, engine(2.0))


def test_digests_of_another_computation_are_not_compared_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint made before the computation changed still loads."""
    write_digests(tmp_path, engine(1.0))
    path = tmp_path / DIGESTS_FILE
    old = json.loads(path.read_text())
    del old["scheme"]
    path.write_text(json.dumps(old))
    with caplog.at_level(logging.WARNING):
        check_digests(tmp_path, engine(2.0))
    assert f"{path} was computed otherwise" in caplog.text
