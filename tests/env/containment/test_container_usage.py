"""What is counted of a process that becomes its program meanwhile."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from realhf.env.containment import container_usage
from realhf.env.containment.container_usage import UNKNOWN, Accountant


@pytest.mark.parametrize(("refusals", "starts", "counts"), [(1, 1, 1), (1, 0, 0), (2, 1, 0)])
def test_a_process_that_has_just_become_its_program_is_measured_again(
    refusals: int, starts: bool, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [PermissionError()] * refusals

    def refuse(path: str, mode: str) -> Any:
        if path.endswith("/maps") and left:
            raise left.pop()
        return open(path, mode)

    accountant = Accountant()
    monkeypatch.setattr(container_usage, "open", refuse, raising=False)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            memory = accountant._measure(str(process.pid), set(), may_start=bool(starts)).memory
        finally:
            process.kill()
    assert (0 < memory < UNKNOWN) if counts else memory == UNKNOWN
