"""``actor_gen`` alone on a worker: groups of episodes against real simulators."""

from __future__ import annotations

import json

import pytest
import torch

from realhf.api.sample import SequenceSample
from realhf.aws.tasks.loader import instantiate
from tests.mfc.graph_calls import GROUP, MAX_NEW, MAX_TURNS, SESSIONS, TEMPERATURE
from tests.mfc.mfc_bench import as_lists, sequences

pytestmark = pytest.mark.sim

STEP = 4


@pytest.fixture(scope="module")
def played_on(bench):
    """The bench with simulators."""
    bench.serve_environment(SESSIONS)
    return bench


@pytest.fixture(scope="module")
def tasks(task):
    """One that the policy was taught, and the same template with a name that it never saw."""
    return [task, instantiate(1, seed=8)]


def drawn(tasks, name):
    """What the curriculum sends: a task each."""
    metadata = {
        "task": [json.dumps({"task": task.to_json(), "chaos": False}) for task in tasks],
        "task_id": [f"{task.template}-{task.seed}" for task in tasks],
        "task_seed": [task.seed for task in tasks],
        "group": [task.tier for task in tasks],
    }
    return SequenceSample.from_tensors([f"{name}{i}" for i in range(len(tasks))], {}, {}, metadata)


@pytest.fixture(scope="module")
def played(played_on, tasks):
    return played_on.run("actor_gen", drawn(tasks, "first"), step=STEP, seed=11)


def turns(ids, mask):
    """Runs of sampled tokens."""
    found: list[list[int]] = []
    for position, sampled in enumerate(mask.tolist()):
        if sampled and (position == 0 or not mask[position - 1]):
            found.append([])
        if sampled:
            found[-1].append(int(ids[position]))
    return found


def rollouts(played):
    """(ids, mask) of every rollout."""
    return list(
        zip(
            sequences(played[0], "packed_input_ids"), sequences(played[0], "loss_mask"), strict=True
        )
    )


@pytest.mark.nightly
def test_groups_of_one_instance(played, tasks, tokenizer):
    outputs, stats = played
    assert (
        outputs.ids == ("first0", "first1")
        and stats["rollouts"] == 2 * GROUP
        and stats["failed_rollouts"] == 0
    )
    lengths = as_lists(outputs.seqlens)
    assert [len(group) for group in lengths["packed_input_ids"]] == [GROUP, GROUP]
    shifted = [[length - 1 for length in group] for group in lengths["packed_input_ids"]]
    assert lengths["packed_logprobs"] == lengths["packed_versions"] == shifted
    assert lengths["env_rewards"] == lengths["outcome"] == [[1] * GROUP] * 2
    prompts = sequences(outputs, "prompt_mask")
    for number, (ids, _) in enumerate(rollouts(played)):
        conversation = tokenizer.decode(ids[prompts[number]])
        assert conversation == f"<|user|>{tasks[number // GROUP].description}<|assistant|>"
        assert bool(prompts[number][: int(prompts[number].sum())].all()), "the prompt comes first"


def test_the_mask_covers_what_was_sampled_and_nothing_else(played, tokenizer):
    stop = tokenizer.eos_token_id
    for (ids, mask), prompt in zip(
        rollouts(played), sequences(played[0], "prompt_mask"), strict=True
    ):
        assert mask[int(prompt.sum())] and mask[-1] and not bool((mask & prompt).any())
        spoken = turns(ids, mask)
        assert 1 <= len(spoken) <= MAX_TURNS
        for turn in spoken:
            assert stop not in turn[:-1] and (turn[-1] == stop or len(turn) == MAX_NEW)
        between = tokenizer.decode(ids[~mask & ~prompt])
        if len(spoken) == 2:
            assert "<|user|>" in between and between.endswith("<|assistant|>")
    assert played[1]["generated_tokens"] == sum(int(mask.sum()) for _, mask in rollouts(played))


def test_logprobs_are_those_of_a_plain_forward_of_the_same_tokens(played, expected_logprobs):
    outputs, _ = played
    expected = expected_logprobs(outputs, TEMPERATURE)
    found = sequences(outputs, "packed_logprobs")
    versions = sequences(outputs, "packed_versions")
    for number, (_, mask) in enumerate(rollouts(played)):
        sampled = mask[1:]
        torch.testing.assert_close(
            found[number][sampled], expected[number][sampled], atol=1e-3, rtol=0
        )
        assert float(expected[number][sampled].min()) < -0.1, (
            "not a policy that is sure of everything"
        )
        assert bool((found[number][~sampled] == 0).all())
        assert bool((versions[number][sampled] == STEP).all()) and bool(
            (versions[number][~sampled] == -1).all()
        )


def test_the_solution_is_rewarded_and_nothing_else(played, tasks, tokenizer):
    outputs, stats = played
    solved = [
        any(
            tokenizer.decode(turn).removesuffix("<|end|>") == tasks[number // GROUP].solution[0]
            for turn in spoken
        )
        for number, spoken in enumerate(turns(*rollout) for rollout in rollouts(played))
    ]
    assert any(solved) and not all(solved), "a policy that can do some of it"
    assert outputs["env_rewards"].tolist() == [float(each) for each in solved]
    assert outputs["outcome"].tolist() == [0] * 2 * GROUP
    assert stats["success"] == pytest.approx(sum(solved) / len(solved))
    for number in range(2):
        group = solved[number * GROUP : (number + 1) * GROUP]
        assert json.loads(outputs.metadata["achieved"][number]) == group
        assert json.loads(outputs.metadata["rewards"][number]) == [float(each) for each in group]
    assert not any(outputs["seq_no_eos_mask"].tolist()), (
        "an episode ends by success or by its turns, none by length"
    )


def test_the_observation_is_that_of_the_simulator(played, tasks, tokenizer):
    asked = [
        (number, tokenizer.decode(ids))
        for number, (ids, _) in enumerate(rollouts(played))
        if "list-buckets" in tokenizer.decode(ids)
    ]
    assert asked, "the policy was taught to ask for the buckets"
    for number, text in asked:
        assert f'"Name":"{tasks[number // GROUP].params["name"]}"' in text.replace(" ", "")


def test_a_samples_own_id_decides_its_tokens(played_on, tasks, played):
    one = played_on.run("actor_gen", drawn(tasks, "own"), step=STEP, seed=11).outputs
    again = played_on.run("actor_gen", drawn(tasks, "own"), step=STEP, seed=12).outputs
    assert torch.equal(again["packed_input_ids"], one["packed_input_ids"])
    assert torch.equal(again["packed_logprobs"], one["packed_logprobs"])
    other = played.outputs
    same = as_lists(again.seqlens) == as_lists(other.seqlens)
    assert not (same and torch.equal(again["packed_input_ids"], other["packed_input_ids"]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": None}, "a sample needs the metadata task, which describe its task"),
        ({"task": "s3", "task_id": "a"}, "task of a is no JSON object, but 's3'"),
    ],
    ids=["none", "no JSON"],
)
def test_a_sample_without_a_task_is_one_error_and_the_next_call_is_served(
    played_on, tasks, change, words
):
    sample = drawn(tasks, "bare")
    bare = sample.annotated(
        {name: [value, *sample.metadata[name][1:]] for name, value in change.items()}
    )
    assert words in played_on.error_of("actor_gen", bare)
    assert (
        played_on.run("actor_gen", drawn(tasks[:1], "after"), step=STEP).stats["rollouts"] == GROUP
    )


def test_a_worker_that_is_killed_in_its_episodes_is_named(played_on, tasks):
    assert "'model_worker/1' died" in played_on.error_of_kill("actor_gen", drawn(tasks, "killed"))
    assert (
        played_on.run("actor_gen", drawn(tasks[:1], "survivor"), step=STEP).stats["failed_rollouts"]
        == 0
    )
