"""Texts, processes, parts, plain values and sizes: what the small modules of base promise."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from realhf.base import loopback as free_ports
from realhf.base.dataclass_json import from_json_value, to_json_value
from realhf.base.files import content_key
from realhf.base.hf_config import (
    estimate_size,
    model_size,
    scoring_memory,
    trainer_memory,
    training_memory,
    weight_bytes,
)
from realhf.base.loopback import free_port
from realhf.base.partition import balanced_parts, balanced_parts_near_homes
from realhf.base.plugin import load_plugin
from realhf.base.text import escape_controls, quote_states, suggest_names


def test_control_characters_are_shown_and_not_obeyed():
    """A title, a cleared screen, text from right to left, and what an encoding did not know."""
    said = "a\tb\n\x1b]0;title\x07\x1b[2J \u202eod\r\x7f \ud800 é 漢"
    assert escape_controls(said) == "a\tb\n␛]0;title␇␛[2J \ufffdod␍\ufffd \ufffd é 漢"


def test_spaces_of_other_scripts_are_spaces():
    said = "東京\u3000大阪 10\u00a0000"
    assert escape_controls(said) == said
    assert escape_controls("a\u2028b\u2029") == "a\ufffdb\ufffd"  # they end a line


def test_colours_may_be_left_out():
    said = "\x1b[1;31mred\x1b[0m \x1b[2J"
    assert escape_controls(said, colours=False) == "red ␛[2J"
    assert escape_controls(said) == "␛[1;31mred␛[0m ␛[2J"


def test_a_close_spelling_is_offered_and_the_names_are_listed():
    assert (
        suggest_names("gree", ["green", "blue"]) == "; did you mean 'green'? (known: green, blue)"
    )
    assert suggest_names("zzz", []) == " (known: none)"


def test_a_long_list_is_cut_and_counted():
    said = suggest_names("zzz", [f"name{i}" for i in range(25)])
    assert "name19, and 5 more)" in said and "name20" not in said


def test_the_state_after_every_character():
    text = "a 'b\\' \"c\\\"'d\" e\\"
    states = [*quote_states(text)]
    assert "".join(char for char, _, _ in states) == text
    assert "".join(quote or "." for _, quote, _ in states) == "..'''.." + '"' * 6 + "...."
    assert states[-1] == ("\\", "", True)


@given(st.text(alphabet="ab '\"\\", max_size=20))
def test_open_quotes_and_escapes_are_those_that_a_shell_refuses(text):
    quote = ""
    escaped = False
    for _, quote, escaped in quote_states(text):  # noqa: B007
        pass
    try:
        shlex.split(text)
        whole = True
    except ValueError:
        whole = False
    assert whole == (not quote and not escaped)


PROCESS = """
import gc

usual = gc.get_threshold()
from realhf.base.process import collect_garbage_normally, collect_garbage_rarely

collect_garbage_rarely()
rare = gc.get_threshold()
assert all(now > before for now, before in zip(rare, usual, strict=True)), rare
frozen = gc.get_freeze_count()
collect_garbage_normally()
assert gc.get_threshold() == usual and gc.get_freeze_count() > frozen + 1000
circle = []
circle.append(circle)
del circle
assert gc.collect() >= 1
print("settled")
"""


def test_what_is_there_when_it_settles_is_left_out_and_what_comes_later_is_collected():
    """In a process of its own: the tests' own process collects rarely all the time."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("settled\n", "", 0)


def test_a_free_port_can_be_listened_at_and_is_not_one_of_those_that_the_kernel_gives_away():
    """Somebody else's connection had it a moment later, and the server did not come up."""
    for _ in range(20):
        port = free_port()
        assert port in free_ports._PORTS
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_that_is_taken_is_passed_over(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(free_ports, "_PORTS", [port])
        assert free_port() != port


COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=30)


@st.composite
def batches(draw):
    costs = draw(COSTS)
    count = draw(st.integers(1, 5))
    homes = draw(
        st.lists(st.none() | st.integers(0, count - 1), min_size=len(costs), max_size=len(costs))
    )
    return costs, homes, count


def largest(costs, parts):
    return max(sum(costs[i] for i in part) for part in parts)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(batches())
def test_every_item_is_in_one_part_and_no_part_is_larger_than_without_homes(batch):
    costs, homes, count = batch
    parts = balanced_parts_near_homes(costs, homes, count)
    assert len(parts) == count and sorted(i for part in parts for i in part) == list(
        range(len(costs))
    )
    assert parts == [sorted(part) for part in parts]
    if len(costs) >= count:
        plain = balanced_parts(costs, count)
        assert sorted(i for part in plain for i in part) == list(range(len(costs)))
        loads = [sum(costs[i] for i in part) for part in plain]
        assert max(loads) - min(loads) <= max(costs)
        assert all(parts) and largest(costs, parts) <= largest(costs, plain)


def test_items_stay_at_home_where_that_is_balanced():
    assert balanced_parts_near_homes([5, 4, 3, 2], [1, 0, 0, 1], 2) == [[1, 2], [0, 3]]
    assert balanced_parts_near_homes([5, 4, 3, 2], [None] * 4, 2) == [[0, 3], [1, 2]], (
        "nobody holds anything"
    )


def test_what_is_too_much_for_its_home_goes_elsewhere():
    parts = balanced_parts_near_homes([3] * 8, [0] * 6 + [1] * 2, 2)
    assert [len(part) for part in parts] == [4, 4] and parts[1][-2:] == [6, 7]


def test_parts_that_homes_would_unbalance_are_still_given_to_whom_most_of_them_is_at_home():
    costs = [9, 8, 7, 2]
    homes = [1, 0, 0, 1]
    parts = balanced_parts_near_homes(costs, homes, 2)
    assert largest(costs, parts) == largest(costs, balanced_parts(costs, 2))
    moved = sum(costs[i] for part, held in enumerate(parts) for i in held if homes[i] != part)
    assert moved <= 8


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    path: Path
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class Outer:
    inners: tuple[Inner, ...]
    by_name: Mapping[str, Inner]
    maybe: Inner | None = None
    free: Mapping[str, Any] = field(default_factory=dict)
    numbers: list[float] = field(default_factory=list)


def test_round_trip_through_json():
    inner = Inner(Path("/a/b"))
    value = Outer((inner,), {"x": inner}, inner, {"any": [1, None, "s"]}, [0.5])
    assert from_json_value(Outer, json.loads(json.dumps(to_json_value(value)))) == value
    assert from_json_value(Outer, to_json_value(Outer((), {}))) == Outer((), {})


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        to_json_value({"a": object()})


def test_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="Inner has no field 'color'; did you mean 'colour'"):
        from_json_value(Inner, {"path": "/a", "color": 1})
    with pytest.raises(TypeError, match="path"):
        from_json_value(Inner, {})


def test_content_keys_depend_on_options_and_on_bytes_of_files(tmp_path):
    file = tmp_path / "f"
    file.write_text("1")
    key = content_key({"a": 1, "b": 2}, [file])
    assert key == content_key({"b": 2, "a": 1}, [file]) and len(key) == 16
    assert key != content_key({"a": 1, "b": 3}, [file])
    file.write_text("2")
    assert key != content_key({"a": 1, "b": 2}, [file])


def test_a_plugin_is_imported_once_and_a_broken_one_can_be_tried_again(tmp_path):
    file = tmp_path / "plugin_under_test.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_plugin(file)
    file.write_text("value = []\n")
    assert load_plugin(file).value is load_plugin(file).value
    (other := tmp_path / "elsewhere" / file.name).parent.mkdir()
    other.write_text("value = {}\n")
    assert load_plugin(other).value == {} and load_plugin(file).value == []


SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 96, "tie_word_embeddings": False},
    "qwen3": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "tie_word_embeddings": True,
    },
    "mixtral": {"num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4},
    "gpt2": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_that_of_the_model(kind, tmp_path):
    config = AutoConfig.for_model(kind, **SMALL, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config)
    counted = sum(p.numel() for p in model.parameters())
    written = {**config.to_dict(), "tie_word_embeddings": config.tie_word_embeddings}
    assert estimate_size(written).parameters == pytest.approx(
        counted, rel=0.1 if kind == "gpt2" else 0.02
    )
    model.save_pretrained(tmp_path)
    found = model_size(str(tmp_path))
    assert found is not None and found.parameters == counted
    if kind in ("llama", "qwen3"):
        assert found.adapters(2) == estimate_size(written).adapters(2)
    (tmp_path / "model.safetensors").write_bytes(b"not a head")
    assert model_size(str(tmp_path)) == estimate_size(written)
    (tmp_path / "config.json").write_text("{}")
    assert model_size(str(tmp_path)) is None and model_size("owner/never-downloaded") is None


def test_a_trainer_holds_weights_gradients_and_moments():
    """By hand, in bytes for each parameter: fp32 4 + 4 + 8; bf16 2 with an fp32 copy of 4, + 4 +
    8."""
    size = estimate_size({**SMALL, "intermediate_size": 96, "tie_word_embeddings": True})
    n = size.parameters
    few = size.adapters(4)
    assert trainer_memory(size, "float32") == (held := type(trainer_memory(size, "float32")))(
        4 * n, 0, 4 * n, 8 * n
    )
    assert trainer_memory(size, "bfloat16", offload=True) == held(2 * n, 4 * n, 4 * n, 0)
    assert trainer_memory(size, "bfloat16", parts=2).first_update == 6 * n
    assert trainer_memory(size, "bfloat16", lora_rank=4) == held(
        2 * n + 4 * few, 0, 4 * few, 8 * few
    )
    assert weight_bytes(size, "bfloat16") == 2 * n
    plain, saved = (
        training_memory(size, "bfloat16", 1000, checkpointing=on) for on in (False, True)
    )
    assert plain.activations == 2 * 1000 * (3 * (8 * 64 + 4 * 96 + 2 * 64 + 3 * 64) + 3 * 64)
    assert saved.activations < plain.activations / 2 and plain.logits >= 2 * size.head
    critic = training_memory(size, "bfloat16", 1000, checkpointing=False, predicts_tokens=False)
    assert critic.logits == 0 < plain.activations <= critic.activations
    scored = scoring_memory(size, "bfloat16", 1000, gpu_bytes=80 << 30)
    assert scored.activations < saved.activations and scored.logits == 2 * 4000 * size.vocabulary
