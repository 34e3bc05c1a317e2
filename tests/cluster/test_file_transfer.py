"""What is brought to a host that does not have the run folder, under which paths, and how it is
kept there: below the agent's folder, whole or not at all."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from realhf.cluster.file_transfer import (
    KeyFiles,
    TransferQueue,
    find_needed_paths,
    find_weights_problem,
    plan_transfer,
    store_piece,
)
from realhf.cluster.messages import PIECE_BYTES, FilePiece, FileReceipt, Message, StartWorker
from realhf.cluster.own_host import fingerprint
from realhf.cluster.placement import ClusterError
from realhf.transport.errors import NetworkError
from realhf.transport.network import RunKeys

LARGE = 4_000_001
"""Bytes of weights; no number of whole pieces."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with a model, an environment of one's own and keys."""
    folder = tmp_path / "runs" / "exp" / "trial"
    model = tmp_path / "model"
    folder.mkdir(parents=True)
    model.mkdir()
    (model / "weights").write_bytes(b"w" * LARGE)
    (model / "empty").touch()
    (tmp_path / "mine.py").write_text("x = 1\n")
    (folder / ".keys-1").write_text("secret")
    plan = {
        "plugins": ["experiments.policy_gradient"],
        "spec": {
            "run_dir": str(folder),
            "models": {"actor": {"path": str(model)}, "ref": {"path": "org/name"}},
            "source": {"args": {"file": "/nowhere.jsonl"}},
            "rollout": {
                "options": {"weights": "disk"},
                "environment": f"{tmp_path / 'mine.py'}:Env",
            },
        },
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def test_a_host_that_shares_the_folder_gets_the_keys_only(run_dir: Path):
    found = plan_transfer(
        run_dir, "/h", run_dir / ".keys-1", shared=True, same_paths=[], limit_mb=0, host="b"
    )
    assert [(piece.path, piece.data) for piece in found.pieces()] == [("/h/keys/keys-1", b"secret")]
    assert found.map_path(str(run_dir / ".keys-1")) == "/h/keys/keys-1"
    assert found.map_path(str(run_dir)) == str(run_dir)


def test_one_that_does_not_gets_what_the_plan_names_under_new_paths(run_dir: Path, tmp_path: Path):
    found = plan_transfer(
        run_dir, "/h", run_dir / ".keys-1", shared=False, same_paths=[], limit_mb=9, host="b"
    )
    files: dict[str, bytes] = {}
    for piece in found.pieces():
        assert piece.offset == len(files.get(piece.path, b"")) and len(piece.data) <= PIECE_BYTES
        files[piece.path] = files.get(piece.path, b"") + piece.data
    assert sorted(path.rpartition("/")[2] for path in files) == [
        "empty",
        "keys-1",
        "mine.py",
        "plan.json",
        "weights",
    ]
    plan = json.loads(files[f"{found.map_path(str(run_dir))}/plan.json"])
    model = plan["spec"]["models"]["actor"]["path"]
    assert files[f"{model}/weights"] == b"w" * LARGE and files[f"{model}/empty"] == b""
    code, _, name = plan["spec"]["rollout"]["environment"].partition(":")
    assert (files[code], name) == (b"x = 1\n", "Env")
    assert plan["spec"]["models"]["ref"]["path"] == "org/name"
    assert plan["spec"]["run_dir"].startswith("/h/runs/exp-trial-")
    assert found.map_path(f"{tmp_path}/model-2") == f"{tmp_path}/model-2", (
        "another path that begins alike"
    )


def test_what_looks_the_same_there_stays_and_what_is_too_large_is_refused(
    run_dir: Path, tmp_path: Path
):
    paths = [*find_needed_paths(run_dir)]
    assert paths == [str(tmp_path / "model"), str(tmp_path / "mine.py")]
    assert all(fingerprint(Path(path)) for path in paths) and fingerprint(Path("/nowhere")) == ""
    found = plan_transfer(run_dir, "/h", None, shared=False, same_paths=paths, limit_mb=0, host="b")
    assert not found.files and found.map_path(paths[0]) == paths[0]
    with pytest.raises(
        ClusterError, match=r"actor\.path=.*host b neither shares .* 4 MB .* scheduler\.carry_mb=1"
    ):
        plan_transfer(run_dir, "/h", None, shared=False, same_paths=[], limit_mb=1, host="b")


def test_weights_that_would_not_arrive_are_refused_by_option_and_host(run_dir: Path):
    assert find_weights_problem(run_dir, "b", "launcher", shared=True) == ""
    assert "async_rl.weights=disk: the host b does not share" in find_weights_problem(
        run_dir, "b", "launcher", shared=False
    )
    plan = run_dir / "plan.json"
    plan.write_text(plan.read_text().replace('"disk"', '"shm"'))
    assert find_weights_problem(run_dir, "b", "b", shared=False) == ""
    assert "async_rl.weights=shm: memory of launcher" in find_weights_problem(
        run_dir, "b", "launcher", shared=True
    )


def test_a_prompt_that_begins_with_a_slash_is_no_path(run_dir: Path):
    """Nor is a text with a part that no file system could name."""
    plan = json.loads((run_dir / "plan.json").read_text())
    plan["spec"]["rollout"]["options"]["system"] = "/no_think " + "You are a careful agent. " * 40
    (run_dir / "plan.json").write_text(json.dumps(plan))
    assert len(find_needed_paths(run_dir)) == 2


def test_a_model_that_has_changed_is_not_mixed_with_what_was_brought_before(
    run_dir: Path, tmp_path: Path
):
    def target() -> str:
        found = plan_transfer(
            run_dir, "/h", None, shared=False, same_paths=[], limit_mb=9, host="b"
        )
        return found.paths[str(tmp_path / "model")]

    before = target()
    assert target() == before
    (tmp_path / "model" / "weights").rename(tmp_path / "model" / "weights-1-of-2")
    assert target() != before


def test_a_file_as_large_as_a_disk_is_compared_at_once(tmp_path: Path):
    """An agent that read all of it would be silent for so long that it counted as lost."""
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 40)
    found = [fingerprint(large), fingerprint(large)]
    with large.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    found.append(fingerprint(large))
    with large.open("ab") as file:
        file.write(b"\0")
    found.append(fingerprint(large))
    assert found[0] == found[1] and len({*found}) == 3 and all(found)


def test_a_model_of_the_same_names_and_sizes_is_another_where_a_byte_differs(tmp_path: Path):
    """Two fine-tuned models of one architecture look alike by names and sizes, and a host used its
    own."""
    (tmp_path / "model").mkdir()
    weights = tmp_path / "model" / "weights"
    weights.write_bytes(b"a" * 1000)
    before = fingerprint(tmp_path / "model")
    weights.write_bytes(b"a" * 999 + b"b")
    assert fingerprint(tmp_path / "model") != before


def test_parts_make_a_file_that_appears_with_the_last_one_and_replaces_the_one_before(
    tmp_path: Path,
):
    target = tmp_path / "runs" / "plan.json"
    for text in (b"first life", b"2"):
        assert store_piece(FilePiece(str(target), 0, text, False), tmp_path).size == len(text)
        assert store_piece(FilePiece(str(target), len(text), b"!", True), tmp_path) == FileReceipt(
            str(target), len(text) + 1, ""
        )
        assert target.read_bytes() == text + b"!"
    assert target.stat().st_mode & 0o777 == 0o600 and [*target.parent.iterdir()] == [target]


@pytest.mark.parametrize(
    "path", ["/etc/realhf", "{}/../x", "{}/a/../../x", "relative", "/", "{}/a\0b"]
)
def test_nothing_is_written_elsewhere(tmp_path: Path, path: str):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert store_piece(FilePiece(path.format(folder), 0, b"x", True), folder).problem
    assert [*tmp_path.rglob("*")] == [folder]


def test_a_link_is_not_written_through(tmp_path: Path):
    folder = tmp_path / "folder"
    outside = tmp_path / "outside"
    folder.mkdir()
    outside.write_text("mine")
    (folder / ".f.part").symlink_to(outside)
    assert store_piece(FilePiece(str(folder / "f"), 4, b"x", True), folder).problem
    assert store_piece(FilePiece(str(folder / "f"), 0, b"x", True), folder).problem == ""
    assert outside.read_text() == "mine" and not (folder / "f").is_symlink()


def test_a_file_that_misses_a_part_never_gets_its_name(tmp_path: Path):
    target = tmp_path / "weights"
    store_piece(FilePiece(str(target), 0, b"a" * 10, False), tmp_path)
    assert (
        store_piece(FilePiece(str(target), 20, b"c" * 10, True), tmp_path).problem
        == "a part before byte 20 is missing"
    )
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_told_and_what_was_written_is_removed(tmp_path: Path):
    """The limit of a file's size fails a write in its middle, as a disk without room does."""
    target = tmp_path / "weights"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    store_piece(FilePiece(str(target), 0, b"a" * 1000, False), tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        found = store_piece(FilePiece(str(target), 1000, b"b" * 1000, False), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (found.size, found.problem) == (0, "File too large")
    assert not [*tmp_path.iterdir()]
    assert (
        store_piece(FilePiece(str(target), 2000, b"c", True), tmp_path).problem
        == "a part before byte 2000 is missing"
    )
    assert not target.exists()


@pytest.mark.slow
def test_keys_are_kept_in_memory_and_gone_with_their_process(tmp_path: Path):
    """An agent that is killed used to leave the keys of the run on its host."""
    keys = RunKeys.make()
    piece = tmp_path / "keys" / "7"
    with_keys = "held.store(FilePiece(sys.argv[2], 0, sys.stdin.buffer.read(), True)).problem"
    code = (
        "import sys; from pathlib import Path; from realhf.cluster.file_transfer import *; "
        "from realhf.cluster.messages import FilePiece; "
        f"held = KeyFiles(Path(sys.argv[1])); print({with_keys}, flush=True); sys.stdin.close(); "
        "import time; time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(piece)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        try:
            agent.stdin.write(json.dumps(asdict(keys)).encode())
            agent.stdin.close()
            assert agent.stdout.readline() == b"\n"
            assert RunKeys.read(piece) == keys, "a worker reads them as it reads a file"
            assert not [
                path for path in tmp_path.rglob("*") if not path.is_symlink() and path.is_file()
            ]
        finally:
            agent.kill()
    with pytest.raises(NetworkError):
        RunKeys.read(piece)
    KeyFiles(tmp_path).remove_all()
    assert not [*(tmp_path / "keys").iterdir()], (
        "what a killed agent has left leads nowhere, and goes"
    )


def test_what_is_no_file_of_keys_is_refused(tmp_path: Path):
    held = KeyFiles(tmp_path)
    assert held.is_key_file(FilePiece(str(tmp_path / "keys" / "k"), 0, b"", True))
    assert not held.is_key_file(FilePiece(str(tmp_path / "keys" / "a" / "k"), 0, b"", True))
    assert (
        held.store(FilePiece(str(tmp_path / "keys" / "k"), 0, b"half", False)).problem
        == "no file of keys"
    )
    assert held.store(FilePiece(str(tmp_path / "keys" / ".."), 0, b"", True)).problem
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]


def test_what_is_carried_goes_on_where_it_was_cut_off(tmp_path: Path):
    """Over a slow link a large file began again at its first byte whenever the host was lost, and
    never arrived. A part was cut in its middle, too."""
    target = tmp_path / "carried" / "0123" / "weights"
    content = bytes(range(256)) * 40
    store_piece(FilePiece(str(target), 0, content[:5000], False), tmp_path)
    sent: list[int] = []

    def brought(length: int) -> int:
        """Bring the file as a launcher does, in parts; how many parts were sent."""
        parts = (
            FilePiece(
                str(target), start, content[start : start + length], start + length >= len(content)
            )
            for start in range(0, len(content), length)
        )
        transfers = TransferQueue(
            lambda kind, message: sent.append(kind == "file") or answer(message)
        )
        waiting: list[FileReceipt] = []

        def answer(message: Message) -> None:
            if isinstance(message, FilePiece):
                waiting.append(store_piece(message, tmp_path))

        sent.clear()
        transfers.add(parts, StartWorker("rollout_worker/0", "m", [], "/l", False, 0, None))
        while not transfers.advance() and waiting:
            transfers.on_receipt(waiting.pop(0))
            assert len(waiting) <= 64
        return sum(sent)

    assert brought(20) < 300 and target.read_bytes() == content, "half of it was there"
    assert brought(1000) <= 11 and target.read_bytes() == content, "all of it was"


def test_a_part_is_small_enough_to_be_a_sign_of_life_over_a_slow_link():
    """At 1 Mbit/s. A launcher says nothing else while parts are on their way."""
    assert PIECE_BYTES * 8 / 1e6 < 1.25 * 3, "scheduler.dead_after_s is at least 3"
