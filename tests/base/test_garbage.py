"""A process that starts collects rarely, and as usual once it has settled."""

from __future__ import annotations

import gc

from realhf.base.garbage import collect_rarely, settle


def test_what_is_there_when_it_settles_is_left_out_and_what_comes_later_is_collected() -> None:
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        collect_rarely()
        assert all(rare > often for rare, often in zip(gc.get_threshold(), usual, strict=True))
        settle()
        assert gc.get_threshold() == usual and gc.get_freeze_count() > frozen + 1000
        circle: list[object] = []
        circle.append(circle)
        del circle
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)
