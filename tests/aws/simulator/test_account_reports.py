"""Reports of an account whose records are kept from one to the next: always what a report made anew
would be. No process is started."""

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.aws.simulator import account_state
from realhf.aws.simulator.account_state import DRAWN, AccountState, Draws, TooLarge

WORDS = (
    "0af31c9e77",
    "vpc-0af31c9e77",
    "55aa55aa",
    "subnet-55aa55aa/rules",
    "a-name",
    "8d0b5a3e-6f0a-4d8e-9a59-0c36e1b7a001",
    f"tricky{DRAWN}text",
    "long " * 60 + "0af31c9e77",
    "é\ud800",
)
LEAVES = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from([None, True, 1, 1.0, 0, False, b"0af31c9e77", bytearray(b"x"), 1 << 70]),
    st.sampled_from([datetime(2026, 1, 2), frozenset({"b", "a"}), ("t", 1)]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
        st.builds(OrderedDict, st.dictionaries(st.sampled_from(WORDS), inner, max_size=2)),
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(["one", "two", "vpc-0af31c9e77"])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, VALUES),
        st.tuples(st.just("change"), NAMES, VALUES),
        st.tuples(st.just("delete"), NAMES),
        st.tuples(st.just("draw"), st.sampled_from(["0af31c9e77", "zz0af31c9e77", "55aa55aa"])),
        st.tuples(st.just("draw"), st.sampled_from(["unrelated1", "9" * 5000, "a-name"])),
        st.tuples(st.just("letters"), st.sampled_from(["55aa55aa", "0af31c"])),
        st.tuples(st.just("reset")),
    ),
    max_size=12,
)


class AccountScopedDict:
    """As much of the simulator's store of that name as a report reads."""

    def __init__(self) -> None:
        self._data: dict[Any, Any] = {}


@contextmanager
def the_only_store() -> Iterator[AccountScopedDict]:
    """Put a service with one store among the simulator's modules, and hide the real ones."""
    fake: Any = ModuleType("ministack.services.fake")
    fake._things = AccountScopedDict()
    hidden = {name: module for name, module in sys.modules.items() if name.startswith("ministack")}
    for name in hidden:
        del sys.modules[name]
    sys.modules[fake.__name__] = fake
    try:
        yield fake._things
    finally:
        del sys.modules[fake.__name__]
        sys.modules.update(hidden)


def made_anew(state: AccountState, drawn: list[str]) -> list[str]:
    """Return the report of an account that nothing is known about."""
    draws = Draws()
    draws.add(*drawn)
    other = AccountState(draws)
    other._deleted = state._deleted
    return other.report()


@pytest.mark.slow
@settings(max_examples=60)
@given(actions=ACTIONS)
def test_a_report_is_what_it_would_be_if_it_were_made_anew(actions: list[tuple[Any, ...]]) -> None:
    with the_only_store() as store:
        draws = Draws()
        state = AccountState(draws)
        drawn: list[str] = []
        for kind, *arguments in [*actions, ("nothing",)]:
            place = ("000000000000", arguments[0]) if arguments else ()
            if kind == "put":
                store._data[place] = {"inner": arguments[1]}
            elif kind == "change" and place in store._data:
                store._data[place]["inner"] = arguments[1]
            elif kind == "delete" and store._data.pop(place, None) is not None:
                state._deleted[id(store), place] += 1
            elif kind == "draw":
                draws.add(arguments[0])
                drawn.append(arguments[0])
            elif kind == "letters":
                for letter in arguments[0]:
                    draws.add_letter(letter)
                drawn.append(arguments[0])
            elif kind == "reset":
                state.forget()
                drawn.clear()
            assert state.report() == made_anew(state, drawn)


def test_a_record_that_did_not_change_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    encode = account_state._ENCODE
    monkeypatch.setattr(
        account_state, "_ENCODE", lambda record: written.append(1) or encode(record)
    )
    with the_only_store() as store:
        store._data |= {("0", name): {"Name": f"a-{name}", "Tags": [name]} for name in "abc"}
        state = AccountState(Draws())
        first = state.report()
        state._draws.add("0af31c9e77")
        store._data["0", "b"]["Tags"].append("new")
        second = state.report()
        state.forget()
        assert state.report() == second and len(written) == 3 + 1
        assert [one == other for one, other in zip(first, second, strict=True)] == [
            True,
            False,
            True,
        ]


def test_kept_records_count_for_the_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account_state, "MAX_LEAVES", 20)
    with the_only_store() as store:
        state = AccountState(Draws())
        for name in "abc":
            store._data["0", name] = {"words": ["x"] * 4}
            state.report()
        store._data["0", "d"] = {"words": ["x"] * 4}
        with pytest.raises(TooLarge):
            state.report()


def test_records_are_marked_by_the_texts_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """After old texts were dropped, records used to be kept as the older texts had marked them, and
    a new text could be missed until the next one."""
    monkeypatch.setattr(account_state, "_KEPT_DRAWS", 100)
    with the_only_store() as store:
        names = ("0af31c9e77", "55aa55aa11", "77bb77bb22")
        store._data["0", "key"] = {name: f"vpc-{name}" for name in names}
        draws = Draws()
        state = AccountState(draws)
        n_marks = []
        for text in ("0af31c9e77", "55aa55aa11" + "x" * 100, "unrelated1", "77bb77bb22"):
            draws.add(text)
            report = state.report()
            assert report == made_anew(state, draws._texts), text
            n_marks.append(report[0].count(f"vpc-\\u{ord(DRAWN):x}"))
        assert n_marks == [1, 1, 1, 2], "the first text is dropped at the second"


def test_the_same_content_in_another_store_is_another_record() -> None:
    """The new store may lie where the old one lay in memory, and was then reported by its name."""
    with the_only_store() as store:
        store._data["0", "key"] = {"Name": "one"}
        state = AccountState(Draws())
        assert state.report() == ['["fake","things","","key",0,{"Name":"one"}]']
        module: Any = sys.modules["ministack.services.fake"]
        module._others = module._things
        del module._things
        state._modules = 0  # as after an import
        assert state.report() == ['["fake","others","","key",0,{"Name":"one"}]']


def test_a_long_value_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each report used to copy the bodies of all objects. A change in place is seen all the same,
    and a short value in the place of the long one is kept."""
    compared = []
    write = account_state._write_plain
    monkeypatch.setattr(
        account_state, "_write_plain", lambda value: compared.append(1) or write(value)
    )
    with the_only_store() as store:
        value = store._data["0", "key"] = {"body": b"x" * (1 << 20), "tag": "old"}
        state = AccountState(Draws())
        first = state.report()
        assert state.report() == first and len(compared) == 1
        value["tag"] = "new"
        assert state.report() == made_anew(state, []) != first
        store._data["0", "key"] = {"body": b"", "tag": "short"}
        compared.clear()
        assert state.report() == state.report() == made_anew(state, [])
        assert len(state._kept) == 1 and not state._unkept
