"""An agent's folder is its own: it removes keys from it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from realhf.cluster.agent import MARK, PREFIX, HostAgent, held, temporary
from realhf.cluster.placement import ClusterError
from tests.cluster.key_ring import KeyRing


def test_a_folder_with_files_of_others_is_refused_and_they_stay(tmp_path: Path):
    """Somebody's home, for instance, with keys of theirs."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "id_rsa").write_text("mine")
    key = KeyRing(tmp_path / "key").of("a")
    agent = HostAgent("tcp://127.0.0.1:1", key, "a", tmp_path, patience_s=0.1, prepare=False)
    with pytest.raises(ClusterError, match=rf"--folder {tmp_path}: it holds files that are no host agent's"):
        agent.run()
    assert (tmp_path / "keys" / "id_rsa").read_text() == "mine"
    agent._context.destroy(0)


def test_two_agents_do_not_share_a_folder_and_one_may_have_it_after_the_other(tmp_path: Path):
    """One would remove the other's keys when its run is over."""
    folder = tmp_path / "host"
    with held(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "keys").mkdir()
        with (
            pytest.raises(ClusterError, match="another host agent uses it; give this"),
            held(folder),
        ):
            pass
    with held(folder):
        pass


def test_a_temporary_folder_goes_with_its_agent_and_those_of_killed_agents_with_the_next(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, strange = tmp_path / f"{PREFIX}killed", tmp_path / f"{PREFIX}strange"
    for folder in (killed, strange):
        (folder / "carried").mkdir(parents=True)
    (killed / MARK).touch()
    with temporary() as running, held(running), temporary() as other:
        assert running.exists() and other.exists() and not killed.exists()
    assert [*tmp_path.iterdir()] == [strange], "who has no mark is no agent's"
