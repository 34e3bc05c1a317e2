"""GPUs are those that a process sees, and numbers count among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from realhf.scheduler.gpus import VISIBLE, visible_gpus, with_one_gpu


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        (None, ("0", "1", "2", "3", "4", "5")),
        ("4,5", ("4", "5")),
        (" 5, GPU-8f1 ", ("5", "GPU-8f1")),
        ("", ()),
        ("-1", ()),
        ("2,6,3", ("2",)),
        ("2,nonsense,3", ("2",)),
        ("1,1", ()),
    ],
)
def test_a_list_of_the_environment_is_read_as_cuda_reads_it(
    tmp_path: Path, listed: str | None, seen: tuple[str, ...]
) -> None:
    for number in range(6):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    environment = {} if listed is None else {VISIBLE: listed}
    assert visible_gpus(environment, tmp_path) == seen
    assert visible_gpus(environment, tmp_path / "nothing") == ()


def test_a_number_means_one_of_the_inherited_list() -> None:
    assert with_one_gpu(1, {"PATH": "p"}) == {"PATH": "p", VISIBLE: "1"}
    assert with_one_gpu(1, {VISIBLE: "4,5"}) == {VISIBLE: "5"}
    assert with_one_gpu(0, {VISIBLE: "GPU-8f1,GPU-9a2"}) == {VISIBLE: "GPU-8f1"}
    for text, count in (("4,5", 2), ("", 0)):
        with pytest.raises(ValueError, match=f"GPU 2: {VISIBLE}='{text}' shows this process {count} GPUs only"):
            with_one_gpu(2, {VISIBLE: text})
