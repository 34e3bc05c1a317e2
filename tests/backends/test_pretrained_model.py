"""The folder of a pretrained model: what is checked before and after it is made; ``make model``
makes the real one."""

from __future__ import annotations

import fcntl
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.backends import pretrained_model
from realhf.backends.pretrained_model import (
    FILE,
    FILE_SHA256,
    PACKAGE,
    RECORD,
    PretrainedModelError,
    file_digest,
    find_file,
    is_whole,
    make_folder,
    weights_digest,
)


def made_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    files = {"model.safetensors": file_digest(folder / "model.safetensors")}
    (folder / RECORD).write_text(json.dumps({"file_sha256": FILE_SHA256, "files": files}))
    return folder


def test_a_whole_folder_is_left_as_it_is_and_a_changed_one_is_seen(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "model")
    assert is_whole(folder) and make_folder(folder) is False
    (folder / "model.safetensors").write_bytes(b"weightS")
    assert not is_whole(folder)
    for text in ("{", "[]", "{}", '{"file_sha256": "other", "files": {}}'):
        (folder / RECORD).write_text(text)
        assert not is_whole(folder)


def test_what_others_made_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine")
    with pytest.raises(PretrainedModelError, match="was not created by this program"):
        make_folder(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine.txt"]


def test_two_do_not_make_it_at_once(tmp_path: Path) -> None:
    with (tmp_path / ".model.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PretrainedModelError, match="another process is creating"):
            make_folder(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    """Let a package of that name lie in ``tmp_path``, and everything else that is needed be
    there."""
    package = tmp_path / PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    if content is not None:
        (package / FILE).write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(pretrained_model, "REQUIRED_PACKAGES", ())


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "has no SmolLM2"), (b"GGUF other", "has SHA-256")]
)
def test_only_the_known_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, problem: str
) -> None:
    installed(tmp_path, monkeypatch, content)
    with pytest.raises(PretrainedModelError, match=problem):
        find_file()


def test_a_missing_package_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGE) is not None:
        pytest.skip("the package is installed here")
    with pytest.raises(
        PretrainedModelError, match=f"no package .*{PACKAGE}; `make model` installs"
    ):
        make_folder(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_nothing_is_left_of_a_conversion_that_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged folder stays until a whole one takes its place."""
    installed(tmp_path, monkeypatch, b"GGUF")
    monkeypatch.setattr(pretrained_model, "FILE_SHA256", file_digest(tmp_path / PACKAGE / FILE))

    def interrupted(source: Path, out: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text(source.name)
        raise KeyboardInterrupt

    def whole(source: Path, out: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text(source.name)

    damaged = made_folder(tmp_path / "model")
    (damaged / "model.safetensors").unlink()
    monkeypatch.setattr(pretrained_model, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_folder(damaged)
    assert not (tmp_path / ".model.partial").exists() and (damaged / RECORD).exists()
    monkeypatch.setattr(pretrained_model, "convert", whole)
    assert make_folder(damaged) is True and is_whole(damaged)
    assert sorted(path.name for path in damaged.iterdir()) == ["config.json", RECORD]


def test_the_digest_of_weights_sees_names_and_values(tiny_model: Any) -> None:
    model = tiny_model()
    before = weights_digest(model)
    assert before == weights_digest(tiny_model())
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-6
    assert weights_digest(model) != before
