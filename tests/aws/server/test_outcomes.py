"""How episodes ended is counted on the metrics page, by template, over real simulators."""

import os
import signal
import urllib.request

import pytest

from realhf.aws.client.aws_env import AwsEnv
from realhf.aws.episode.player import EpisodePlayer
from realhf.aws.server.program import AwsServed
from realhf.aws.server_config import AwsServerConfig
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import instantiate
from realhf.env.openenv_client import EnvError
from realhf.env.server.server import EnvServer, listen

VERSIONED = 201


@pytest.mark.sim
def test_episodes_are_counted_by_outcome_and_template(pool: MiniStackPool) -> None:
    config = AwsServerConfig(port=0, pool_size=1)
    served = AwsServed(config, pool, lambda slot: EpisodePlayer(slot, 2, chaos=False))
    server = EnvServer(served, config, listen("127.0.0.1", 0))
    server.start()
    try:
        with AwsEnv(server.url).sync() as env:
            env.reset(task_id=VERSIONED, seed=1)
            slot = env.state().slot_id
            assert slot is not None
            os.kill(pool.slots[slot].ministack.pid, signal.SIGKILL)
            with pytest.raises(EnvError, match="simulator lost"):
                env.step("aws s3 ls")
            env.reset(task_id=VERSIONED, seed=1)
            assert [env.step("aws s3 ls").done for _ in range(2)] == [False, True]
            env.reset(task_id=VERSIONED, seed=1)
            assert [env.step(command).done for command in instantiate(VERSIONED, 1).solution] == [False, True]
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as page:
            text = page.read().decode()
    finally:
        server.stop()
    for outcome in ("environment_failed", "truncated", "achieved"):
        assert f'realhf_env_episodes_total{{outcome="{outcome}",template="{VERSIONED}"}} 1.0' in text


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        ({"task_achieved": False, "simulator_lost": True, "account_unreadable": "answer"}, "simulator_lost"),
        ({"task_achieved": False, "account_unreadable": "answer"}, "unreadable_answer"),
        ({"task_achieved": True, "account_unreadable": "answer"}, "achieved"),
        ({"task_achieved": False}, "truncated"),
    ],
)
def test_each_episode_has_one_outcome(seen: dict[str, object], outcome: str) -> None:
    served = AwsServed(AwsServerConfig(port=0), MiniStackPool(1))
    assert served.outcome(seen) == outcome
    assert served.template({"task": {"task_id": VERSIONED}}) == str(VERSIONED)
    assert served.template({"task": {"task_id": 10**9}}) == served.template({}) == "other", "a client wrote it"
