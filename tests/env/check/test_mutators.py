"""Mutants of actions: what is changed, that nothing comes back unchanged, and that a seed draws the same ones."""

from __future__ import annotations

import random

from realhf.env.check.mutators import (
    ADDED,
    DOUBLED,
    EXCHANGED,
    FIRST,
    LEFT_OUT,
    NEIGHBOUR,
    REMOVED,
    REORDERED,
    Change,
    changed_arguments,
    changed_text,
    changed_value,
    drawn,
    neighbours,
    reordered,
    with_others,
    with_variants,
    words_of,
)


def test_actions_are_left_out_doubled_swapped_and_reversed() -> None:
    found = {(kind, value) for kind, _, value in reordered("abc")}
    assert found >= {(LEFT_OUT, ("a", "c")), (LEFT_OUT, ("b",)), (DOUBLED, ("a", "b", "b", "c"))}
    assert found >= {(REORDERED, ("b", "a", "c")), (REORDERED, ("c", "a", "b")), (REORDERED, ("c", "b", "a"))}
    assert ("a", "b", "c") not in {value for _, value in found}


def test_a_variant_stands_instead_of_an_action_before_it_and_behind_it() -> None:
    found = [*with_variants("ab", lambda action: [Change("upper", "in capitals", action.upper())])]
    assert [(kind, value) for kind, _, value in found] == [
        ("upper", ("A", "b")),
        ("upper, before", ("A", "a", "b")),
        ("upper, after", ("a", "A", "b")),
        ("upper", ("a", "B")),
        ("upper, before", ("a", "B", "b")),
        ("upper, after", ("a", "b", "B")),
    ]
    others = with_others("ab", [Change(FIRST, "x", "x")])
    assert [value for _, _, value in others] == [("x", "a", "b"), ("a", "x", "b")]


def test_as_many_of_each_kind_are_drawn_and_the_same_by_a_seed() -> None:
    changes = [Change(kind, "", number) for kind, count in (("many", 90), ("few", 3)) for number in range(count)]
    few = drawn(changes, 8, random.Random(3))
    assert sorted(change.kind for change in few) == ["few"] * 3 + ["many"] * 5
    assert few == drawn(changes, 8, random.Random(3)) != drawn(changes, 8, random.Random(4))
    assert len(drawn(changes, 1000, random.Random(0))) == 93


def test_arguments_are_removed_added_exchanged_and_become_a_neighbours() -> None:
    given = {"source": "a.txt", "target": "dir/b.txt"}
    properties = {"source": {"type": "string"}, "target": {"type": "string"}, "force": {"type": "boolean"}}
    found = [*changed_arguments(given, properties, ["a.txt", "c.txt", "Move"])]
    by_kind = {kind: [value for each, _, value in found if each == kind] for kind, _, _ in found}
    assert by_kind[REMOVED] == [{"target": "dir/b.txt"}, {"source": "a.txt"}]
    assert by_kind[EXCHANGED] == [{"source": "dir/b.txt", "target": "a.txt"}]
    assert by_kind[ADDED] == [{**given, "force": True}, {**given, "force": False}]
    assert {"source": "c.txt", "target": "dir/b.txt"} in by_kind[NEIGHBOUR]
    assert given not in [value for _, _, value in found]


def test_values_of_every_kind_become_others_of_their_kind() -> None:
    def others(value: object, **schema: object) -> list[object]:
        return [change.value for change in changed_value(value, schema, ["17"])]

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
    words = words_of(["Move a-b.txt to the folder c. There is d-e.txt, too; 12 of 30."])
    assert words[:3] == ["Move", "a-b.txt", "to"] and "30" in words
    assert neighbours("a-b.txt", words) == ["d-e.txt"] and neighbours("12", words) == ["30"]
    assert neighbours("x/y", ["Move"]) == ["Move"]


def test_a_text_loses_words_and_its_end_and_gets_others() -> None:
    text = "UPDATE t SET n=n+2 WHERE name='a-b'"
    found = [change.value for change in changed_text(text, ["c-d", "7"])]
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
    assert [*changed_text("", ["x"])]  # An empty text is said twice and denied; nothing fails.
