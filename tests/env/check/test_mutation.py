"""``check --mutate``: what is changed, and that a reward that can be bought is named with the
actions."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from realhf.api.passport import Counts, read_passport
from realhf.env.__main__ import main
from realhf.env.check.checker import Checker
from realhf.env.check.command import Report
from realhf.env.check.mutation import Action, Mutants
from realhf.env.check.mutators import (
    ADDED,
    DOUBLED,
    EXACT_NAME,
    EXCHANGED,
    FIRST,
    LEFT_OUT,
    LEFT_OVER,
    NEIGHBOUR,
    REMOVED,
    REMOVED_AGAIN,
    REORDERED,
    Change,
    change_arguments,
    change_text,
    change_value,
    draw_changes,
    find_neighbours,
    insert_others,
    insert_variants,
    other_values,
    reorder,
    similar_names,
    split_words,
)
from realhf.env.check.report import Order
from realhf.env.check.scripts import schema_type


def test_actions_are_left_out_doubled_swapped_and_reversed() -> None:
    found = {(kind, value) for kind, _, value in reorder("abc")}
    assert found >= {(LEFT_OUT, ("a", "c")), (LEFT_OUT, ("b",)), (DOUBLED, ("a", "b", "b", "c"))}
    assert found >= {
        (REORDERED, ("b", "a", "c")),
        (REORDERED, ("c", "a", "b")),
        (REORDERED, ("c", "b", "a")),
    }
    assert ("a", "b", "c") not in {value for _, value in found}


def test_a_variant_stands_instead_of_an_action_before_it_and_behind_it() -> None:
    found = [
        *insert_variants("ab", lambda action: [Change("upper", "in capitals", action.upper())])
    ]
    assert [(kind, value) for kind, _, value in found] == [
        ("upper", ("A", "b")),
        ("upper, before", ("A", "a", "b")),
        ("upper, after", ("a", "A", "b")),
        ("upper", ("a", "B")),
        ("upper, before", ("a", "B", "b")),
        ("upper, after", ("a", "b", "B")),
    ]
    others = insert_others("ab", [Change(FIRST, "x", "x")])
    assert [value for _, _, value in others] == [("x", "a", "b"), ("a", "x", "b")]


def test_as_many_of_each_kind_are_drawn_and_the_same_by_a_seed() -> None:
    changes = [
        Change(kind, "", number)
        for kind, count in (("many", 90), ("few", 3))
        for number in range(count)
    ]
    few = draw_changes(changes, 8, random.Random(3))
    assert sorted(change.kind for change in few) == ["few"] * 3 + ["many"] * 5
    assert (
        few
        == draw_changes(changes, 8, random.Random(3))
        != draw_changes(changes, 8, random.Random(4))
    )
    assert len(draw_changes(changes, 1000, random.Random(0))) == 93


def test_arguments_are_removed_added_exchanged_and_become_a_neighbours() -> None:
    given = {"source": "a.txt", "target": "dir/b.txt"}
    properties = {
        "source": {"type": "string"},
        "target": {"type": "string"},
        "force": {"type": "boolean"},
    }
    found = [*change_arguments(given, properties, ["a.txt", "c.txt", "Move"])]
    by_kind = {kind: [value for each, _, value in found if each == kind] for kind, _, _ in found}
    assert by_kind[REMOVED] == [{"target": "dir/b.txt"}, {"source": "a.txt"}]
    assert by_kind[EXCHANGED] == [{"source": "dir/b.txt", "target": "a.txt"}]
    assert by_kind[ADDED] == [{**given, "force": True}, {**given, "force": False}]
    assert {"source": "c.txt", "target": "dir/b.txt"} in by_kind[NEIGHBOUR]
    assert given not in [value for _, _, value in found]


def test_values_of_every_kind_become_others_of_their_kind() -> None:
    def others(value: object, **schema: object) -> list[object]:
        return [change.value for change in change_value(value, schema, ["17"])]

    assert others(True) == [False]
    assert {0, 1, 5, 7, 12, -6, 17, 9} <= {*others(6, maximum=9)} and 6 not in others(6)
    assert {"off", "", "on2"} <= {*others("on", enum=["on", "off"])}
    assert (
        [] in others([1, 2])
        and [2, 1] in others([1, 2])
        and [1, 2, 1, 2] in others([1, 2])
        and [1, 3] in others([1, 2])
    )
    assert {} in others({"a": 1}) and {"a": 2} in others({"a": 1})


def test_a_neighbour_has_the_same_shape_where_there_is_one() -> None:
    words = split_words(["Move a-b.txt to the folder c. There is d-e.txt, too; 12 of 30."])
    assert words[:3] == ["Move", "a-b.txt", "to"] and "30" in words
    assert find_neighbours("a-b.txt", words) == ["d-e.txt"] and find_neighbours("12", words) == [
        "30"
    ]
    assert find_neighbours("x/y", ["Move"]) == ["Move"]


def test_a_text_loses_words_and_its_end_and_gets_others() -> None:
    text = "UPDATE t SET n=n+2 WHERE name='a-b'"
    found = [change.value for change in change_text(text, ["c-d", "7"])]
    wanted = {
        "UPDATE t SET n=n+2",
        "UPDATE t SET n=n-2 WHERE name='a-b'",
        "UPDATE t SET n=n+4 WHERE name='a-b'",
        "UPDATE t SET n=n+2 WHERE name='c-d'",
        "UPDATE t SET n=n+2 WHERE name<>'a-b'",
        "UPDATE t SET n=n+ WHERE name='a-b'",
        f"{text}\n{text}",
        f"not {text}",
    }
    assert wanted <= {*found} and text not in found
    assert [*change_text("", ["x"])]  # An empty text is said twice and denied; nothing fails.


def test_a_name_that_is_nearly_right_is_another_name_each_time() -> None:
    near = similar_names("tea")
    assert {
        "TEA",
        " tea",
        "tea ",
        "my-tea",
        "tea-copy",
        "tea2",
        "own/tea",
        "t\u0435\u0430",
        "\uff54ea",
    } <= {*near}
    assert len(near) == len({*near}) and "tea" not in near


def test_other_values_mean_something_else_and_fit_the_schema() -> None:
    assert other_values("a", {"enum": ["a", "b", "c"]}) == ["b", "c"]
    assert other_values(None, {"type": "boolean"}) == [True, False] and other_values(True, {}) == [
        False
    ]
    assert (
        other_values(3, {"type": "integer"}) == [4, 5, 10]
        and len(other_values(None, {"type": "string"})) == 2
    )
    assert not other_values(None, {"type": "object"})


def test_a_name_in_quotes_of_a_text_is_written_nearly_right_where_states_are_compared() -> None:
    actions = [Action("DELETE FROM t WHERE name='ab'")]
    found = [
        each
        for each in Mutants(actions, (), ["t"], random.Random(0), has_view=True)
        if each.kind == EXACT_NAME
    ]
    assert "DELETE FROM t WHERE name='ab '" in {value[0].content for _, _, value in found}
    assert not [
        each for each in Mutants(actions, (), ["t"], random.Random(0)) if each.kind == EXACT_NAME
    ]


BUYABLE = Path(__file__).parent / "buyable.py"
EDGES = Path(__file__).parent / "edges.py"
SHIPPED = ("files", "sql")


class Mutated(Report):
    """What a check with mutants found in this process."""

    def __init__(self, reference: str, most: int = 120, seed: int = 0) -> None:
        super().__init__(reference)
        Checker(
            Order(reference, mutants=most, seed=seed), lambda *event: self.record_event(event)
        ).run()
        self.outcome = self.about.get("mutants", {})
        self.outcomes = [outcome for _, outcome, _ in self.verdicts[1:]]

    @property
    def lines(self) -> list[str]:
        """What was found: whether it is a fault, and the sentence."""
        return [f"{'fault' if found.is_fault else 'note'} {found.what}" for found in self.findings]


@pytest.mark.slow
def test_what_leaves_another_state_and_is_paid_is_a_fault_with_its_actions() -> None:
    """Moving the other box, too, is paid in full; each such mutant is a line of its own, by
    task."""
    found = Mutated(f"{BUYABLE}:Bought", most=240)
    assert found.outcome["described"] and {*found.outcome["tasks"]} == {"tea-train", "salt-train"}
    listed = {(each["task"], *each["actions"]) for each in found.outcome["listed"]}
    assert (
        "tea-train",
        "move(box='salt', place='left')",
        "move(box='tea', place='left')",
    ) in listed
    assert all(
        line.startswith("fault a reward of 1 though another state is left (")
        for line in found.lines
    )
    assert (
        len(found.lines)
        == len(listed)
        == sum(each["unequal"] for each in found.outcome["tasks"].values())
    )
    assert {*found.outcomes} == {"fault"}


@pytest.mark.slow
def test_a_reward_for_the_whole_state_is_bought_by_nothing() -> None:
    """Though mutants that come to the same are paid: a call that is refused before, the same call
    again."""
    found = Mutated(f"{BUYABLE}:Paid")
    assert not found.lines and not found.outcome["listed"]
    assert all(
        each["mutants"] > 10 and each["paid"] > 0 for each in found.outcome["tasks"].values()
    )
    assert found.outcomes == ["ok", "ok"]


@pytest.mark.slow
def test_without_a_described_state_everything_paid_is_listed_for_reading() -> None:
    """These are notes and no faults, alike ones in a line; the last one says how a state is
    described."""
    found = Mutated(f"{BUYABLE}:Undescribed")
    assert not found.outcome["described"] and len(found.outcome["listed"]) > len(found.lines) > 3
    assert all(line.startswith("note ") for line in found.lines)
    assert found.lines[-1].startswith("note it does not describe the state that an episode leaves")
    assert {*found.outcomes} == {"read"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Unscripted", "fault it has no scripted solver, so there is nothing to change"),
        (
            "Refusing",
            "fault a demonstration is not solved and earns 0, so its mutants prove nothing",
        ),
        ("Dying", "fault step raised ZeroDivisionError: "),
    ],
)
def test_what_keeps_mutants_from_being_played_is_one_fault(name: str, says: str) -> None:
    found = Mutated(f"{BUYABLE}:{name}", most=60)
    assert {line[: len(says)] for line in found.lines} == {says}


@pytest.mark.slow
def test_a_seed_draws_the_same_mutants_and_another_one_others() -> None:
    one, again, other = (
        Mutated(f"{BUYABLE}:Bought", 80, seed).outcome["listed"] for seed in (0, 0, 1)
    )
    assert one == again != other


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_cannot_be_bought(name: str) -> None:
    """A sample of a few mutants of every template; the whole is a command on the page of the
    environments."""
    found = Mutated(name, most=110)
    assert found.outcome["described"] and not found.lines
    assert sum(each["mutants"] for each in found.outcome["tasks"].values()) > 60


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Scratch", LEFT_OVER),
        ("OwnThings", LEFT_OVER),
        ("Folders", EXACT_NAME),
        ("Prefixed", EXACT_NAME),
        ("Folded", EXACT_NAME),
        ("Stripped", EXACT_NAME),
    ],
)
def test_a_reward_that_leaks_at_an_edge_is_found_by_the_mutants_of_that_edge(
    name: str, kind: str
) -> None:
    found = Mutated(f"{EDGES}:{name}", most=400)
    assert kind in {each["change"].partition(":")[0] for each in found.outcome["listed"]}
    assert {*found.outcomes} == {"fault"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "argument"), [("Unlabelled", "label"), ("AnyWidth", "width")])
def test_an_argument_whose_value_shows_nowhere_is_to_be_read_once_for_each_template(
    name: str, argument: str
) -> None:
    found = Mutated(f"{EDGES}:{name}", most=200)
    assert {*found.outcomes} == {"read"} and len(found.lines) == 2
    for template, line in zip(("tea-train", "salt-train"), found.lines, strict=True):
        says = (
            f"the value of {argument} of create_box does not appear in the view, so a "
            f"wrong value cannot be recognised"
        )
        assert line == f"note {says} ({template})"
        assert {"template": template, "tool": "create_box", "argument": argument} in found.outcome[
            "members"
        ]
        assert found.outcome["tasks"][template]["members"] == 1


@pytest.mark.slow
def test_a_reward_whose_edges_are_closed_stays_clean_and_pays_for_what_is_removed_again() -> None:
    found = Mutated(f"{EDGES}:Shelf", most=240)
    assert not found.lines and not found.outcome["members"] and found.outcomes == ["ok", "ok"]
    assert found.outcome["kinds"][LEFT_OVER]["wrong"] > 10
    removed = found.outcome["kinds"][REMOVED_AGAIN]
    assert removed["right"] > 10 and removed["refused"] == 0


@pytest.mark.slow
def test_who_is_not_paid_for_what_was_removed_again_is_to_be_read() -> None:
    found = Mutated(f"{EDGES}:Unforgiving", most=240)
    assert found.outcomes == ["read", "read"]
    removed = found.outcome["kinds"][REMOVED_AGAIN]
    assert removed["refused"] == removed["right"] > 10
    assert any("for the same state" in line and "removed again" in line for line in found.lines)


def test_an_argument_of_two_types_is_changed() -> None:
    schema = {"type": ["null", "string"]}
    tools = [
        {"function": {"name": "put", "parameters": {"properties": {"box": schema, "note": schema}}}}
    ]
    mutants = Mutants(
        [Action("", (("put", {"box": "tea"}),))], tools, ["tea"], random.Random(0), has_view=True
    )
    assert any(
        "note" in call[1] for change in mutants for action in change.value for call in action.calls
    )
    assert schema_type(schema) == "string" and other_values("tea", schema)


@pytest.mark.slow
def test_the_command_ends_with_1_for_a_reward_that_is_bought_and_prints_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", f"{BUYABLE}:Bought", "--mutate", "--most", "80", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (
        not found["ok"] and found["mutants"]["listed"] and "move(" in found["findings"][0]["line"]
    )


@pytest.mark.slow
def test_what_was_found_is_kept_in_a_passport_beside_the_environment(tmp_path: Path) -> None:
    own = tmp_path / "shelf.py"
    own.write_text(BUYABLE.read_text())
    command = ["check", f"{own}:Bought", "--mutate", "--most", "80", "--passport"]
    assert main(command) == 1, "faults stay faults"
    passport = read_passport(tmp_path / "Bought.passport.json")
    assert passport is not None and passport.command.endswith("--most 80 --seed 0 --passport")
    counts = sum(passport.kinds.values(), Counts())
    assert counts.wrong > counts.paid > 0 < counts.right and "beside" in passport.kinds


def test_a_passport_says_what_mutants_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{BUYABLE}:Bought", "--passport"]) == 2
    assert "--mutate" in capsys.readouterr().err
