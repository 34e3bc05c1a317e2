"""GPUs are those that a process sees, and numbers count among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from realhf.scheduler.gpus import VISIBLE, global_gpu_names, restrict_to_gpus, visible_gpus


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


def test_a_gpu_has_one_name_however_a_process_counts_it(tmp_path: Path) -> None:
    """By its address on the bus: what is listed by number, by a UUID or the beginning of one, and
    in a container that has only some. A part of a GPU, which the driver does not list, has a UUID
    of its own."""
    for number in range(3):
        for folder in (tmp_path / "machine", tmp_path / "container")[: 2 if number else 1]:
            (folder / f"0000:0{number}:00.0").mkdir(parents=True)
            text = (
                f"Model: \t H100\nGPU UUID: \t GPU-{number}af-11\nBus Location: \t "
                f"0000:0{number}:00.0\n"
            )
            (folder / f"0000:0{number}:00.0" / "information").write_text(text)
    names = tuple(f"m/0000:0{number}:00.0" for number in range(3))
    assert global_gpu_names("m", {}, tmp_path / "machine") == names
    assert global_gpu_names("m", {}, tmp_path / "container") == names[1:]
    assert global_gpu_names("m", {VISIBLE: "2,0"}, tmp_path / "machine") == (names[2], names[0])
    assert global_gpu_names("m", {VISIBLE: "GPU-1af,MIG-7"}, tmp_path / "machine") == (
        names[1],
        "MIG-7",
    )
    assert global_gpu_names("n", {}, tmp_path / "machine")[0] == "n/0000:00:00.0"
    assert global_gpu_names("m", {}, tmp_path / "nothing") == ()


def test_a_number_means_one_of_the_inherited_list() -> None:
    assert restrict_to_gpus((1,), {"PATH": "p"}) == {"PATH": "p", VISIBLE: "1"}
    assert restrict_to_gpus((1,), {VISIBLE: "4,5"}) == {VISIBLE: "5"}
    assert restrict_to_gpus((2, 1), {VISIBLE: "4,5,7"}) == {VISIBLE: "7,5"}
    assert restrict_to_gpus((2, 3), {}) == {VISIBLE: "2,3"}
    assert restrict_to_gpus((0,), {VISIBLE: "GPU-8f1,GPU-9a2"}) == {VISIBLE: "GPU-8f1"}
    for text, count in (("4,5", 2), ("", 0)):
        with pytest.raises(
            ValueError, match=f"GPU 2: {VISIBLE}='{text}' shows this process {count} GPUs only"
        ):
            restrict_to_gpus((2,), {VISIBLE: text})
