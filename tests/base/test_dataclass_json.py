"""Dataclasses to plain values and back; names of artifacts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from realhf.base.dataclass_json import from_json_value, to_json_value
from realhf.base.files import content_key
from realhf.base.plugin import load_plugin


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
