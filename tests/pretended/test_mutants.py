"""The rules that make mutants, and what the program says about them."""

from __future__ import annotations

import ast
import builtins
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretended import mutants
from tests.pretended.mutation import (
    DETACH,
    DEVICE,
    FLOAT,
    GRAD,
    KEPT,
    MODULES,
    RELEASE,
    ROOT,
    WAIT,
    WITHOUT_EFFECT,
    Instrumenter,
    Place,
    Switch,
    find_places,
)

CODE = """
import torch
from torch import Tensor

@torch.no_grad()
def total(x: Tensor, device: torch.device) -> Tensor:
    mask = torch.ones(2, device=device)
    return (x.to(device) @ x.detach()).sum() + mask.sum()

def clear(p: torch.nn.Parameter) -> bool:
    try:
        p.grad = None
    finally:
        return torch.is_grad_enabled()

def losses(parts):
    for part in parts:
        loss = part * 2
    return None
"""


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Switch:
    switch = Switch()
    monkeypatch.setattr(builtins, "__mutant__", switch, raising=False)
    return switch


def compiled(places: list[Place]) -> dict[str, Any]:
    """The functions of ``CODE`` with all their mutants."""
    names: dict[str, Any] = {}
    tree = Instrumenter("code.py", places).visit(ast.parse(CODE))
    exec(compile(ast.fix_missing_locations(tree), "code.py", "exec"), names)
    return names


def test_each_rule_has_its_places() -> None:
    places = find_places([("code.py", CODE)])
    assert Counter(place.rule for place in places) == {
        DEVICE: 2, FLOAT: 2, GRAD: 1, DETACH: 1, RELEASE: 1, KEPT: 2, WAIT: 2,
    }  # fmt: skip
    (move,) = [place for place in places if place.code == "x.to(device)"]
    assert (move.line, move.function, 6 in move.lines) == (8, "total", True)
    (decorator,) = [place for place in places if place.rule == GRAD]
    assert (decorator.line, decorator.function) == (5, "total")
    assert len({place.key for place in places}) == len(places)


def test_there_are_enough_mutants_of_loss_engine_and_transfer() -> None:
    files = [f"{name.replace('.', '/')}.py" for name in MODULES]
    places = find_places([(file, (ROOT / file).read_text()) for file in files])
    assert {place.file for place in places} == {*files}
    rules = Counter(place.rule for place in places)
    assert rules.keys() == WITHOUT_EFFECT.keys() and rules.total() >= 60, rules


def test_without_an_active_mutant_the_code_is_the_same(switch: Switch) -> None:
    names = compiled([])
    x = torch.ones(2, 2, requires_grad=True)
    assert names["total"](x, torch.device("cpu")).item() == 10 and switch.reached
    x.grad = torch.ones(2, 2)
    assert names["clear"](x) and x.grad is None
    assert not names["total"](x, torch.device("cpu")).requires_grad


def test_the_active_mutant_is_the_only_one(switch: Switch) -> None:
    places: list[Place] = []
    names = compiled(places)
    x = torch.ones(2, 2, requires_grad=True)
    x.grad = torch.ones(2, 2)
    switch.active = next(i for i, place in enumerate(places) if place.rule == RELEASE)
    names["clear"](x)
    assert x.grad is not None
    switch.active = next(i for i, place in enumerate(places) if place.rule == GRAD)
    result = names["total"](x, torch.device("cpu"))
    assert result.requires_grad and switch.effective[switch.active]
    with torch.no_grad():
        assert not names["total"](x, torch.device("cpu")).requires_grad


FOUND = Place(DEVICE, "realhf/a.py", 12, 4, "f", range(10, 20), "x.to(device)")


@pytest.mark.parametrize(
    ("message", "innermost", "result", "where"),
    [
        ("mixed, at realhf/a.py:15", "", mutants.CAUGHT, "function"),
        ("mixed, at realhf/b.py:15", "realhf/a.py:40", mutants.CAUGHT, "file"),
        ("mixed, at realhf/b.py:15", "", mutants.CAUGHT, "elsewhere"),
        ("assert 3 == 4", "", mutants.UNNAMED, ""),
    ],
)
def test_only_a_failure_that_names_a_line_counts(
    message: str, innermost: str, result: str, where: str
) -> None:
    outcome = mutants._judge(FOUND, [("test", message, innermost)], 1.0, 1)
    assert (outcome.result, outcome.where) == (result, where)
    assert mutants._judge(FOUND, [], 1.0, 1).result == mutants.SURVIVES


def test_a_record_of_other_code_or_of_a_cut_off_line_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    outcome = {"result": mutants.CAUGHT, "where": "file"}
    lines = [json.dumps({"code": code, "place": code, "outcome": outcome}) for code in ("a", "b")]
    path.write_text("\n".join([*lines, '{"code": "a", "pl']))
    assert [*mutants._read_record(path, "a")[1]] == ["a"]
    path.write_text("\n".join(['{"code": "a"}', *lines]))
    with pytest.raises(ValueError, match=r"record\.jsonl, line 1"):
        mutants._read_record(path, "a")


def test_the_quickest_tests_are_chosen() -> None:
    survey = mutants.Survey({"a": 3.0, "b": 1.0, "c": 2.0}, {}, {"place": ["a", "b", "c"]})
    assert mutants.choose_tests(survey, "place", 6, 4.0) == ["b", "c"]
    assert mutants.choose_tests(survey, "place", 6, 0.1) == ["b"]
    assert mutants.choose_tests(survey, "place", 1, 9.0) == ["b"]


def test_each_reason_is_that_of_a_place() -> None:
    files = [f"{name.replace('.', '/')}.py" for name in MODULES]
    places = find_places([(file, (ROOT / file).read_text()) for file in files])
    known = {f"{place.rule} {place.file}" for place in places}
    known |= {f"{place.rule} {place.file} {place.function}" for place in places}
    assert not mutants.REASONS.keys() - known
