"""Which test process runs which files."""

from pathlib import Path
from types import SimpleNamespace

from tests.sharing import (
    CALLS,
    RANKS,
    FilesThatBelongTogether,
    place,
    pytest_xdist_make_scheduler,
    together,
)

TESTS = Path(__file__).resolve().parent


def test_files_that_run_ranks_are_handed_out_together_and_others_alone():
    """Whoever imports what starts ranks would otherwise start their server in a process of its
    own."""
    imports = "from tests.backends.parallel.rank_processes import"
    found = {path.relative_to(TESTS.parent).as_posix() for path in TESTS.rglob("test_*.py")}
    with_ranks = {
        name
        for name in found
        if f"\n{imports} " in (TESTS.parent / name).read_text(encoding="utf-8")
    }
    assert len(with_ranks) >= 5 and {together(name) for name in with_ranks} == {RANKS}
    assert {name for name in found if together(name) == RANKS} == with_ranks
    calls = {name for name in found if together(name) == CALLS}
    assert len(calls) >= 6 and {Path(name).parent.name for name in calls} == {"mfc"}
    others = found - with_ranks - calls
    assert {together(name) for name in others} == others


def test_the_order_of_other_ways_to_share_out_tests_is_left_alone(monkeypatch):
    def config(dist):
        return SimpleNamespace(getoption={"dist": dist}.get)

    monkeypatch.setattr(FilesThatBelongTogether, "__init__", lambda self, config, log: None)
    assert pytest_xdist_make_scheduler(config("load"), None) is None
    made = pytest_xdist_make_scheduler(config("loadfile"), None)
    assert (
        made is not None
        and made._split_scope("tests/a/test_b.py::test_c[x::y]") == "tests/a/test_b.py"
    )
    assert made._split_scope("tests/backends/parallel/test_training.py::test_five[dp2]") == RANKS


def test_slow_files_come_first_each_in_one_piece_and_mixed_where_processes_share_them():
    slow = [
        f"tests/{room}/test_{number}.py::test_{case}"
        for room in "ab"
        for number in range(9)
        for case in "xy"
    ]
    found = [("tests/a/test_quick.py::test_z", False), *((nodeid, True) for nodeid in slow)]

    def ordered(mixed):
        return [nodeid for nodeid, _ in sorted(found, key=lambda item: place(*item, mixed=mixed))]

    assert ordered(mixed=False) == [*slow, found[0][0]]
    *mixed, last = ordered(mixed=True)
    assert last == found[0][0] and sorted(mixed) == sorted(slow)
    files = [nodeid.partition("::")[0] for nodeid in mixed]
    assert files[::2] == files[1::2], "the tests of a file stay together"
    assert {file.split("/")[1] for file in files[:18]} == {"a", "b"}
