"""An agent's folder is its own: it removes keys from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from realhf.cluster.agent import HostAgent
from realhf.cluster.agent_folder import held
from realhf.cluster.errors import ClusterError
from realhf.transport.network.network import LOOPBACK


def test_a_folder_with_files_of_others_is_refused_and_they_stay(tmp_path: Path):
    """Somebody's home, for instance, with keys of theirs."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "id_rsa").write_text("mine")
    agent = HostAgent("tcp://127.0.0.1:1", LOOPBACK, "a", tmp_path, patience_s=0.1, prepare=False)
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
