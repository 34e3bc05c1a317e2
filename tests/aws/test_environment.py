"""The AWS environment behind the contract, on a fake server (on real simulators:
tests/aws/client/test_aws_env.py)."""

import socket
from typing import Any

import pytest

from realhf.api.environment import (
    AssistantMessage,
    DemonstrationRequest,
    EnvironmentFailure,
    TaskSet,
    Turn,
)
from realhf.api.rollout import parse_task
from realhf.aws.environment import DEFINITION, AwsEnvironment, AwsOptions, AwsTaskSet
from realhf.aws.messages import NO_COMMAND
from realhf.aws.tasks.loader import is_name
from realhf.aws.tasks.task import Task
from realhf.aws.training import sft_data
from realhf.env.curriculum import TaskSource
from realhf.rollout.player import ReplayDiverged, SlotEnvironment
from tests.rollout.fake_env_server import FakeEnvServer

FINE = {"simulator_lost": 0.0, "account_unreadable": 0.0}
UNAVAILABLE = (
    '{"type":"error","data":{"code":"UNAVAILABLE","message":"not executed","retryable":true}}'
)
REFUSAL = '{"type":"error","data":{"code":"VALIDATION_ERROR","message":"too long"}}'


class Script:
    """Misbehaves as told: ``tricks[(connection, how often that connection was stepped)]``."""

    def __init__(self, tricks: dict[tuple[int, int], str]) -> None:
        self.tricks = tricks
        self.steps: dict[int, int] = {}

    def __call__(self, number: int, message) -> str | None:
        if message["type"] != "step":
            return None
        count = self.steps[number] = self.steps.get(number, 0) + 1
        return self.tricks.get((number, count))


def sent(fake: FakeEnvServer) -> list[tuple[int, str]]:
    """Resets and commands as the server got them, with the number of the connection."""
    return [
        (number, message["data"].get("command", "reset"))
        for number, message in fake.messages
        if message["type"] in ("reset", "step")
    ]


def says(text: str) -> AssistantMessage:
    return AssistantMessage(text, text=text)


def words(turn: Turn) -> str:
    """What the policy reads of a turn."""
    [message] = turn.messages
    assert message["role"] == "user"
    return message["content"]


def slot(url: str, retries: int, *, message_timeout_s: float = 60.0) -> SlotEnvironment:
    """The environment of a slot, at the beginning of an episode."""
    env = SlotEnvironment(
        "aws",
        lambda: AwsEnvironment(url),
        message_timeout_s=message_timeout_s,
        patience_s=2.0,
    )
    env.prepare(retries)
    return env


async def test_an_episode_on_one_session() -> None:
    with FakeEnvServer() as fake:
        env = AwsEnvironment(fake.url)
        opening = await env.reset({"task_id": 3, "chaos": False}, seed=5)
        assert list(opening.messages) == [{"role": "user", "content": "task"}]
        assert [message["data"] for _, message in fake.messages if message["type"] == "reset"] == [
            {"task_id": 3, "chaos": False, "seed": 5}
        ]
        first = await env.step(says("I look.\n```\naws s3 ls\n```"))
        assert (words(first), first.done, first.reward, first.final) == (
            "aws s3 ls",
            False,
            0.5,
            False,
        )
        assert first.metrics == FINE | {"success": 0.0, "progress": 0.5}
        last = await env.step(says("aws b"))
        assert last.done and last.metrics == FINE | {"success": 1.0, "progress": 1.0}
        await env.reset({}, seed=6)
        assert (await env.step(says("aws c"))).metrics["progress"] == 0.5 and fake.connections == 1
        await env.close()
        await env.close()
        assert fake.open == 0


async def test_what_is_read_of_an_answer_is_what_the_options_say() -> None:
    with FakeEnvServer() as fake:
        for options, most in ((AwsOptions(), 200), (AwsOptions(observation_chars=40), 40)):
            env = DEFINITION.build(options).make(fake.url)
            await env.reset({"task_id": 3}, seed=5)
            assert len(words(await env.step(says(f"aws {'x' * 300}")))) == most
            await env.close()


async def test_a_turn_without_a_command_and_a_refused_command_are_the_policys_affair() -> None:
    with FakeEnvServer(Script({(0, 1): REFUSAL})) as fake:
        env = AwsEnvironment(fake.url)
        await env.reset({}, seed=1)
        told = await env.step(says("i do not know"))
        assert (words(told), told.reward, told.done, told.metrics) == (NO_COMMAND, None, False, {})
        refused = await env.step(says("aws " + "x" * 9000))
        assert "too long" in words(refused) and refused.reward is None and not refused.done
        assert words(await env.step(says("aws b"))) == "aws b"
        assert [command[:5] for _, command in sent(fake)] == [
            "reset",
            "aws x",
            "aws b",
        ] and fake.connections == 1
        await env.close()


async def test_the_last_reward_is_the_score_where_the_server_says_level() -> None:
    for mode, final in (("level", True), ("potential", False)):
        with FakeEnvServer(metadata={"reward_mode": mode}) as fake:
            env = AwsEnvironment(fake.url)
            await env.reset({}, seed=1)
            assert (await env.step(says("aws a"))).final is final
            await env.close()


@pytest.mark.parametrize(
    ("trick", "kind"),
    [
        ("drop", "lost"),
        ("error", "internal"),
        (UNAVAILABLE, "unavailable"),
        ('{"type":"observation","data":{"observation":{},"reward":null,"done":false}}', "internal"),
    ],
)
async def test_a_failure_has_its_kind(trick: str, kind: str) -> None:
    with FakeEnvServer(Script({(0, 1): trick})) as fake:
        env = AwsEnvironment(fake.url)
        await env.reset({}, seed=1)
        with pytest.raises(EnvironmentFailure) as failed:
            await env.step(says("aws a"))
        assert failed.value.kind == kind and str(failed.value)
        await env.close()


@pytest.mark.slow
async def test_a_full_server_and_one_that_is_away() -> None:
    full = '{"type":"error","data":{"code":"CAPACITY_REACHED","message":"1/1 sessions"}}'
    with FakeEnvServer(
        lambda number, message: full if message["type"] == "state" else None
    ) as fake:
        with pytest.raises(EnvironmentFailure, match="1/1 sessions") as failed:
            await AwsEnvironment(fake.url).reset({}, seed=1)
        assert failed.value.kind == "capacity"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(EnvironmentFailure, match="cannot open a session") as failed:
        await AwsEnvironment(url).reset({}, seed=1)
    assert failed.value.kind == "lost"


async def test_no_answer_before_the_reset() -> None:
    with pytest.raises(EnvironmentFailure, match="not open") as failed:
        await AwsEnvironment("http://127.0.0.1:1").step(says("aws a"))
    assert failed.value.kind == "lost"


async def test_a_step_that_was_not_executed_is_sent_again() -> None:
    with FakeEnvServer(Script({(0, 1): UNAVAILABLE, (0, 2): UNAVAILABLE})) as fake:
        env = slot(fake.url, 0)
        await env.reset({}, seed=1)
        assert words(await env.step(says("aws a"))) == "aws a"
        assert env.failures == {"unavailable": 2} and env.resumed == 0
        assert sent(fake) == [(0, "reset"), (0, "aws a"), (0, "aws a"), (0, "aws a")]
        await env.close()


@pytest.mark.slow
@pytest.mark.parametrize(("trick", "kind"), [("drop", "lost"), ("hang", "timeout")])
async def test_a_lost_session_is_resumed_by_replay(trick: str, kind: str) -> None:
    with FakeEnvServer(Script({(0, 2): trick})) as fake:
        env = slot(fake.url, 1, message_timeout_s=2.0)
        await env.reset({}, seed=1)
        await env.step(says("aws a"))
        last = await env.step(says("aws b"))
        assert words(last) == "aws b" and last.done and last.metrics["progress"] == 1.0
        assert env.failures == {kind: 1} and env.resumed == 1
        assert sent(fake) == [
            (0, "reset"),
            (0, "aws a"),
            (0, "aws b"),
            (1, "reset"),
            (1, "aws a"),
            (1, "aws b"),
        ]
        await env.close()


async def test_another_world_after_the_loss_is_a_failure() -> None:
    stranger = (
        '{"type":"observation","data":{"observation":{"command_success":true,"command_output":"another world",'
        '"error":"","task_achieved":false,"partial_progress":0.5,"step_count":1},"reward":0.5,"done":false}}'
    )
    with FakeEnvServer(Script({(0, 2): "drop", (1, 1): stranger})) as fake:
        env = slot(fake.url, 1)
        await env.reset({}, seed=1)
        await env.step(says("aws a"))
        with pytest.raises(
            ReplayDiverged, match=r"turn 0 was answered .*aws a.*another world"
        ) as end:
            await env.step(says("aws b"))
        assert env.failures == {"lost": 1, "diverged": 1} and end.value.kind == "lost"


async def test_a_reset_is_tried_again_on_a_new_session() -> None:
    first = iter(["drop"])
    with FakeEnvServer(
        lambda n, message: next(first, None) if message["type"] == "reset" else None
    ) as fake:
        env = slot(fake.url, 1)
        await env.reset({}, seed=1)
        assert fake.connections == 2
        assert words(await env.step(says("aws a"))) == "aws a"
        await env.close()


def test_the_two_splits_share_no_name() -> None:
    options = AwsOptions(tiers=["warmup", "beginner"], chaos=True)
    train = AwsTaskSet(options, "train")
    held_out = AwsTaskSet(options, "heldout")
    assert isinstance(train, TaskSet) and dict(train.group_of) == dict(held_out.group_of)
    assert set(train.group_of.values()) == {"warmup", "beginner"} < set(train.groups)
    template = next(iter(train.group_of))
    names = [
        {
            value
            for seed in range(30)
            for value in Task.from_json(
                tasks.instantiate(template, seed).payload["task"]
            ).params.values()
            if is_name(value)
        }
        for tasks in (train, held_out)
    ]
    assert names[0] and names[1] and not names[0] & names[1]
    one, again = (train.instantiate(template, 4) for _ in range(2))
    assert one == again and one.payload["chaos"] is True and one.group == train.group_of[template]


def test_an_episode_may_end_some_turns_after_the_length_of_its_solution() -> None:
    few = AwsTaskSet(AwsOptions(tiers=["warmup", "advanced"], tags=[], spare_turns=2), "heldout")
    tasks = [few.instantiate(template, 3) for template in few.group_of]
    assert {task.group: task.max_turns for task in tasks}["warmup"] == 3 and max(
        task.max_turns for task in tasks
    ) == 9
    assert {task.limit_turns(6) for task in tasks} == {3, 6}
    drift = AwsTaskSet(
        AwsOptions(tiers=["expert"], tags=[], spare_turns=0, split="all_but_ten"), "train"
    )
    for task in (
        drift.instantiate(template, seed) for template in drift.group_of for seed in range(5)
    ):
        told = Task.from_json(task.payload["task"])
        assert task.max_turns == len(told.solution) + len(told.possible_drifts), (
            "to look at each, and to mend what is"
        )
    assert AwsTaskSet(AwsOptions(), "heldout").instantiate("1", 3).max_turns == 0
    source = TaskSource(1, "aws", options={"tiers": ["warmup"], "spare_turns": 0})
    assert [parse_task(item.metadata).max_turns for item in source.next_batch(3)] == [1, 1, 1]


def test_templates_that_never_train_are_evaluated_in_groups_of_their_own() -> None:
    options = AwsOptions(tiers=["warmup", "expert"], tags=[], split="all_but_ten")
    train = AwsTaskSet(options, "train")
    held_out = AwsTaskSet(options, "heldout")
    unseen = {
        name: group for name, group in held_out.group_of.items() if name not in train.group_of
    }
    assert unseen == {
        "18": "unseen-warmup",
        "21": "unseen-warmup",
        "411": "unseen-expert",
        "417": "unseen-expert",
    }
    assert {**train.group_of, **unseen} == held_out.group_of
    assert (
        held_out.instantiate("18", 3).group == "unseen-warmup"
        and held_out.instantiate("1", 3).group == "warmup"
    )
    assert set(held_out.group_of.values()) <= set(held_out.groups) and not set(
        unseen.values()
    ) & set(train.groups)
    assert len(train.group_of) > len(
        AwsTaskSet(AwsOptions(tiers=["warmup", "expert"]), "train").group_of
    )
    argv = DEFINITION.build(AwsOptions(split="all_but_ten", tags=[], slips=True)).demonstrations
    assert argv is not None and argv.argv(DemonstrationRequest(1, 3))[-3:] == (
        "--split",
        "all_but_ten",
        "--slips",
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"split": "all_but_ten"},
            "env.split=all_but_ten: the templates of these tiers and tags are those of split=train",
        ),
        ({"tiers": []}, "env.tiers=[]: name at least one tier"),
        (
            {"tiers": ["expert"], "tags": ["starter"]},
            "env.tags=['starter']: the tier 'expert' has no template",
        ),
    ],
)
def test_choices_of_tasks_that_do_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    [problem] = AwsOptions(**options).problems("env")
    assert problem.startswith(said)
    assert (
        [*AwsOptions(split="all_but_ten", tags=[]).problems("env")]
        == [*AwsOptions().problems("env")]
        == []
    )


def test_the_program_of_demonstrations_understands_its_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A share that cannot be is refused by the program itself, so all before it was understood."""
    spec = DEFINITION.build(AwsOptions(tiers=["warmup"], pool_size=2))
    assert spec.demonstrations is not None and spec.demonstrations.module == sft_data.__name__
    assert (
        spec.concurrency == 2
        and spec.launch is not None
        and spec.launch.module == "workers.env_worker"
    )
    argv = spec.demonstrations.argv(
        DemonstrationRequest(1, 3, habit_fraction=0.9, recovery_fraction=0.9)
    )
    with pytest.raises(SystemExit):
        sft_data.main(["--out", "nowhere", *argv])
    assert "mix" in capsys.readouterr().err
    assert all(path.is_file() for path in spec.demonstrations.files) and spec.demonstrations.files
