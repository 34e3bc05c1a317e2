"""The book of leases, the health loop, what was drawn, the switches and the repair of XML: no
process is started."""

import inspect
import sys
import threading
import time
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.aws.cli.executor import SimulatorLost
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN, Draws, ModuleSwitches
from realhf.aws.simulator.ministack_server import is_well_formed, repair_xml
from realhf.aws.simulator.pool import RETURN_WAIT_S, HealthLoop, LeaseBook, SlotPhase, back_off_s
from realhf.aws.simulator.slot import USABLE_S
from realhf.env.openenv_client import OpenEnvClient
from realhf.env.server import capacity
from tests.process_family import until


def a_free_book(size: int) -> LeaseBook:
    book = LeaseBook(size)
    for index in range(size):
        book.free(index)
    return book


def test_nothing_is_handed_out_before_it_was_started() -> None:
    book = LeaseBook(1)
    with pytest.raises(RuntimeError, match=r"^MiniStack pool exhausted$"):
        book.take()


def test_least_recently_used_first() -> None:
    book = a_free_book(3)
    taken = [book.take() for _ in range(3)]
    for index in (1, 0, 2):
        book.grant(index, index)
        book.give_back(index, index)
        book.free(index)
    assert taken == [0, 1, 2] and [book.take() for _ in range(3)] == [1, 0, 2]


def test_sixty_four_threads_never_hold_the_same() -> None:
    book = a_free_book(5)
    held = set()
    problems = []
    guard = threading.Lock()

    def compete() -> None:
        for _ in range(50):
            try:
                index = book.take(patience_s=5.0)
            except RuntimeError:
                continue
            lease = object()
            book.grant(index, lease)
            with guard:
                problems.extend([index] if index in held else [])
                held.add(index)
            with guard:
                held.discard(index)
            book.give_back(index, lease)
            book.free(index)

    threads = [threading.Thread(target=compete) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == [] and book.counts()["free"] == 5


def test_a_lease_ends_once_and_only_by_its_holder() -> None:
    book = a_free_book(1)
    first = object()
    second = object()
    book.grant(book.take(), first)
    book.give_back(0, first)
    with pytest.raises(ValueError, match="not leased"):
        book.give_back(0, first)
    assert book.in_state(SlotPhase.SCRUBBING) == [0]
    book.free(0)
    book.grant(book.take(), second)
    with pytest.raises(ValueError, match="not leased"):
        book.give_back(0, first)
    assert book.in_state(SlotPhase.LEASED) == [0]
    with pytest.raises(ValueError, match="cannot become free"):
        book.free(0)


def test_a_taken_slot_is_not_the_onlookers_to_fail() -> None:
    book = a_free_book(2)
    index = book.take()
    assert not book.fail_if_free(index) and book.fail_if_free(1 - index)
    assert book.begin_respawn(1 - index) and not book.begin_respawn(1 - index)
    book.free(1 - index)
    assert book.take() == 1 - index


def test_taking_waits_for_what_is_on_its_way_back() -> None:
    book = a_free_book(1)
    book.grant(book.take(), "lease")
    book.give_back(0, "lease")
    timer = threading.Timer(0.05, book.free, (0,))
    timer.start()
    assert book.take(patience_s=30.0) == 0


def test_back_off() -> None:
    assert [back_off_s(n) for n in range(9)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


class FakeSlot:
    """Cannot be respawned ``failures`` times; is its own simulator."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.attempts = 0
        self.ministack = self

    def answers(self, timeout_s: float) -> bool:
        return False

    def respawn(self) -> None:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise SimulatorLost("no")


@pytest.mark.slow
def test_a_slot_that_cannot_be_respawned_is_tried_again_later() -> None:
    slots = [FakeSlot(failures=2)]
    book = LeaseBook(1)
    book.free(0)
    loop = HealthLoop(book, slots, interval_s=1000.0)  # pyright: ignore[reportArgumentType]
    loop.sweep()
    loop.sweep()
    assert slots[0].attempts == 1 and book.in_state(SlotPhase.UNHEALTHY) == [0], (
        "the second has to wait"
    )
    loop.start()
    assert until(lambda: book.in_state(SlotPhase.FREE))
    loop.stop()
    assert slots[0].attempts == 3 and (loop.respawns, loop.failures) == (1, 2)


class Hangs:
    """A slot whose simulator does not answer in half a second."""

    def __init__(self) -> None:
        self.asked = 0
        self.ministack = self

    def answers(self, timeout_s: float) -> bool:
        self.asked += 1
        time.sleep(min(timeout_s, 0.5))
        return False


@pytest.mark.slow
def test_an_end_waits_for_one_answer_and_not_for_those_of_all_slots() -> None:
    slots = [Hangs() for _ in range(40)]
    book = a_free_book(40)
    loop = HealthLoop(book, slots, interval_s=0.0)  # pyright: ignore[reportArgumentType]
    loop.start()
    assert until(lambda: slots[0].asked)
    loop.stop()
    assert not loop._thread.is_alive()
    assert slots[-1].asked == 0


def client_patience_s() -> float:
    """A client waits ten seconds for a session if nothing else was said, as OpenEnv's own does."""
    return inspect.signature(OpenEnvClient).parameters["connect_timeout_s"].default


def test_a_full_pool_says_so_before_a_client_gives_up() -> None:
    """The answer needs some seconds on a busy machine."""
    assert max(RETURN_WAIT_S, capacity._SCRUB_WAIT_S) <= client_patience_s() - 2.0


def test_a_free_slot_that_hangs_is_replaced_before_a_client_gives_up() -> None:
    """First its simulator and then its worker may be waited for; the rest is for new forks of
    them."""
    assert client_patience_s() - 2.0 >= 2 * USABLE_S


def test_what_was_drawn_is_marked_also_when_the_text_was_told_before() -> None:
    draws = Draws()
    draws.add("0af31c9e77", "0AF31C9E77")
    draws.refresh()
    assert draws.mark("vpc-0af31c9e77") == f"vpc-{DRAWN}0af31c9e77{END_DRAWN}"
    assert draws.mark("subnet-55aa55aa/CidrBlock") == "subnet-55aa55aa/CidrBlock"
    for letter in "55aa55aa":
        draws.add_letter(letter)
    draws.refresh()
    assert draws.mark("subnet-55aa55aa/CidrBlock") == f"subnet-{DRAWN}55aa55aa{END_DRAWN}/CidrBlock"
    draws.clear()
    assert draws.mark("vpc-0af31c9e77") == "vpc-0af31c9e77"


def test_a_word_with_a_drawn_end_alone_is_not_marked() -> None:
    draws = Draws()
    draws.add("0af31c9e77", "0AF31C9E77")
    draws.refresh()
    assert draws.mark("somethingquite31c9e77") == "somethingquite31c9e77"


def test_the_first_text_after_a_reset_is_taken_in_also_when_it_is_the_only_one() -> None:
    draws = Draws()
    draws.add("only31c9e77")
    draws.refresh()
    assert draws.mark("i-only31c9e77") == f"i-{DRAWN}only31c9e77{END_DRAWN}"


def test_switches_come_back_and_running_things_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("ministack.fake_service")
    fake.ENGINE = "auto"
    fake._counter = 0
    fake._scale = 1.0
    fake._flag = False
    fake._words = ("a", "b")
    fake._key = None
    fake._thread = None
    fake._store = {}
    fake._poller_started = False
    fake._generation = 1
    monkeypatch.setitem(sys.modules, "ministack.fake_service", fake)
    switches = ModuleSwitches()
    before = switches.values()
    assert switches.restore() == []
    fake.ENGINE = {"a": 1}
    fake._counter = 7
    fake._scale = 1
    fake._flag = True
    fake._words = ("a", "c")
    fake._key = "secret"
    fake._thread = threading.Lock()
    fake._store = {"kept": "by the service's own reset"}
    fake._poller_started = True
    fake._generation = 2
    assert set(switches.restore()) == {
        f"ministack.fake_service.{name}"
        for name in ("ENGINE", "_counter", "_scale", "_flag", "_words", "_key")
    }
    assert (fake.ENGINE, fake._counter, fake._scale, fake._flag, fake._key) == (
        "auto",
        0,
        1.0,
        False,
        None,
    )
    assert (
        fake._thread is not None and fake._store and fake._poller_started and fake._generation == 2
    )
    fake._thread = None
    assert switches.values() == before


ANSWER = (
    '<?xml version="1.0" encoding="UTF-8"?><GetGroupResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/">'
    "<Group><Path>/ops/{}/</Path><Name>n</Name></Group><Users></Users><More/></GetGroupResponse>"
)
SPACE = "{https://iam.amazonaws.com/doc/2010-05-08/}"


def path_of(body: bytes) -> str | None:
    return ElementTree.fromstring(body).findtext(f"{SPACE}Group/{SPACE}Path")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("op<|user|>", "op<|user|>"),
        ("a\x14b", "a\ufffdb"),
        ("a&b", "a&b"),
        ("a<b>c", "a<b>c"),
        ("a</b>c", "a</b>c"),
        ("<", "<"),
        ("a&lt;b&c", "a<b&c"),
        ("<Name>", "<Name>"),
        ("&#1;", None),
    ],
)
def test_a_name_that_was_not_escaped(name: str, read: str | None) -> None:
    body = ANSWER.format(name).encode()
    assert not is_well_formed(body)
    whole = repair_xml(body)
    assert whole == body if read is None else path_of(whole) == f"/ops/{read}/"


def test_what_is_xml_is_left_alone() -> None:
    body = ANSWER.format("a &amp; b").encode()
    assert repair_xml(body) is body


@pytest.mark.slow
@given(
    st.text(
        alphabet=st.characters(exclude_categories=("Cs",), exclude_characters="&>"), max_size=30
    )
)
def test_any_name_without_a_whole_tag_is_read_as_it_was(name: str) -> None:
    body = repair_xml(ANSWER.format(name).encode())
    read = "".join(
        "\ufffd" if (ord(c) < 32 and c not in "\t\n\r") or c in "\ufffe\uffff" else c for c in name
    )
    assert path_of(body) == f"/ops/{read}/".replace("\r\n", "\n").replace("\r", "\n")
