"""What a reset over the wire may ask for, and what the state tells."""

import pytest

from realhf.aws.episode.player import EpisodePlayer
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.loader import get_template, instantiate, is_heldout_seed
from realhf.aws.tasks.task import Task
from realhf.env.server.wire import EXECUTION_ERROR, VALIDATION_ERROR, WireError

pytestmark = pytest.mark.sim
VERSIONED = 201


@pytest.fixture
def player(slot: Slot) -> EpisodePlayer:
    return EpisodePlayer(slot, max_steps=5)


def description(reply: tuple) -> str:
    return reply[0]["task"]["description"]


def test_a_template_by_number_and_seed(player: EpisodePlayer) -> None:
    held = next(seed for seed in range(100) if is_heldout_seed(VERSIONED, seed))
    for seed in (3, held):
        assert (
            description(player.reset({"task_id": VERSIONED, "seed": seed}))
            == instantiate(VERSIONED, seed).description
        )
    names = {description(player.reset({"task_id": VERSIONED})) for _ in range(4)}
    assert len(names) > 1, "without a seed the instance is drawn"
    heldout = player.reset({"task_id": VERSIONED, "seed": 3, "split": "heldout"})
    assert description(heldout) == instantiate(VERSIONED, 3, "heldout").description


def test_without_a_task_a_training_template_is_drawn(player: EpisodePlayer) -> None:
    for _ in range(5):
        assert get_template(player.reset({})[0]["task"]["task_id"]).split == "train"


def test_a_whole_task_brings_its_seed(player: EpisodePlayer) -> None:
    task = instantiate(203, 4)

    def answers(**data: object) -> list[str]:
        player.reset({"task": task.to_json(), "chaos": False} | data)
        return [player.step({"command": command})[0]["command_output"] for command in task.solution]

    assert answers() == answers() == answers(seed=4)


@pytest.mark.parametrize("chaos", [True, False, None])
def test_chaos_is_as_the_reset_says(slot: Slot, chaos: bool | None) -> None:
    for default in (True, False):
        player = EpisodePlayer(slot, 5, chaos=default)
        player.reset(
            {"task_id": VERSIONED, "seed": 1} | ({} if chaos is None else {"chaos": chaos})
        )
        assert (player._episode._chaos is not None) is (default if chaos is None else chaos)


@pytest.mark.parametrize(
    "data",
    [
        {"task_id": 99999},
        {"task_id": VERSIONED, "seed": 1, "split": "secret"},
        {"task": {"task_id": 1}},
        {"task": instantiate(VERSIONED, 1).to_json() | {"setup_commands": ["x"] * 41}},
        {
            "task": instantiate(VERSIONED, 1).to_json()
            | {"success_criteria": {"state_checks": [{"command": "rm x"}]}}
        },
    ],
)
def test_what_cannot_be_asked_for_is_said(player: EpisodePlayer, data: dict) -> None:
    with pytest.raises(WireError) as raised:
        player.reset(data)
    assert raised.value.code == VALIDATION_ERROR


def test_a_world_that_cannot_be_built_is_the_environments_failure(player: EpisodePlayer) -> None:
    task = instantiate(VERSIONED, 1).to_json() | {"setup_commands": ["aws s3 rb s3://none-such"]}
    with pytest.raises(WireError) as raised:
        player.reset({"task": task})
    assert raised.value.code == EXECUTION_ERROR


def test_a_task_of_another_maker_is_played(player: EpisodePlayer) -> None:
    task = {
        "task_id": 7,
        "difficulty": "expert",
        "description": "The queue orders keeps a message for 60 seconds too little.",
        "success_criteria": {
            "command_contains": None,
            "operation": None,
            "resource_exists": None,
            "steps": [],
            "services": [],
            "state_checks": [
                {
                    "command": "aws sqs get-queue-attributes --queue-url "
                    "http://localhost/000000000000/orders "
                    "--attribute-names VisibilityTimeout",
                    "json_path": "Attributes.VisibilityTimeout",
                    "expected": 90,
                }
            ],
        },
        "setup_commands": ["aws sqs create-queue --queue-name orders"],
        "desired_state_spec": None,
        "possible_drifts": [],
        "unknown": 1,
    }
    assert Task.from_json(Task.from_json(task).to_json()) == Task.from_json(task)
    player.reset({"task": task})
    queue = "--queue-url http://localhost/000000000000/orders"
    for seconds, reward, done in ((60, 0.0, False), (90, 1.0, True)):
        command = f"aws sqs set-queue-attributes {queue} --attributes VisibilityTimeout={seconds}"
        assert player.step({"command": command})[1:] == (reward, done)


def test_rewards_as_levels(slot: Slot) -> None:
    player = EpisodePlayer(slot, 5, reward_mode="level")
    player.reset({"task_id": VERSIONED, "seed": 1, "chaos": False})
    rewards = [
        player.step({"command": command})[1] for command in instantiate(VERSIONED, 1).solution
    ]
    assert rewards == [pytest.approx(0.5, abs=1e-8), 1.0]


def test_state_lists_the_account(player: EpisodePlayer) -> None:
    assert player.state()["infra_state"] == {} and player.state()["current_task"] is None
    player.reset({"task_id": 1, "seed": 1})
    state = player.state()
    assert state["infra_state"] == {"s3": {"bucket": [instantiate(1, 1).params["name"]]}}
    assert set(state["current_task"]) == {"task_id", "difficulty", "description"}


def test_the_state_names_the_slot(slot: Slot) -> None:
    assert EpisodePlayer(slot, 5).state()["slot_id"] == slot.index
