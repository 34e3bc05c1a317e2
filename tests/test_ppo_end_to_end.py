"""PPO with a critic from the command line: its roles on one worker and on two, killed and gone on
with."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time

import psutil
import pytest

from tests.process_family import gone, kill_all
from tests.test_end_to_end import undescribed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3
KILLED_AFTER = 1
PATIENCE_S = 400.0
LETTERS = '''
class Letters:
    """Two turns, each of which is worth the share of letters in what was said: something to tell episodes apart by."""

    async def reset(self, task, *, seed):
        self.turns = 0
        return {"messages": [{"role": "user", "content": f"Say letters. {seed}"}]}

    async def step(self, message):
        self.turns += 1
        said = message.content
        worth = sum(letter.isalpha() for letter in said) / max(1, len(said))
        return {"messages": [{"role": "user", "content": "More."}], "done": self.turns == 2, "reward": worth}
'''
OPTIONS = (
    "experiment=ppo",
    "seed=3",
    "experiment_name=ppo",
    f"total_train_steps={STEPS}",
    "ppo.credit=turn",
    "ppo.ppo_n_minibatches=2",
    "ppo.kl_target=0.01",
    "ppo.kl_horizon=40",
    "actor.optimizer.lr=0.01",
    "critic.optimizer.lr=0.01",
    "critic.warmup_steps=1",
    "dataset.train_bs_n_seqs=2",
    "ppo.group_size=4",
    "gen.max_new_tokens=8",
    "rollout.max_turns=2",
    "rollout.max_total_tokens=500",
    "evaluation.episodes_per_task=0",
    "evaluation.greedy_episodes_per_task=0",
    "exp_ctrl.ckpt_freq_steps=1",
    "monitor.trackers=[]",
    "monitor.progress=false",
    "torch_threads=1",
)
COMPUTED = (
    "policy/",
    "critic/",
    "mismatch/",
    "batch/",
    "groups/",
    "critic_inf/",
    "ref_inf/",
    "rew_inf/",
)


class Run:
    """One command and what it leaves in its folder."""

    def __init__(self, folder, trial, policy, *options):
        environment = folder / "letters.py"
        environment.write_text(LETTERS)
        place = (
            f"env.path={environment}:Letters",
            f"actor.path={policy}",
            f"fileroot={folder}",
            f"trial_name={trial}",
        )
        # The last word counts.
        self._command = [
            sys.executable,
            "-m",
            "realhf.launch",
            *OPTIONS,
            *place,
            *options,
        ]
        self._rows = folder / "ppo" / trial / "metrics.jsonl"

    def rows(self):
        """What each step computed, by step; without what the clock says."""
        lines = self._rows.read_text().splitlines() if self._rows.exists() else []
        found = {}
        for line in lines:
            # The last line may be half written while the run goes on.
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                own = {
                    name: row[name]
                    for name in row
                    if name.startswith(COMPUTED) and "seconds" not in name
                }
                found[int(row["step"])] = own
        return found

    def finish(self):
        """Run to the end."""
        done = subprocess.run(
            self._command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout[-2000:]
        return self.rows()

    def crash(self, after):
        """Run until ``after`` steps are done, then kill every process of it at once."""
        with subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as launcher:
            everybody: list[psutil.Process] = []
            try:
                end = time.monotonic() + PATIENCE_S
                while len(self.rows()) < after:
                    assert launcher.poll() is None and time.monotonic() < end, (
                        "the run ended, or did not come so far"
                    )
                    time.sleep(0.05)
            finally:
                everybody = kill_all(launcher.pid)
        assert gone(everybody, within_s=30.0)


@pytest.fixture(scope="module")
def together(tmp_path_factory, tiny_policy):
    """All roles on one worker, without a break."""
    return Run(tmp_path_factory.mktemp("together"), "one", tiny_policy).finish()


@pytest.mark.nightly
def test_the_critic_learns_first_and_then_both_do(together):
    assert sorted(together) == [*range(1, STEPS + 1)]
    assert [row["policy/updates"] for row in together.values()] == [0, *[2] * (STEPS - 1)]
    assert not undescribed([*together.values()])
    assert all(row["critic/updates"] == 2 and row["critic/loss"] > 0 for row in together.values())
    assert together[1]["critic/value_mean"] == 0 != together[2]["critic/value_mean"]
    apart = [abs(row["policy/kl_sequence"]) for row in together.values()]
    assert max(apart[:2]) < 1e-5 < apart[2], "the actor has moved once before the third step"
    steered = [row["policy/kl_coefficient"] for row in together.values()]
    assert steered[0] == 0.01 > steered[1] > steered[2], "nothing lay off the reference"


@pytest.mark.nightly
def test_apart_and_killed_the_losses_are_the_same(tmp_path, tiny_policy, together):
    """To the bit: where the critic and the reference compute, and how often the run began, changes
    nothing."""
    run = Run(tmp_path, "two", tiny_policy, "critic.workers=[1]", "ref.workers=[1]")
    run.crash(after=KILLED_AFTER)
    before = run.rows()
    assert KILLED_AFTER <= len(before) < STEPS
    after = run.finish()
    assert after == together
    assert (tmp_path / "ppo" / "two" / "logs" / "model_worker-1.log").exists()


@pytest.mark.nightly
def test_asynchronously_the_critic_learns_beside_the_actor(tmp_path, tiny_policy):
    """At the trainer, from episodes that rollout workers stream; what the sampler says otherwise is
    weighed."""
    options = ("experiment=ppo_async", "total_train_steps=2", "rollout.sessions=4")
    rows = Run(tmp_path, "streamed", tiny_policy, *options).finish()
    assert sorted(rows) == [1, 2] and all(row["critic/updates"] == 2 for row in rows.values())
    assert rows[2]["policy/updates"] == 2 and rows[2]["policy/behaviour_weight_mean"] > 0
