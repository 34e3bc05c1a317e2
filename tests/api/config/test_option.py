"""Options at their fields: what they refuse, what they are called, and that every one says what it
means."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from experiments.policy_gradient import config_class
from realhf.api.config import ExperimentConfig
from realhf.api.option import Option, option, problems, section, sections, walk


@dataclass
class Inner:
    """A section in a section."""

    share: float = option(0.5, "A share of the whole.", above=0, at_most=1)
    words: list[str] = option(["a"], "These words are taken.", choices=("a", "b"))
    medium: str = option("a", "The way.", choices=("a", "b"), retired={"c": "b does the same"})
    loss: str | None = option(
        None, "This loss is used.", registry="losses", unused_because="there is no loss"
    )
    low: int = option(0, "The lower end.")
    high: int = option(9, "The upper end.")

    def problems(self, name: str) -> Iterator[str]:
        """Ends in order."""
        if self.low > self.high:
            yield f"{name}.low={self.low}: above {name}.high={self.high}"


@dataclass
class Outer:
    """A configuration."""

    count: int = option(1, "So many.", at_least=1)
    port: int = option(0, "A port.", at_least=0, at_most=65535)
    bare: int = -3
    inner: Inner = section(Inner, unused_because="nobody looks inside", high=7)


def said(**changed: object) -> list[str]:
    """What is wrong with a configuration whose section ``inner`` has these values."""
    return [*problems(Outer(inner=Inner(**changed)), known=lambda registry: [registry, "ppo"])]  # type: ignore[arg-type]


def test_defaults_are_right_and_a_section_may_change_them():
    assert said() == []
    assert Outer().inner.high == 7 and Outer().inner.low == 0


def test_a_list_is_not_shared_between_configurations():
    Outer().inner.words.append("b")
    assert Outer().inner.words == ["a"]


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"share": 0.0}, "inner.share=0.0: must be positive and at most 1. A share of the whole."),
        (
            {"share": float("nan")},
            "inner.share=nan: must be positive and at most 1. A share of the whole.",
        ),
        ({"words": ["a", "c"]}, "inner.words=c: unknown (known: a, b)"),
        ({"medium": "c"}, "inner.medium=c: is no longer supported; b does the same (known: a, b)"),
        ({"loss": "pop"}, "inner.loss=pop: unknown (known: losses, ppo); did you mean 'ppo'?"),
        ({"low": 8, "high": 7}, "inner.low=8: above inner.high=7"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_option(changed: dict[str, object], line: str):
    assert said(**changed) == [line]


def test_no_bound_holds_an_infinite_number():
    """A lower bound alone let it through to the run."""
    assert [*problems(Outer(count=math.inf))] == [
        "count=inf: must be at least 1 and finite. So many."
    ]  # type: ignore[arg-type]
    assert Option(above=0).is_within_bounds(10**400) and not Option(above=0).is_within_bounds(
        math.inf
    )
    assert Option().is_within_bounds(math.inf) and not Option(at_most=1).is_within_bounds(-math.inf)


def test_a_name_of_a_registry_and_no_value_are_right():
    assert said(loss="ppo") == said(loss=None) == []
    assert [*problems(Inner(loss="anything"))] == [], "nobody knows the registry"


def test_the_options_of_a_section_are_not_judged_together_while_one_of_them_is_wrong():
    assert said(low=8, high=7, share=2.0) == [
        "inner.share=2.0: must be positive and at most 1. A share of the whole."
    ]


def test_all_that_is_wrong_is_told_under_its_dotted_name():
    wrong = [*problems(Outer(count=0, port=-1), "top")]
    assert [line.partition("=")[0] for line in wrong] == ["top.count", "top.port"]
    assert "must be between 0 and 65535" in wrong[1]


def test_the_walk_goes_through_sections_and_reasons_are_those_of_the_field_or_the_section():
    found = {name: (about, value) for name, about, value in walk(Outer())}
    inner = ["inner.share", "inner.words", "inner.medium", "inner.loss", "inner.low", "inner.high"]
    assert [*found] == ["count", "port", "bare", *inner]
    assert found["bare"] == (Option(on_resume="refuses"), -3)
    assert (
        found["inner.low"][0].unused_because == "nobody looks inside"
        and found["inner.loss"][0].unused_because == "there is no loss"
    )
    assert [name for name, _ in sections(Outer())] == ["", "inner"]


@pytest.mark.parametrize("kind", [ExperimentConfig, config_class("aws")])
def test_every_option_of_the_house_has_a_sentence_and_every_section_a_docstring(
    kind: type[ExperimentConfig],
):
    found = [*walk(kind())]
    assert len(found) > 80
    for name, about, _ in found:
        assert len(about.about.split()) >= 3 and about.about.endswith("."), name
    for name, part in sections(kind()):
        assert not (type(part).__doc__ or "").startswith(f"{type(part).__name__}("), (
            f"{name} has no docstring"
        )
