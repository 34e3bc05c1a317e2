"""``check --mutate``: a reward that can be bought is named with the actions, one that pays for a state is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realhf.env.__main__ import main
from realhf.env.check.checker import Checker
from realhf.env.check.command import Report
from realhf.env.check.report import Order

BUYABLE = Path(__file__).parent / "buyable.py"
SHIPPED = ("files", "sql")


class Mutated(Report):
    """What a check with mutants found in this process."""

    def __init__(self, reference: str, most: int = 120, seed: int = 0) -> None:
        super().__init__(reference)
        Checker(Order(reference, mutants=most, seed=seed), lambda *event: self.hear(event)).run()
        self.outcome = self.about.get("mutants", {})
        self.outcomes = [outcome for _, outcome, _ in self.verdicts[1:]]

    @property
    def lines(self) -> list[str]:
        """What was found: whether it is a fault, and the sentence."""
        return [f"{'fault' if found.is_fault else 'note'} {found.what}" for found in self.findings]


def test_what_leaves_another_state_and_is_paid_is_a_fault_with_its_actions() -> None:
    """Moving the other box, too, is paid in full; each such mutant is a line of its own, by task."""
    found = Mutated(f"{BUYABLE}:Bought")
    assert found.outcome["described"] and {*found.outcome["tasks"]} == {"tea-train", "salt-train"}
    listed = {(each["task"], *each["actions"]) for each in found.outcome["listed"]}
    assert ("tea-train", "move(box='salt', place='left')", "move(box='tea', place='left')") in listed
    assert all(line.startswith("fault 1 is paid though another state is left (") for line in found.lines)
    assert len(found.lines) == len(listed) == sum(each["unequal"] for each in found.outcome["tasks"].values())
    assert {*found.outcomes} == {"fault"}


def test_a_reward_for_the_whole_state_is_bought_by_nothing() -> None:
    """Though mutants that come to the same are paid: a call that is refused before, the same call again."""
    found = Mutated(f"{BUYABLE}:Paid")
    assert not found.lines and not found.outcome["listed"]
    assert all(each["mutants"] > 10 and each["paid"] > 0 for each in found.outcome["tasks"].values())
    assert found.outcomes == ["ok", "ok"]


def test_without_a_described_state_everything_paid_is_listed_for_reading() -> None:
    """These are notes and no faults, alike ones in a line; the last one says how a state is described."""
    found = Mutated(f"{BUYABLE}:Undescribed")
    assert not found.outcome["described"] and len(found.outcome["listed"]) > len(found.lines) > 3
    assert all(line.startswith("note ") for line in found.lines)
    assert found.lines[-1].startswith("note it does not describe the state that an episode leaves")
    assert {*found.outcomes} == {"read"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Unscripted", "fault it has no scripted solver, so there is nothing to change"),
        ("Refusing", "fault a demonstration is not solved and earns 0, so its mutants say nothing"),
        ("Dying", "fault step raised ZeroDivisionError: "),
    ],
)
def test_what_keeps_mutants_from_being_played_is_one_fault(name: str, says: str) -> None:
    found = Mutated(f"{BUYABLE}:{name}", most=60)
    assert {line[: len(says)] for line in found.lines} == {says}


def test_a_seed_draws_the_same_mutants_and_another_one_others() -> None:
    one, again, other = (Mutated(f"{BUYABLE}:Bought", 80, seed).outcome["listed"] for seed in (0, 0, 1))
    assert one == again != other


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_cannot_be_bought(name: str) -> None:
    """A sample of a few mutants of every template; the whole is a command on the page of the environments."""
    found = Mutated(name, most=110)
    assert found.outcome["described"] and not found.lines
    assert sum(each["mutants"] for each in found.outcome["tasks"].values()) > 60


def test_the_command_ends_with_1_for_a_reward_that_is_bought_and_prints_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", f"{BUYABLE}:Bought", "--mutate", "--most", "80", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["mutants"]["listed"] and "move(" in found["findings"][0]["line"]
