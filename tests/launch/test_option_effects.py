"""Every option of every experiment does something that is seen, or is listed with where it acts."""

import re
from pathlib import Path

import pytest

from realhf.launch.compose import experiment_names
from tests.launch.option_effects import (
    AT_WORK,
    DEEP,
    LISTED,
    MESSAGE,
    NOTHING,
    PLAN,
    Table,
    base_of,
    entry,
    line_of,
    sight_of,
)
from tests.launch.options_elsewhere import ELSEWHERE, TOLD, UNSHOWN

ROOT = Path(__file__).parents[2]
MAX_UNSHOWN = 40
"""So many options may be told to workers without a test that gives them another value; fewer is
better."""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return Table(tmp_path_factory.mktemp("parts"))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("experiment", experiment_names())
def test_every_option_shows_or_is_listed(experiment, table, tmp_path):
    with (tmp_path / "options.md").open("w", encoding="utf-8") as file:
        found = []
        for effect in table.effects(experiment):
            found.append(effect)
            file.write(line_of(effect) + "\n")
            file.flush()
    assert [effect.option for effect in found if effect.kind == NOTHING] == []
    kinds = [effect.kind for effect in found]
    assert len(found) > 100 and kinds.count(MESSAGE) > 20 and kinds.count(LISTED) > 10
    if experiment in AT_WORK:
        assert [
            effect.option
            for effect in found
            if effect.kind == PLAN and not entry(TOLD, effect.option)
        ] == []
        assert sum(kinds.count(kind) for kind in DEEP) > 20


@pytest.mark.nightly
@pytest.mark.slow
def test_a_plan_does_the_same_twice(table):
    """What the table takes for an effect is none of chance: equal plans give equal results, to the
    bit."""
    spec = sight_of(base_of("ppo")).spec
    assert table.parts.difference(spec, sight_of(base_of("grpo")).spec) is not None
    assert table.parts.again(spec)


@pytest.mark.parametrize("option", [*ELSEWHERE, *TOLD])
def test_a_listed_option_is_named_by_its_test(option):
    """The test that is said to show an option exists, and has its name; or the list says that none
    does."""
    reason = ELSEWHERE.get(option) or TOLD[option]
    files = re.findall(r"tests/[\w/]+(?:\.py)?", reason)
    assert files or UNSHOWN in reason or "nothing is written" in reason
    last = option.rstrip(".").rpartition(".")[2]
    for file in files:
        path = ROOT / file
        texts = [
            each.read_text(encoding="utf-8")
            for each in ([path] if path.is_file() else path.rglob("test_*.py"))
        ]
        assert any(last in text for text in texts), (option, file)


def test_few_options_are_shown_by_nothing():
    assert sum(UNSHOWN in reason for reason in (*ELSEWHERE.values(), *TOLD.values())) <= MAX_UNSHOWN
