"""SequenceSample: validation, and operations against plain-list references."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.keys import ITEMSIZE, STANDARD_KEYS, TORCH_NAMES, KeySpec, key_spec
from realhf.api.sample import DuplicateKeyError, SequenceSample, inverse_perm

torch.set_num_threads(1)


def build(groups, dtype="i64", trailing=()):
    """Sample whose element values are all different, with a second key of one value per
    sequence."""
    rows = sum(map(sum, groups))
    count = rows * int(np.prod(trailing, dtype=int))
    x = torch.arange(count).to(getattr(torch, TORCH_NAMES[dtype])).reshape(rows, *trailing)
    score = torch.arange(sum(map(len, groups)), dtype=torch.float32)
    lengths = {"x": groups, "score": [[1] * len(group) for group in groups]}
    ids = [f"s{i}" for i in range(len(groups))]
    return SequenceSample.from_tensors(ids, {"x": x, "score": score}, lengths, {"tag": ids})


def as_lists(sample):
    """Per sample: id, rows of every sequence of x, metadata; read without the code under test."""
    flat = sample["x"].tolist()
    out = []
    row = 0
    for sample_id, group, tag in zip(
        sample.ids, sample.seqlens["x"], sample.metadata["tag"], strict=True
    ):
        sequences = []
        for length in group:
            sequences.append(flat[row : row + length])
            row += length
        out.append((sample_id, sequences, tag))
    return out


groups = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=8)


@pytest.mark.slow
@given(groups, st.sampled_from(sorted(ITEMSIZE)), st.sampled_from([(), (2,), (0,), (1, 3)]))
@settings(max_examples=80, deadline=None)
def test_cutting_then_gathering_restores_every_bit(lengths, dtype, trailing):
    sample = build(lengths, dtype, trailing)
    assert SequenceSample.gather([sample.select_ids([i]) for i in range(len(sample))]) == sample


@pytest.mark.slow
@given(groups, st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_reorder_and_select_move_whole_samples(lengths, random):
    sample = build(lengths)
    before = as_lists(sample)
    perm = list(range(len(sample)))
    random.shuffle(perm)
    moved = sample.reorder(perm)
    assert as_lists(moved) == [before[i] for i in perm]
    assert moved.reorder(inverse_perm(perm)) == sample
    chosen = perm[: random.randint(1, len(perm))]
    assert as_lists(sample.select_ids(chosen)) == [before[i] for i in chosen]


def test_index_arrays():
    sample = build([[2, 0], [3]])
    assert sample.group_index("x").tolist() == [0, 0, 1]
    assert sample.n_tokens("x") == 5
    assert sample.sample_tokens("x").tolist() == [2, 3]


def test_update_adds_keys_and_refuses_repeats():
    sample = build([[1], [2]])
    scores = sample.select(["score"])
    tokens = sample.select(["x"])
    assert tokens.update(scores) == sample
    with pytest.raises(DuplicateKeyError, match="score"):
        sample.update(scores)
    with pytest.raises(ValueError, match="same order"):
        tokens.update(scores.reorder([1, 0]))
    with pytest.raises(ValueError, match="metadata-only"):
        tokens.update(scores.meta())


def test_remap_keys_is_injective():
    sample = build([[1]])
    assert sample.remap_keys({"x": "y"}).keys == {"y", "score"}
    assert sample.remap_keys({"x": "score", "score": "x"})["score"].dtype == torch.int64
    with pytest.raises(DuplicateKeyError):
        sample.remap_keys({"x": "score"})
    with pytest.raises(KeyError, match="'z'"):
        sample.remap_keys({"z": "y"})


def test_gather_checks_its_parts():
    a, b = (build([[1], [2]]).select_ids([i]) for i in range(2))
    with pytest.raises(ValueError, match="'s0' occurs twice"):
        SequenceSample.gather([a, a])
    with pytest.raises(ValueError, match="disagree in keys"):
        SequenceSample.gather([a, b.select(["x"])])
    bare = SequenceSample.from_tensors(b.ids, b.data or {}, b.seqlens)
    with pytest.raises(ValueError, match="metadata"):
        SequenceSample.gather([a, bare])
    assert SequenceSample.gather([a, bare], allow_metadata_loss=True).metadata == {}
    assert SequenceSample.gather([a, b], keys=["x"]).keys == {"x"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": []}, "at least one id"),
        ({"ids": ["a", "a"]}, "'a' occurs twice"),
        ({"ids": ["a", "b" * 257]}, "longer than 256"),
        ({"seqlens": {"x": [[2]]}}, "1 length lists for 2 ids"),
        ({"seqlens": {"x": [[2], [-1]]}}, ">= 0"),
        ({"seqlens": {"x": [[2], [2]]}}, "lengths say"),
        ({"seqlens": {"y": [[2], [1]]}}, "differ"),
        ({"dtypes": {"x": "f32"}}, "declared f32"),
        ({"dtypes": {"x": "c64"}}, "unknown dtype tag"),
        ({"trailing_shapes": {"x": (-1,)}}, "negative trailing"),
        ({"metadata": {"m": [1]}}, "1 items for 2 ids"),
        ({"metadata": {"m": [[], 1]}}, "scalars only"),
    ],
)
def test_constructor_refuses_contradictions(change, message):
    good = {
        "ids": ["a", "b"],
        "seqlens": {"x": [[2], [1]]},
        "dtypes": {"x": "i64"},
        "trailing_shapes": {"x": ()},
        "data": {"x": torch.arange(3)},
    }
    SequenceSample(**good)
    with pytest.raises(ValueError, match=message):
        SequenceSample(**{**good, **change})


def test_unsupported_tensor_dtype():
    with pytest.raises(ValueError, match="complex64"):
        SequenceSample.from_tensors(
            ["a"], {"x": torch.zeros(1, dtype=torch.complex64)}, {"x": [[1]]}
        )


def test_equality_compares_bits():
    def one(value):
        return SequenceSample.from_tensors(["a"], {"x": torch.tensor([value])}, {"x": [[1]]})

    assert one(float("nan")) == one(float("nan"))
    assert one(0.0) != one(-0.0)
    assert one(1.0) != one(1.0).meta()


def test_annotations_replace_those_of_their_name_or_all():
    columns = {"m": [1, 2], "n": [3, 4]}
    sample = SequenceSample.from_tensors(
        ["a", "b"], {"x": torch.arange(3)}, {"x": [[1], [2]]}, columns
    )
    added = sample.annotated({"n": ["u", "v"], "o": [None, True]})
    assert added.metadata == {"m": [1, 2], "n": ["u", "v"], "o": [None, True]}
    assert sample.annotated({"o": [5, 6]}, keep=False).metadata == {"o": [5, 6]}
    assert sample.metadata == {"m": [1, 2], "n": [3, 4]} and torch.equal(added["x"], sample["x"])
    with pytest.raises(ValueError, match="1 items for 2 ids"):
        sample.annotated({"o": [1]})
    with pytest.raises(ValueError, match="scalars only"):
        sample.annotated({"o": [1, [2]]})


def test_keys_that_share_their_lengths_go_on_sharing():
    lengths = SequenceSample.from_tensors(["a"], {"x": torch.arange(3)}, {"x": [[1, 2]]}).lengths(
        "x"
    )
    tensors = {"x": torch.arange(3), "y": torch.arange(3.0)}
    parts = [
        SequenceSample.from_lengths(
            [i],
            dict.fromkeys("xy", lengths),
            {"x": "i64", "y": "f32"},
            {"x": (), "y": ()},
            tensors,
            {},
        )
        for i in "abc"
    ]
    whole = SequenceSample.gather(parts)
    assert whole.lengths("x") is whole.lengths("y") and whole.lengths("x").nested() == [[1, 2]] * 3
    chosen = whole.select_ids([2, 0])
    assert chosen.lengths("x") is chosen.lengths("y") and chosen == SequenceSample.gather(
        [parts[2], parts[0]]
    )


@pytest.mark.slow
def test_import_leaves_torch_alone():
    code = "import sys, realhf.api.sample, realhf.api.keys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_keys_have_a_known_dtype_and_rule_and_one_meaning():
    assert [key_spec(spec.name) for spec in STANDARD_KEYS] == list(STANDARD_KEYS)
    with pytest.raises(KeyError, match="not registered"):
        key_spec("step_mark")
    for dtype, rule in (("c64", "L"), ("f32", "L+1")):
        with pytest.raises(ValueError, match="unknown"):
            KeySpec("k", dtype, rule)
