"""What is brought to a host that does not have the run folder, and how paths change on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realhf.cluster.file_transfer import files_for_host, needed_paths, weights_problem
from realhf.cluster.messages import PIECE_BYTES
from realhf.cluster.own_host import fingerprint
from realhf.cluster.placement import ClusterError

LARGE = 4_000_001
"""Bytes of weights; no number of whole pieces."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with a model, an environment of one's own and keys."""
    folder, model = tmp_path / "runs" / "exp" / "trial", tmp_path / "model"
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
            "rollout": {"options": {"weights": "disk"}, "environment": f"{tmp_path / 'mine.py'}:Env"},
        },
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def test_a_host_that_shares_the_folder_gets_the_keys_only(run_dir: Path):
    found = files_for_host(run_dir, "/h", run_dir / ".keys-1", shared=True, there=[], limit_mb=0, host="b")
    assert [(piece.path, piece.data) for piece in found.pieces()] == [("/h/keys/keys-1", b"secret")]
    assert found.rewritten(str(run_dir / ".keys-1")) == "/h/keys/keys-1"
    assert found.rewritten(str(run_dir)) == str(run_dir)


def test_one_that_does_not_gets_what_the_plan_names_under_new_paths(run_dir: Path, tmp_path: Path):
    found = files_for_host(run_dir, "/h", run_dir / ".keys-1", shared=False, there=[], limit_mb=9, host="b")
    files: dict[str, bytes] = {}
    for piece in found.pieces():
        assert piece.offset == len(files.get(piece.path, b"")) and len(piece.data) <= PIECE_BYTES
        files[piece.path] = files.get(piece.path, b"") + piece.data
    assert sorted(path.rpartition("/")[2] for path in files) == ["empty", "keys-1", "mine.py", "plan.json", "weights"]
    plan = json.loads(files[f"{found.rewritten(str(run_dir))}/plan.json"])
    model = plan["spec"]["models"]["actor"]["path"]
    assert files[f"{model}/weights"] == b"w" * LARGE and files[f"{model}/empty"] == b""
    code, _, name = plan["spec"]["rollout"]["environment"].partition(":")
    assert (files[code], name) == (b"x = 1\n", "Env")
    assert plan["spec"]["models"]["ref"]["path"] == "org/name"
    assert plan["spec"]["run_dir"].startswith("/h/runs/exp-trial-")
    assert found.rewritten(f"{tmp_path}/model-2") == f"{tmp_path}/model-2", "another path that begins alike"


def test_what_looks_the_same_there_stays_and_what_is_too_large_is_refused(run_dir: Path, tmp_path: Path):
    paths = [*needed_paths(run_dir)]
    assert paths == [str(tmp_path / "model"), str(tmp_path / "mine.py")]
    assert all(fingerprint(Path(path)) for path in paths) and fingerprint(Path("/nowhere")) == ""
    found = files_for_host(run_dir, "/h", None, shared=False, there=paths, limit_mb=0, host="b")
    assert not found.files and found.rewritten(paths[0]) == paths[0]
    with pytest.raises(ClusterError, match=r"actor\.path=.*host b neither shares .* 4 MB .* scheduler\.carry_mb=1"):
        files_for_host(run_dir, "/h", None, shared=False, there=[], limit_mb=1, host="b")


def test_weights_that_would_not_arrive_are_refused_by_option_and_host(run_dir: Path):
    assert weights_problem(run_dir, "b", "launcher", shared=True) == ""
    assert "async_rl.weights=disk: the host b does not share" in weights_problem(run_dir, "b", "launcher", shared=False)
    plan = run_dir / "plan.json"
    plan.write_text(plan.read_text().replace('"disk"', '"shm"'))
    assert weights_problem(run_dir, "b", "b", shared=False) == ""
    assert "async_rl.weights=shm: memory of launcher" in weights_problem(run_dir, "b", "launcher", shared=True)


def test_a_prompt_that_begins_with_a_slash_is_no_path(run_dir: Path):
    """Nor is a text with a part that no file system could name."""
    plan = json.loads((run_dir / "plan.json").read_text())
    plan["spec"]["rollout"]["options"]["system"] = "/no_think " + "You are a careful agent. " * 40
    (run_dir / "plan.json").write_text(json.dumps(plan))
    assert len(needed_paths(run_dir)) == 2


def test_a_model_that_has_changed_is_not_mixed_with_what_was_brought_before(run_dir: Path, tmp_path: Path):
    def target() -> str:
        found = files_for_host(run_dir, "/h", None, shared=False, there=[], limit_mb=9, host="b")
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
    """Two fine-tuned models of one architecture look alike by names and sizes, and a host used its own."""
    (tmp_path / "model").mkdir()
    weights = tmp_path / "model" / "weights"
    weights.write_bytes(b"a" * 1000)
    before = fingerprint(tmp_path / "model")
    weights.write_bytes(b"a" * 999 + b"b")
    assert fingerprint(tmp_path / "model") != before
