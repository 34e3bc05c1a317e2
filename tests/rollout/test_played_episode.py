"""One episode: its tokens, its turns and rewards, and how outcomes become a sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.api.environment import (
    HELD_OUT,
    TRAIN,
    AssistantMessage,
    Environment,
    EnvironmentSpec,
    Task,
    Turn,
)
from realhf.api.evaluation import evaluation_report
from realhf.api.model import MEANS_OVER, GenOutput, GenRequest
from realhf.api.rollout import PlayedTurn, RolloutOutcome
from realhf.api.source import GroupSignal, SampleResult
from realhf.dataflow.model_function_call import merge_stats
from realhf.dataflow.rollouts.metrics import rollout_metrics
from realhf.env.loader.tasks import SeedTaskSet
from realhf.monitor.metrics import evaluation_metrics, public_names
from realhf.monitor.run_files import append_episodes
from realhf.rollout.episode import (
    Conversation,
    EpisodeLimits,
    EpisodeRequest,
    RecordingEnvironment,
    TokenBuffer,
    play_episode,
    state_number,
)
from realhf.rollout.group_player import PlayedGroup, episode_results, held_out_tasks
from realhf.rollout.interface import rollout_statistics
from realhf.rollout.player import SlotEnvironment
from realhf.rollout.rollout_sample import outcomes_to_sample, transcript
from realhf.transport.codec import decode_sample, encode_sample
from tests.monitor.rollouts.made_rollouts import outcome as made
from tests.rollout.scripted_environment import Scripted, World, said
from tests.rollout.word_chat import CUE, END, FOLLOW, WordChat


def turn(ids: list[int], version: int = 3) -> GenOutput:
    return GenOutput(ids, [-0.5] * len(ids), [version] * len(ids), "stop")


def test_an_episode_keeps_every_id_in_place() -> None:
    buffer = TokenBuffer([1, 2, 3], 20)
    buffer.append_policy(turn([4, 5], version=1))
    buffer.append_environment([6, 7, 8])
    assert buffer.prefix() == [1, 2, 3, 4, 5, 6, 7, 8]
    buffer.append_policy(turn([9], version=2))
    buffer.check()
    assert buffer.completion_ids == [4, 5, 6, 7, 8, 9]
    assert buffer.loss_mask == [True, True, False, False, False, True]
    assert buffer.logprobs == [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5]
    assert buffer.versions == [1, 1, -1, -1, -1, 2]
    assert buffer.room == 11


def test_what_breaks_the_accounting_is_refused() -> None:
    buffer = TokenBuffer([1], 4)
    with pytest.raises(ValueError, match="must follow a policy turn"):
        buffer.append_environment([2])
    with pytest.raises(ValueError, match="1 logprobs"):
        buffer.append_policy(GenOutput([2, 3], [0.0], [0, 0], "stop"))
    with pytest.raises(ValueError, match="leaves 3"):
        buffer.append_policy(turn([2, 3, 4, 5]))
    buffer.append_policy(turn([2]))
    with pytest.raises(ValueError, match="must follow the prompt or an observation"):
        buffer.append_policy(turn([2]))
    buffer.append_environment([3])
    with pytest.raises(AssertionError, match="after the last policy turn"):
        buffer.check()
    with pytest.raises(ValueError, match="no tokens"):
        TokenBuffer([], 4)


async def test_a_witness_passes_everything_on_and_keeps_the_answers_of_the_last_episode() -> None:
    world = World()
    env: Environment = RecordingEnvironment(Scripted(world))
    assert isinstance(env, RecordingEnvironment)
    for seed in (1, 2):
        opening = await env.reset({"text": f"task {seed}"}, seed=seed)
        assert env.opening is opening and env.turns == []
        turn = await env.step(AssistantMessage("go", text="go"))
        assert env.turns == [turn]
    await env.close()
    assert world.closed == 1


def test_words_of_an_episode_do_nothing_to_the_terminal_and_can_be_written(tmp_path: Path):
    """Half of a character in what an environment said used to end the run that wrote it down."""
    turn = PlayedTurn("ls\t\x1b[2J", "a\r\nb\rc \u202eod\u0000 \ud800", 0.5)
    text = transcript(made(0.5, turns=(turn,), turn_rewards=[0.5]), header="step 1")
    assert text.endswith("\n  $ ls\t\\x1b[2J\n    a\nb\\rc \\u202eod\\x00 \\ud800")
    append_episodes(tmp_path, 1, [text])
    assert text in (tmp_path / "episodes.txt").read_text()


def test_failed_episodes_are_counted_apart() -> None:
    report = evaluation_report(
        episode_results([outcome(), outcome("max_turns"), outcome("internal")]), 7
    )
    assert report["overall"]["success"] == 0.5
    assert (report["overall"]["episodes"], report["overall"]["failed"]) == (2, 1)
    assert report["overall"]["version"] == 7
    assert report["warmup"] == report["overall"]


def test_an_environment_without_tasks_is_evaluated_on_seeds_that_are_not_trained_on() -> None:
    """As many as episodes were asked for, since every seed is a task; they are shown as one
    template."""
    spec = EnvironmentSpec("mine", lambda _: None, lambda split: SeedTaskSet("Mine", split))  # type: ignore[arg-type,return-value]
    played = held_out_tasks(spec, HELD_OUT, 12, 200)
    trained = {spec.tasks(TRAIN).instantiate("Mine", seed).seed for seed in range(100)}
    assert len({task.seed for task in played}) == len({task.id for task in played}) == 12
    assert trained.isdisjoint(task.seed for task in played)
    assert {task.template for task in played} == {"Mine"}


LIMITS = EpisodeLimits(max_turns=3, max_total_tokens=120, turn_tokens=20)


class Engine:
    """Gives these outputs one after the other, the last one for ever; records what it was asked."""

    def __init__(self, *outputs: GenOutput) -> None:
        self.outputs = list(outputs)
        self.asked: list[GenRequest] = []

    async def generate(self, request: GenRequest) -> GenOutput:
        self.asked.append(request)
        return self.outputs.pop(0) if len(self.outputs) > 1 else self.outputs[0]

    def free(self, slots: Sequence[int]) -> None:
        raise AssertionError("the player frees the slots")


async def play(
    engine: Engine,
    world: World | None = None,
    limits: EpisodeLimits = LIMITS,
    turns: int = 0,
    **task: Any,
) -> RolloutOutcome:
    spec = (world or World()).spec()
    env = SlotEnvironment(spec.name, lambda: spec.make(""), message_timeout_s=5.0, patience_s=0.0)
    speaker = Conversation(WordChat(), limits, engine, slot=4, seed=77)
    wanted = EpisodeRequest(
        0, Task("t-1", "easy", {"text": "do it", **task}, seed=11, max_turns=turns)
    )
    return await play_episode(env, wanted, speaker, limits.max_turns)


def answer(**turn: Any) -> World:
    """A world that answers the third message with this turn, and the others as usual."""
    return World(lambda env, message: Turn(**turn) if len(env.said) == 3 else None)


async def test_the_engine_continues_exactly_what_is_kept() -> None:
    engine = Engine(said("aws s3 ls"))
    outcome = await play(engine)
    ids = [*map(ord, "do it"), CUE]
    for turn, asked in enumerate(engine.asked):
        assert asked == GenRequest(4, ids, 0, 77)
        ids = [*ids, *said("aws s3 ls").token_ids]
        ids += [FOLLOW, *map(ord, "saw aws s3 ls"), CUE] if turn < 2 else []
    assert outcome.prompt_ids + outcome.completion_ids == ids
    assert [turn.text for turn in outcome.turns] == ["aws s3 ls"] * 3
    assert (outcome.task_id, outcome.group, outcome.seed, outcome.task_text) == (
        "t-1",
        "easy",
        11,
        "do it",
    )


async def test_a_long_answer_is_cut_until_a_turn_fits() -> None:
    engine = Engine(said("aws s3 ls"))
    long = World(
        lambda env, message: Turn([{"role": "user", "content": "x" * 60 + "y" * 60}], reward=0.0)
    )
    await play(engine, long)
    assert len(engine.asked) > 1 and len(engine.asked[1].token_ids) <= 100
    text = engine.asked[1].token_ids[6 + 10 + 1 : -1]
    assert text[0] == ord("x") and text[-1] == ord("y") and len(text) > 40


async def test_many_long_answers_are_cut_until_a_turn_fits() -> None:
    """Each to its share, and a short one not at all; what cannot fit is not tokenised to find that
    out."""
    sizes: list[int] = []

    class Counting(WordChat):
        def following_messages(self, messages: Any, **more: Any) -> list[int]:
            sizes.append(sum(len(message["content"]) for message in messages))
            return super().following_messages(messages, **more)

    letters = "abcdefghijklmnopqrst"
    for long, most in ((400, 400 * 20 + 5), (100_000, 32 * 164)):
        sizes.clear()
        answers = [{"role": "user", "content": letter * long} for letter in letters]
        world = World(
            lambda env, message, told=answers: Turn(
                [*told, {"role": "user", "content": "short"}], reward=0.0
            )
        )
        engine = Engine(said("aws s3 ls"))
        speaker = Conversation(Counting(), EpisodeLimits(2, 200, 20), engine, slot=4, seed=77)
        outcome = await play_episode(
            world.spec().make(""), EpisodeRequest(0, Task("t-1", payload={})), speaker, 2
        )
        assert outcome.status == "max_turns" and len(engine.asked) == 2
        read = "".join(map(chr, engine.asked[1].token_ids[6 + 10 + 1 : -1]))
        assert read.endswith("short") and {*letters} <= {*read}, read
        assert len(engine.asked[1].token_ids) <= 180 and max(sizes) <= most and len(sizes) <= 3


async def test_the_end_of_a_truncated_turn_is_added_without_loss() -> None:
    engine = Engine(said("ab", finish="length"))
    outcome = await play(engine)
    after = engine.asked[1].token_ids[8:]
    assert after == [END, FOLLOW, *map(ord, "saw ab"), CUE]
    assert outcome.loss_mask[:2] == [True, True] and not any(outcome.loss_mask[2 : 2 + len(after)])


async def test_no_room_for_another_turn_ends_with_token_budget() -> None:
    outcome = await play(Engine(said("aws s3 ls")), limits=EpisodeLimits(3, 36, 20))
    assert (outcome.status, outcome.reward, outcome.valid, outcome.truncated) == (
        "token_budget",
        0.25,
        True,
        True,
    )
    assert outcome.loss_mask[-1]


@pytest.mark.parametrize(
    ("last", "status", "reward"),
    [
        ({"done": True, "metrics": {"success": 1.0}, "reward": 0.25}, "achieved", 0.75),
        ({"metrics": {"success": 1.0}, "reward": 0.25}, "achieved", 0.75),
        ({"done": True, "reward": 0.25}, "finished", 0.75),
        ({"reward": 0.25}, "max_turns", 0.75),
        ({"reward": None}, "max_turns", 0.5),
        ({"reward": 0.9, "final": True, "done": True}, "finished", 0.9),
    ],
)
async def test_rewards_are_summed_and_the_status_tells_the_end(
    last: dict[str, Any], status: str, reward: float
) -> None:
    outcome = await play(Engine(said("aws s3 ls")), answer(**last))
    assert (outcome.status, outcome.reward) == (status, reward)
    assert outcome.achieved is (status == "achieved")
    assert outcome.completion_ids[-1] == END and len(outcome.turns) == 3


async def test_named_rewards_and_metrics_are_kept() -> None:
    world = World(
        lambda env, message: Turn(
            reward=0.5, rewards={"form": 0.5}, metrics={"rows": len(env.said)}
        )
    )
    outcome = await play(Engine(said("go")), world)
    assert outcome.rewards == {"form": 1.5} and outcome.metrics == {"rows": 3}


@pytest.mark.parametrize(
    "broken", [{"reward": float("nan")}, {"rewards": {"a": float("inf")}}, {"reward": 1e300}]
)
async def test_a_number_that_is_none_is_a_failure_not_a_zero(broken: dict[str, Any]) -> None:
    """A reward beyond fp32 is infinite where it is stored."""
    outcome = await play(Engine(said("aws s3 ls")), answer(**broken))
    assert (outcome.status, outcome.reward, outcome.valid, outcome.achieved) == (
        "internal",
        None,
        False,
        False,
    )
    assert "not a finite number" in outcome.message


async def test_rewards_whose_sum_no_fp32_holds_are_a_failure() -> None:
    outcome = await play(Engine(said("go")), World(lambda env, message: Turn(reward=3e38)))
    assert (outcome.status, outcome.reward, outcome.valid) == ("internal", None, False)
    assert "the sum of rewards is 6e+38" in outcome.message


async def test_an_engine_that_samples_nothing_is_a_failure_of_the_policy() -> None:
    outcome = await play(Engine(GenOutput([], [], [], "interrupted")))
    assert (outcome.status, outcome.reward) == ("policy", None)


async def test_a_full_context_ends_the_episode_as_a_spent_budget_does() -> None:
    outcome = await play(Engine(said("aws s3 ls"), GenOutput([], [], [], "length")))
    assert (outcome.status, outcome.reward, outcome.valid, outcome.truncated) == (
        "token_budget",
        0.25,
        True,
        True,
    )
    assert outcome.loss_mask == [True] * 10, "the answer that nobody read is gone"


async def test_a_prompt_that_fills_the_context_names_the_option() -> None:
    outcome = await play(Engine(GenOutput([], [], [], "length")))
    assert outcome.status == "policy" and "rollout.max_total_tokens" in outcome.message


async def test_parts_of_a_turn_join_and_a_turn_that_fills_the_context_is_complete() -> None:
    parts = [
        said("aws s3 ", "interrupted"),
        said("ls", "interrupted"),
        GenOutput([], [], [], "length"),
        said("go"),
    ]
    engine = Engine(*parts)
    outcome = await play(engine)
    assert [asked.sampled for asked in engine.asked[:4]] == [0, 7, 9, 0]
    assert [turn.text for turn in outcome.turns] == ["aws s3 ls", "go", "go"]


async def test_turns_that_run_out_are_no_truncation_unless_the_last_was_cut() -> None:
    for finish, truncated in (("stop", False), ("length", True)):
        outcome = await play(
            Engine(said("aws s3 ls", finish=finish)), limits=EpisodeLimits(1, 120, 20)
        )
        assert (outcome.status, outcome.truncated) == ("max_turns", truncated)


@pytest.mark.parametrize(("turns", "played"), [(1, 1), (2, 2), (0, 2), (9, 2)])
async def test_a_task_may_have_fewer_turns_than_the_run_allows(turns: int, played: int) -> None:
    outcome = await play(Engine(said("aws s3 ls")), limits=EpisodeLimits(2, 120, 20), turns=turns)
    assert (outcome.status, outcome.valid, len(outcome.turns)) == ("max_turns", True, played)
    assert outcome.out_of_turns is (turns in (0, 9)), (
        "only rollout.max_turns is an option that can be raised"
    )


async def test_episodes_that_the_limit_of_turns_ended_are_counted() -> None:
    """Neither a metric nor a report said it: most held-out episodes had ended so, and nothing
    seemed wrong."""
    cut = await play(Engine(said("aws s3 ls")), answer(reward=0.0))
    solved = await play(Engine(said("aws s3 ls")), answer(metrics={"success": 1.0}))
    lost = await play(Engine(GenOutput([], [], [], "interrupted")))
    outcomes = [cut, solved, cut, lost]
    assert rollout_statistics(outcomes)["out_of_turns"] == 2 / 3
    report = evaluation_report(episode_results(outcomes), 7)
    assert report["overall"]["out_of_turns"] == 2 / 3
    assert (
        evaluation_metrics({"sampled": report}, "heldout")[
            "eval/heldout/sampled/out_of_turns/overall"
        ]
        == 2 / 3
    )
    note = json.dumps(PlayedGroup(outcomes).statistics())
    earlier = json.dumps(
        {name: value for name, value in json.loads(note).items() if name != "out_of_turns"}
    )
    results = [
        SampleResult(name, metadata={"rollout": text})
        for name, text in (("a", note), ("b", earlier))
    ]
    assert rollout_metrics(results)["out_of_turns"] == 2 / 3
    for own in ("actor_gen/out_of_turns", "rollout/out_of_turns"):
        assert public_names({own: 0.5}) == {"length/out_of_turns": 0.5}


async def test_a_first_prompt_without_room_for_a_turn_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ValueError, match="do not fit into max_total_tokens=120"):
        await play(Engine(said("go")), text="x" * 110)


async def test_what_is_no_turn_is_a_failure_that_names_the_environment() -> None:
    world = World(lambda env, message: {"messages": []})
    outcome = await play(Engine(said("go")), world)
    assert outcome.status == "internal" and outcome.message.startswith(
        "environment scripted: step returned"
    )


async def test_a_turn_begins_in_the_state_that_the_environment_names_or_in_the_text_that_it_answers() -> (
    None
):
    """The first one in the opening. A key and the same words as a text are different states."""
    words = [{"role": "user", "content": "a"}]
    turns = [Turn(words, state_key="a"), Turn(words), Turn(done=True)]
    outcome = await play(Engine(said("go")), World(lambda env, message: turns[len(env.said) - 1]))
    opening, *states = outcome.turn_states
    assert states == [state_number((), "a"), state_number(words)] and len({opening, *states}) == 3


@pytest.mark.parametrize(
    ("turns", "rewards"),
    [
        ([{"reward": 0.5}, {}, {"reward": 0.25, "done": True}], [0.5, 0.0, 0.25]),
        ([{"reward": 0.5}, {"reward": 0.25, "final": True, "done": True}], [0.5, -0.25]),
        (
            [{"reward": 1.0, "final": True}, {"final": True}, {"reward": 3.0, "final": True}],
            [1.0, 0.0, 2.0],
        ),
    ],
)
async def test_rewards_of_turns_sum_to_that_of_the_episode(
    turns: list[dict[str, Any]], rewards: list[float]
) -> None:
    """One that is final counts as its difference to those before it. Every turn has its place among
    the tokens."""
    answers = World(
        lambda env, message: Turn([{"role": "user", "content": "on"}], **turns[len(env.said) - 1])
    )
    outcome = await play(Engine(said("go")), answers)
    assert outcome.turn_rewards == rewards and sum(outcome.turn_rewards) == outcome.reward
    length = len(said("go").token_ids)
    assert len(outcome.turn_starts) == len(rewards)
    assert all(
        outcome.completion_ids[start : start + length] == said("go").token_ids
        for start in outcome.turn_starts
    )


def outcome(
    status: str = "achieved",
    *,
    prompt: int = 3,
    sampled: int = 2,
    env: int = 2,
    reward: float = 1.0,
):
    """prompt ids 1.., then `sampled` policy tokens, `env` environment tokens, `sampled` policy
    tokens."""
    mask = [True] * sampled + [False] * env + [True] * sampled
    failed = status == "internal"
    return RolloutOutcome(
        status=status,
        prompt_ids=list(range(1, prompt + 1)),
        completion_ids=list(range(100, 100 + len(mask))),
        logprobs=[-0.5 if m else 0.0 for m in mask],
        versions=[7 if m else -1 for m in mask],
        loss_mask=mask,
        reward=None if failed else reward,
        achieved=status == "achieved",
        progress=1.0,
        turns=(),
        task_id="1",
        group="warmup",
        seed=0,
    )


def test_figures_of_several_workers_and_rounds_are_those_of_all_their_rollouts() -> None:
    """A worker with one rollout of a group counted for as much as one with seven, and one whose
    rollouts all failed for as much as any: success of the hard group was 0.5."""
    lucky = replace(outcome(), group="hard")
    unlucky = replace(outcome("max_turns", reward=0.0), group="hard")
    slow = replace(outcome(), rewards={"speed": 0.25}, metrics={"calls": 6.0})
    fast = replace(outcome(), rewards={"speed": 1.0}, metrics={"calls": 2.0})
    shards = [[lucky, *[slow] * 7], [*[unlucky] * 7, fast], [outcome("internal")] * 8, [fast] * 2]
    parts = [rollout_statistics(shard) for shard in shards]
    sizes = [len(shard) for shard in shards]
    whole = rollout_statistics([one for shard in shards for one in shard])
    first = merge_stats(parts[:3], sizes[:3], parallel=True)
    merged = merge_stats([first, parts[3]], [sum(sizes[:3]), sizes[3]], parallel=False)
    assert merged["success/hard"] == 1 / 8 and merged["metric/calls"] == (7 * 6 + 3 * 2) / 10
    assert merged.pop(MEANS_OVER) == whole.pop(MEANS_OVER) and merged == pytest.approx(whole)
    none = [rollout_statistics([outcome("internal")] * 2)] * 2
    assert merge_stats(none, [2, 2], parallel=True)["success"] == 0.0


def test_shifted_keys_sit_before_the_token_they_predict() -> None:
    sample = outcomes_to_sample(["a"], [[outcome(), outcome(prompt=1, sampled=1, env=0)]])
    assert sample.seqlens["packed_input_ids"] == [[9, 3]]
    assert sample.seqlens["packed_logprobs"] == [[8, 2]]
    mask = sample["loss_mask"]
    logprobs = sample["packed_logprobs"]
    versions = sample["packed_versions"]
    shifted_mask = torch.cat([mask[1:9], mask[10:12]])
    assert torch.equal(logprobs != 0, shifted_mask)
    assert torch.equal(versions == 7, shifted_mask)
    assert sample["packed_input_ids"].tolist() == [
        1,
        2,
        3,
        100,
        101,
        102,
        103,
        104,
        105,
        1,
        100,
        101,
    ]
    assert not bool((sample["prompt_mask"] & mask).any())
    assert sample["prompt_mask"].sum() == 4


def test_a_failed_rollout_trains_nothing_and_has_no_reward() -> None:
    sample = outcomes_to_sample(["a"], [[outcome(), outcome("internal")]])
    assert sample["outcome"].tolist() == [0, 3]
    assert not bool(sample["loss_mask"][9:].any())
    assert json.loads(sample.metadata["rewards"][0]) == [1.0, None]
    assert json.loads(sample.metadata["achieved"][0]) == [True, None]


def test_a_group_with_too_few_valid_rollouts_trains_nothing() -> None:
    groups = [[outcome(), outcome("internal")], [outcome(), outcome()]]
    sample = outcomes_to_sample(["a", "b"], groups, min_group_size=2)
    assert sample["outcome"].tolist() == [2, 3, 0, 0]
    assert sample["loss_mask"].reshape(4, 9).any(dim=1).tolist() == [False, False, True, True]


def test_a_rollout_that_failed_before_its_prompt_keeps_its_place() -> None:
    broken = outcome("internal", prompt=0, sampled=0, env=0)
    sample = outcomes_to_sample(["a", "b"], [[broken, outcome()], [outcome(), broken]])
    assert sample.seqlens["packed_input_ids"] == [[1, 9], [9, 1]]
    assert sample.seqlens["packed_logprobs"] == [[0, 8], [8, 0]]


@pytest.mark.parametrize(
    ("status", "last_turn_cut", "cut"),
    [
        ("achieved", False, False),
        ("achieved", True, False),
        ("finished", True, False),
        ("max_turns", False, False),
        ("max_turns", True, True),
        ("token_budget", False, True),
    ],
)
def test_episodes_ended_by_a_limit_of_tokens_are_valid_and_marked(
    status: str, last_turn_cut: bool, cut: bool
) -> None:
    sample = outcomes_to_sample(["a"], [[replace(outcome(status), last_turn_cut=last_turn_cut)]])
    assert sample["outcome"].tolist() == [0]
    assert sample["seq_no_eos_mask"].tolist() == [cut]


def played(status: str = "achieved", **more: object) -> RolloutOutcome:
    """Two turns of two tokens, with two of the environment between, and a reward of each."""
    return replace(
        outcome(status),
        turn_starts=[0, 4],
        turn_rewards=[0.25, 0.75],
        turn_states=[-7, 1 << 40],
        **more,
    )


def test_turns_are_numbered_where_the_policy_spoke() -> None:
    """-1 on the prompt and the environment's tokens; what does not train has no turn, and one reward of 0."""
    branch = replace(
        outcome(sampled=1, env=0), turn_starts=[0], turn_rewards=[0.5, 0.0, 1.0], first_turn=2
    )
    branch = replace(branch, turn_states=[4, 5, 6])
    groups = [
        [played(), played("internal")],
        [played(branches=(replace(branch, completion_ids=[1, 2]),))],
    ]
    sample = outcomes_to_sample(["a", "b"], groups, turns=True)
    none = [-1] * 9
    one = [-1, -1, -1, 0, 0, -1, -1, 1, 1]
    assert sample["turn_ids"].tolist() == [*one, *none, *one, -1, -1, -1, 2, 2]
    assert sample["rollout_index"].tolist() == [0, 1, 0, 0], (
        "a branch has the number of its rollout"
    )
    assert sample.seqlens["turn_rewards"] == [[2, 1], [2, 3]]
    assert sample["turn_rewards"].tolist() == [0.25, 0.75, 0.0, 0.25, 0.75, 0.5, 0.0, 1.0]
    assert sample["turn_states"].tolist() == [-7, 1 << 40, 0, -7, 1 << 40, 4, 5, 6]
    assert sample.seqlens["turn_states"] == sample.seqlens["turn_rewards"]
    assert torch.equal(sample["turn_ids"] >= 0, sample["loss_mask"])
    assert (sample["turn_ids"].dtype, sample["turn_rewards"].dtype) == (torch.int32, torch.float32)


def test_a_group_whose_conversations_are_judged_apart_has_signal() -> None:
    """Its main trajectories alone were looked at, so that it gave way although rows of it had an
    advantage. What is known of it travels with the sample, as master and journal get it."""
    worse = replace(outcome(), reward=0.25)
    lost = replace(outcome("internal"), reward=None)
    groups = [[played(branches=(worse, lost)), played()], [played(branches=(played(),)), played()]]
    whole = outcomes_to_sample(["a", "b"], groups)
    meta = decode_sample([bytes(frame) for frame in encode_sample(whole.meta())])
    apart, alike = (
        SampleResult.from_metadata(
            name, {key: column[row] for key, column in meta.metadata.items()}
        )
        for row, name in enumerate(meta.ids)
    )
    assert apart.branch_rewards == [0.25] and apart.rewards == alike.rewards and not apart.metadata
    assert GroupSignal().has_signal(apart) and not GroupSignal().has_signal(alike)
    trained = PolicyGradientInterface({}).prepare(whole.remap_keys({"env_rewards": "rewards"}))[1]
    assert trained["groups_with_signal"] == 1


def test_turns_are_made_only_where_they_are_asked_for_and_change_nothing_else() -> None:
    plain, more = (
        outcomes_to_sample(["a"], [[played(), played()]], turns=turns) for turns in (False, True)
    )
    assert more.keys - plain.keys == {"turn_ids", "turn_rewards", "turn_states"}
    assert all(torch.equal(plain[key], more[key]) for key in plain.keys)


def test_two_turns_without_a_token_between_them_stay_two() -> None:
    row = replace(
        outcome(sampled=2, env=0),
        turn_starts=[0, 1, 3],
        turn_rewards=[1.0, 2.0, 3.0],
        turn_states=[0] * 3,
    )
    sample = outcomes_to_sample(["a"], [[row]], turns=True)
    assert sample["turn_ids"].tolist() == [-1, -1, -1, 0, 1, 1, 2]
