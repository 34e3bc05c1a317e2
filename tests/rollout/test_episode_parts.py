"""The parts of an episode: its tokens, what is kept of its environment, what a person reads, and what is held out."""

from __future__ import annotations

from pathlib import Path

import pytest

from realhf.api.environment import HELD_OUT, TRAIN, AssistantMessage, Environment, EnvironmentSpec, PlayedTurn
from realhf.api.evaluation import evaluation_report
from realhf.api.model import GenOutput
from realhf.env.loader.tasks import SeedTaskSet
from realhf.monitor.run_files import append_episodes
from realhf.rollout.episode import TokenBuffer, Witness
from realhf.rollout.group_player import episode_results, held_out_tasks
from realhf.rollout.rollout_sample import transcript
from tests.monitor.rollouts.made_rollouts import outcome as made
from tests.rollout.scripted_environment import Scripted, World
from tests.rollout.test_rollout_sample import outcome


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
    with pytest.raises(ValueError, match="follow a policy turn"):
        buffer.append_environment([2])
    with pytest.raises(ValueError, match="1 logprobs"):
        buffer.append_policy(GenOutput([2, 3], [0.0], [0, 0], "stop"))
    with pytest.raises(ValueError, match="leaves 3"):
        buffer.append_policy(turn([2, 3, 4, 5]))
    buffer.append_policy(turn([2]))
    with pytest.raises(ValueError, match="follows the prompt or an observation"):
        buffer.append_policy(turn([2]))
    buffer.append_environment([3])
    with pytest.raises(AssertionError, match="after the last policy turn"):
        buffer.check()
    with pytest.raises(ValueError, match="no tokens"):
        TokenBuffer([], 4)


async def test_a_witness_passes_everything_on_and_keeps_the_answers_of_the_last_episode() -> None:
    world = World()
    env: Environment = Witness(Scripted(world))
    assert isinstance(env, Witness)
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
    report = evaluation_report(episode_results([outcome(), outcome("max_turns"), outcome("internal")]), 7)
    assert report["overall"]["success"] == 0.5
    assert (report["overall"]["episodes"], report["overall"]["failed"]) == (2, 1)
    assert report["overall"]["version"] == 7
    assert report["warmup"] == report["overall"]


def test_an_environment_without_tasks_is_evaluated_on_seeds_that_are_not_trained_on() -> None:
    """As many as episodes were asked for, since every seed is a task; they are shown as one template."""
    spec = EnvironmentSpec("mine", lambda _: None, lambda split: SeedTaskSet("Mine", split))  # type: ignore[arg-type,return-value]
    played = held_out_tasks(spec, HELD_OUT, 12, 200)
    trained = {spec.tasks(TRAIN).instantiate("Mine", seed).seed for seed in range(100)}
    assert len({task.seed for task in played}) == len({task.id for task in played}) == 12
    assert trained.isdisjoint(task.seed for task in played)
    assert {task.template for task in played} == {"Mine"}
