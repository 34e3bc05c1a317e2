"""On-policy distillation from the command line: a teacher with a worker of its own, and a student
that comes nearer; and a policy that is told of its errors as its own teacher."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.test_end_to_end import undescribed
from tests.test_ppo_end_to_end import LETTERS

STEPS = 16
OPTIONS = (
    "experiment=grpo",
    "experiment_name=opd",
    "trial_name=one",
    f"total_train_steps={STEPS}",
    "ppo.algo=opd",
    "ppo.kl_loss_coef=0",
    "teacher.workers=[1]",
    "actor.optimizer.lr=0.01",
    "dataset.train_bs_n_seqs=4",
    "ppo.group_size=8",
    "gen.max_new_tokens=8",
    "rollout.max_turns=2",
    "rollout.max_total_tokens=500",
    "evaluation.episodes_per_task=0",
    "evaluation.greedy_episodes_per_task=0",
    "monitor.trackers=[]",
    "monitor.progress=false",
    "torch_threads=1",
)


def taught(policy: Path, folder: Path) -> Path:
    """A copy of the policy that has learned, within a second, to say the tokens 100 to 199."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        ids = torch.cat((torch.randint(0, 400, (32, 8)), torch.randint(100, 200, (32, 8))), 1)
        logits = model(input_ids=ids).logits[:, 7:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 8:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    shutil.copytree(policy, folder)
    model.save_pretrained(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_divergence_from_the_teacher_falls(tmp_path: Path, tiny_policy: Path) -> None:
    """The teacher prefers a hundred of its tokens; rewards play no part."""
    teacher = taught(tiny_policy, tmp_path / "teacher")
    (tmp_path / "letters.py").write_text(LETTERS)
    places = (
        f"env.path={tmp_path / 'letters.py'}:Letters",
        f"actor.path={tiny_policy}",
        f"teacher.path={teacher}",
    )
    command = [sys.executable, "-m", "realhf.launch", *OPTIONS, *places, f"fileroot={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    rows = [
        json.loads(line)
        for line in (tmp_path / "opd" / "one" / "metrics.jsonl").read_text().splitlines()
    ]
    assert not undescribed(rows)
    apart = [row["policy/kl_teacher"] for row in rows if "policy/kl_teacher" in row]
    assert len(apart) == STEPS and sum(apart[-3:]) < 0.7 * sum(apart[:3]), apart


STRICT = '''
class Strict:
    """Two turns, both of them wrong."""

    async def reset(self, task, *, seed):
        self.turns = 0
        return {"messages": [{"role": "user", "content": f"Say nothing. {seed}"}]}

    async def step(self, message):
        self.turns += 1
        answer = f"error: {len(message.content)} characters are too many"
        return {"messages": [{"role": "user", "content": answer}], "done": self.turns == 2, "reward": 0.0}
'''


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("experiment", ["grpo", "grpo_async"])
def test_a_policy_learns_from_the_errors_it_is_told(
    experiment: str, tmp_path: Path, tiny_policy: Path
) -> None:
    """Two steps without any reward, in turns and streamed."""
    (tmp_path / "strict.py").write_text(STRICT)
    of_opd = ("experiment=", "total_train_steps=", "ppo.algo=", "teacher.", "ppo.kl_loss_coef=")
    shared = [option for option in OPTIONS if not option.startswith(of_opd)]
    own = (f"experiment={experiment}", "total_train_steps=2", "ppo.algo=sdpo", "ppo.kl_loss_coef=0")
    places = (
        f"env.path={tmp_path / 'strict.py'}:Strict",
        f"actor.path={tiny_policy}",
        f"fileroot={tmp_path}",
    )
    command = [sys.executable, "-m", "realhf.launch", *shared, *own, *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    rows = [
        json.loads(line)
        for line in (tmp_path / "opd" / "one" / "metrics.jsonl").read_text().splitlines()
    ]
    assert not undescribed(rows)
    steps = [row for row in rows if "policy/kl_teacher" in row]
    assert len(steps) == 2
    assert all(row["feedback_inf/told"] == 1 and row["policy/kl_teacher"] > 0 for row in steps)
    assert all(row["policy/grad_norm"] > 0 for row in steps), steps
