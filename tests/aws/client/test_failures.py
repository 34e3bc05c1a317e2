"""A pool against a fake server that misbehaves on purpose, its settings, and its rollouts for TRL
without TRL."""

import json
from types import SimpleNamespace

import pytest
import torch

from realhf.api.config import BuiltinModelConfig
from realhf.aws.client.multi_turn_pool import (
    MultiTurnEnvPool,
    pool_arguments,
    pool_from_environment,
)
from realhf.aws.client.session_group import GroupError
from realhf.aws.client.trl_rollout import PoolRollouts, episode_reward, task_of_prompt
from realhf.backends.builtin_policy import build_model, train_tokenizer
from tests.rollout.fake_env_server import FakeEnvServer
from tests.rollout.word_chat import ScriptedPolicy

MODES = ["lockstep", "independent"]


def say(task: str, turn: int) -> str:
    return f"aws turn {turn}"


class OnceAt:
    """The trick at the first ``times`` messages of the kind."""

    def __init__(self, trick: str, kind: str, times: int = 1) -> None:
        self.kind = kind
        self.trick = trick
        self.times = times

    def __call__(self, number: int, message) -> str | None:
        if message["type"] != self.kind or self.times == 0:
            return None
        self.times -= 1
        return self.trick


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("trick", "status"), [("hang", "timeout"), ("drop", "lost"), ("error", "internal")]
)
@pytest.mark.parametrize("kind", ["reset", "step"])
@pytest.mark.parametrize("mode", MODES)
def test_a_failed_environment_is_dropped_or_played_again(
    mode: str, kind: str, trick: str, status: str
):
    for on_failure, expected in (
        ("drop", [status] + ["achieved"] * 4),
        ("retry", ["achieved"] * 5),
    ):
        with (
            FakeEnvServer(OnceAt(trick, kind)) as fake,
            MultiTurnEnvPool(fake.url, 2, on_failure=on_failure, message_timeout_s=2.0) as pool,
        ):
            outcomes = pool.run_group({}, ScriptedPolicy(say), group_size=5, mode=mode)
            again = pool.run_group({}, ScriptedPolicy(say), group_size=5, mode=mode)
            assert fake.connections == 3
        statuses = [outcome.status for outcome in outcomes]
        assert statuses == expected if mode == "lockstep" else sorted(statuses) == sorted(expected)
        for outcome in outcomes:
            if outcome.status == "achieved":
                assert outcome.reward == 1.0 and [turn.text for turn in outcome.turns] == [
                    "aws turn 0",
                    "aws turn 1",
                ]
            else:
                assert outcome.reward is None and not outcome.valid and outcome.message
        assert all(outcome.status == "achieved" for outcome in again), "the next run starts whole"


def test_retry_is_done_once_only():
    with (
        FakeEnvServer(OnceAt("error", "step", times=2)) as fake,
        MultiTurnEnvPool(fake.url, 1) as pool,
    ):
        outcomes = pool.run_group({}, ScriptedPolicy(say), group_size=2)
        assert [outcome.status for outcome in outcomes] == ["internal", "achieved"]


@pytest.mark.parametrize("mode", MODES)
def test_raise(mode: str):
    with (
        FakeEnvServer(OnceAt("error", "step")) as fake,
        MultiTurnEnvPool(fake.url, 2, on_failure="raise") as pool,
    ):
        with pytest.raises(GroupError, match="internal") as caught:
            pool.run_group({}, ScriptedPolicy(say), mode=mode)
        assert sorted(outcome.status for outcome in caught.value.outcomes) == [
            "achieved",
            "internal",
        ]


@pytest.mark.parametrize("mode", MODES)
def test_the_last_reward_counts_where_the_server_says_level(mode: str):
    for reward_mode, expected in (("level", 0.5), ("potential", 1.0)):
        with (
            FakeEnvServer(metadata={"reward_mode": reward_mode}) as fake,
            MultiTurnEnvPool(fake.url, 2) as pool,
        ):
            assert pool.reward_mode == reward_mode
            assert [
                outcome.reward for outcome in pool.run_group({}, ScriptedPolicy(say), mode=mode)
            ] == [expected] * 2


def test_stepping_by_hand_and_recording_once():
    told = []
    curriculum = SimpleNamespace(record_result=lambda *result: told.append(result))
    with FakeEnvServer() as fake, MultiTurnEnvPool(fake.url, 2, curriculum) as pool:
        assert [result.reward for result in pool.reset_group({"task_id": 1}, seed=4)] == [
            None,
            None,
        ]
        first, second = pool.run_group_step(["aws a", None])
        assert first is not None and first.reward == 0.5 and second is None
        outcomes = pool.run_group({}, ScriptedPolicy(say))
        assert told == [] and pool.record_group_result("task", outcomes).mean == 1.0
        assert told == [("task", 1.0, 1.0)]
        with pytest.raises(ValueError, match="lockstep, independent"):
            pool.run_group({}, ScriptedPolicy(say), mode="serial")


def test_a_pool_is_configured_by_variables_and_arguments(monkeypatch: pytest.MonkeyPatch):
    numbers = {"size": 8, "max_turns": 6, "max_total_tokens": 4096}
    assert pool_arguments({}) == {"base_url": "http://127.0.0.1:8100", "token": None, **numbers}
    for name, text in {"NUM_GENERATIONS": "4", "MAX_TURNS": "3", "AWS_RL_ENV_TOKEN": "t"}.items():
        monkeypatch.setenv(name, text)
    assert (
        pool_arguments({"NUM_GENERATIONS": "4", "AWS_RL_ENV_URL": "http://a:1"})["base_url"]
        == "http://a:1"
    )
    assert pool_from_environment().size == 4
    assert pool_from_environment(size=2).size == 2


@pytest.mark.parametrize("text", ["0", "-1", "many", "2.5"])
def test_a_bad_number_is_named(text: str):
    with pytest.raises(ValueError, match="MAX_TURNS"):
        pool_arguments({"MAX_TURNS": text})


G = 2
CONFIG = BuiltinModelConfig(
    vocab_size=300,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    intermediate_size=64,
    max_positions=256,
)


@pytest.fixture(scope="module")
def fake_trainer():
    tokenizer = train_tokenizer(["aws s3 ls"], CONFIG.vocab_size, CONFIG.max_positions)
    model = build_model(
        CONFIG, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=1
    )
    return SimpleNamespace(
        model=model,
        model_wrapped=model,
        processing_class=tokenizer,
        temperature=0.7,
        num_generations=G,
        num_generations_eval=1,
        accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped),
    )


def prompts(*tasks):
    return [[{"role": "user", "content": json.dumps(task)}] for task in tasks for _ in range(G)]


@pytest.mark.slow
def test_rows_are_token_exact(fake_trainer) -> None:
    torch.manual_seed(0)
    fake_trainer.model.train()
    with FakeEnvServer() as fake, MultiTurnEnvPool(fake.url, G, max_turns=2, turn_tokens=5) as pool:
        found = PoolRollouts(pool)(prompts({"task_id": 1, "seed": 4}, {"task_id": 2}), fake_trainer)
        resets = [message["data"] for _, message in fake.messages if message["type"] == "reset"]
    assert (
        resets
        == [{"chaos": False, "task_id": 1, "seed": 4}] * G
        + [{"chaos": False, "task_id": 2, "seed": 0}] * G
    )
    assert {len(column) for column in found.values()} == {2 * G}
    assert found["status"] == ["max_turns"] * 4 and episode_reward([], **found) == [0.0] * 4
    assert fake_trainer.model.training, "the model's mode was not put back"
    for prompt, completion, logprobs, mask in zip(
        found["prompt_ids"],
        found["completion_ids"],
        found["logprobs"],
        found["env_mask"],
        strict=True,
    ):
        assert len(completion) == len(logprobs) == len(mask) and 1 <= sum(mask) <= 10 and mask[-1]
        logits = (
            fake_trainer.model.eval()(torch.tensor([prompt + completion])).logits[0].float() / 0.7
        )
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(
            -1, torch.tensor(completion)[:, None]
        )[:, 0]
        for sampled, said, true in zip(mask, logprobs, expected.tolist(), strict=True):
            assert said == pytest.approx(true if sampled else 0.0, abs=1e-4)


def test_a_failed_rollout_has_no_reward_and_no_loss(fake_trainer) -> None:
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
        trainer = SimpleNamespace(
            num_generations=G, num_generations_eval=1, model=SimpleNamespace(training=True)
        )
        with pytest.raises(ValueError, match="2 times in a row"):
            PoolRollouts(pool)(prompts({"task_id": 1})[:1], trainer)
