"""What a reset puts back in the modules of the simulator, and what it leaves alone."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from realhf.aws.simulator.account_state import ModuleSwitches


def test_switches_come_back_and_running_things_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("ministack.fake_service")
    fake.ENGINE, fake._counter, fake._scale, fake._flag, fake._words = "auto", 0, 1.0, False, ("a", "b")
    fake._key, fake._thread, fake._store = None, None, {}
    fake._poller_started, fake._generation = False, 1
    monkeypatch.setitem(sys.modules, "ministack.fake_service", fake)
    switches = ModuleSwitches()
    before = switches.values()
    assert switches.restore() == []
    fake.ENGINE, fake._counter, fake._scale, fake._flag, fake._words = {"a": 1}, 7, 1, True, ("a", "c")
    fake._key, fake._thread, fake._store = "secret", threading.Lock(), {"kept": "by the service's own reset"}
    fake._poller_started, fake._generation = True, 2
    assert set(switches.restore()) == {
        f"ministack.fake_service.{name}" for name in ("ENGINE", "_counter", "_scale", "_flag", "_words", "_key")
    }
    assert (fake.ENGINE, fake._counter, fake._scale, fake._flag, fake._key) == ("auto", 0, 1.0, False, None)
    assert fake._thread is not None and fake._store and fake._poller_started and fake._generation == 2
    fake._thread = None
    assert switches.values() == before
