"""The gate: no sample is overtaken until it is too old (spec dataflow, section 9; tests: section 14, 8)."""

from __future__ import annotations

from realhf.dataflow.straggler_gate import StragglerGate


def test_step_1_waits_for_the_slow_ones_instead_of_taking_younger_samples() -> None:
    """B=2, eta=2, four of the first six rollouts are slow."""
    gate = StragglerGate(2, 2)
    for order in range(6):
        gate.admit(f"s{order}", 0, order)
    gate.stage("s5")
    gate.stage("s4")
    assert gate.release(0) == ["s4", "s5"]
    for order in (6, 7):
        gate.admit(f"s{order}", 1, order)
        gate.stage(f"s{order}")
    assert gate.release(1) is None
    assert gate.stragglers(1) == ["s0", "s1", "s2", "s3"]
    gate.stage("s2")
    assert gate.release(1) is None
    gate.stage("s0")
    assert gate.release(1) == ["s0", "s2"]
