"""The adapter of textarena without the package; tests/interop/test_textarena.py plays its games."""

from __future__ import annotations

import sys

import pytest

from realhf.env.loader.load import build_environment


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ValueError, match=r"pip install .*\[textarena\]") as caught:
        build_environment("textarena", {"game": "TicTacToe-v0"})
    assert "\n" not in str(caught.value)
