"""The rollout function for TRL without TRL: shapes, masks, log-probabilities, failed rollouts."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realhf.api.config import BuiltinModelConfig
from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool
from realhf.aws.client.trl_rollout import PoolRollouts, episode_reward, task_of_prompt
from realhf.backends.builtin_policy import build_model, train_tokenizer
from tests.rollout.fake_env_server import FakeEnvServer

G = 2
CONFIG = BuiltinModelConfig(
    vocab_size=300, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, max_positions=256
)


@pytest.fixture(scope="module")
def fake_trainer() -> Any:
    tokenizer = train_tokenizer(["aws s3 ls"], CONFIG.vocab_size, CONFIG.max_positions)
    model = build_model(CONFIG, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=1)
    return SimpleNamespace(
        model=model,
        model_wrapped=model,
        processing_class=tokenizer,
        temperature=0.7,
        num_generations=G,
        num_generations_eval=1,
        accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped),
    )


def prompts(*tasks: dict[str, Any]) -> list[Any]:
    return [[{"role": "user", "content": json.dumps(task)}] for task in tasks for _ in range(G)]


def test_rows_are_token_exact(fake_trainer: Any) -> None:
    torch.manual_seed(0)
    fake_trainer.model.train()
    with FakeEnvServer() as fake, MultiTurnEnvPool(fake.url, G, max_turns=2, turn_tokens=5) as pool:
        found = PoolRollouts(pool)(prompts({"task_id": 1, "seed": 4}, {"task_id": 2}), fake_trainer)
        resets = [message["data"] for _, message in fake.messages if message["type"] == "reset"]
    assert resets == [{"chaos": False, "task_id": 1, "seed": 4}] * G + [{"chaos": False, "task_id": 2, "seed": 0}] * G
    assert {len(column) for column in found.values()} == {2 * G}
    assert found["status"] == ["max_turns"] * 4 and episode_reward([], **found) == [0.0] * 4
    assert fake_trainer.model.training, "the model's mode was not put back"
    for prompt, completion, logprobs, mask in zip(
        found["prompt_ids"], found["completion_ids"], found["logprobs"], found["env_mask"], strict=True
    ):
        assert len(completion) == len(logprobs) == len(mask) and 1 <= sum(mask) <= 10 and mask[-1]
        logits = fake_trainer.model.eval()(torch.tensor([prompt + completion])).logits[0].float() / 0.7
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion)[:, None])[:, 0]
        for sampled, said, true in zip(mask, logprobs, expected.tolist(), strict=True):
            assert said == pytest.approx(true if sampled else 0.0, abs=1e-4)


def test_a_failed_rollout_has_no_reward_and_no_loss(fake_trainer: Any) -> None:
    trick = {"reset": "error"}
    with (
        FakeEnvServer(lambda number, message: trick.get(message["type"])) as fake,
        MultiTurnEnvPool(fake.url, G, on_failure="drop") as pool,
    ):
        found = PoolRollouts(pool)(prompts({"task_id": 1}), fake_trainer)
    assert found["episode_reward"] == [None] * G and found["env_mask"] == [[0]] * G
    assert found["status"] == ["internal"] * G and all(found["prompt_ids"])


def test_prompts() -> None:
    assert task_of_prompt('{"task_id": 3}') == {"task_id": 3}
    with pytest.raises(ValueError, match="reset arguments"):
        task_of_prompt([{"role": "user", "content": "hello"}])
    with FakeEnvServer() as fake, MultiTurnEnvPool(fake.url, 1) as pool:
        trainer = SimpleNamespace(num_generations=G, num_generations_eval=1, model=SimpleNamespace(training=True))
        with pytest.raises(ValueError, match="2 times in a row"):
            PoolRollouts(pool)(prompts({"task_id": 1})[:1], trainer)
