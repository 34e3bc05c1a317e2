"""Mutants at the edges: what is made beside the work, and what is known of a mutant before it is
played."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.loader import instantiate
from tests.aws.validation.companion_mutants import companions
from tests.aws.validation.default_mutants import given_defaults
from tests.aws.validation.edge_mutants import OWN_NAME, beside, member_changes
from tests.aws.validation.makings import makings
from tests.aws.validation.mutant import Mutant
from tests.aws.validation.mutant_player import MAX_STEPS, Goals, Played, play_mutant

pytestmark = pytest.mark.slow


def mutants(task_id: int, about: str) -> list[Mutant]:
    return [mutant for mutant in beside(instantiate(task_id, 0)) if mutant.about == about]


def extra(mutant: Mutant) -> Sequence[str]:
    return [mutant.commands[place] for place in mutant.proof]


def test_what_needs_something_is_made_with_it() -> None:
    found = {operation: making.lines for operation, making in makings("ec2", 1)}
    rule = found["authorize-security-group-ingress"]
    assert len(rule) > 1 and any("create-security-group" in line for line in rule[:-1])
    assert found["create-vpc"][0].startswith("aws ec2 create-vpc "), (
        "what needs nothing is made alone"
    )
    assert not any("tag" in operation for operation in found), "a tag is no thing of its own"


def test_what_no_task_makes_is_made_up_from_the_model() -> None:
    found = {operation: making.called(OWN_NAME) for operation, making in makings("iam", 1)}
    key = found["create-access-key"]
    assert key[0].startswith(f"aws iam create-user --user-name {OWN_NAME}"), (
        "for a user of one's own"
    )
    assert key[-1] == f"aws iam create-access-key --user-name {OWN_NAME}"
    assert found["put-user-policy"][-1].startswith(
        f"aws iam put-user-policy --user-name {OWN_NAME} "
    )


def test_own_things_are_known_to_be_unpaid_and_stand_whole_in_the_solution() -> None:
    task = instantiate(203, 0)
    own = mutants(203, "own names")
    queue = next(one for one in own if one.place == "sqs create-queue")
    assert queue.expected == "unpaid" and OWN_NAME in extra(queue)[0]
    assert len(queue.commands) == len(task.solution) + len(queue.proof)
    for mutant in own:
        rest = [line for place, line in enumerate(mutant.commands) if place not in mutant.proof]
        assert [line.split()[:3] for line in rest] == [line.split()[:3] for line in task.solution]


def test_what_carries_the_targets_name_where_the_task_asks_for_it_is_left_to_the_state() -> None:
    named = {one.place: one.expected for one in mutants(203, "the target's names")}
    assert named["sqs create-queue"] == "", "the solution makes it, too"
    assert {one.expected for one in mutants(203, "nearly its names")} == {"unpaid"}


def test_what_is_made_is_also_opened_to_anybody() -> None:
    found = [extra(one) for one in mutants(413, "own and open")]
    assert any("0.0.0.0/0" in lines[-1] and OWN_NAME in " ".join(lines) for lines in found)
    assert any(
        "Principal" in lines[-1] for lines in (extra(one) for one in mutants(203, "own and open"))
    )


def test_what_is_removed_again_is_to_be_paid() -> None:
    found = {extra(one)[-1]: one.expected for one in mutants(203, "made and removed again")}
    assert found["aws sqs delete-queue --queue-url ${step3:QueueUrl}"] == "paid"
    machines = [extra(one)[-1] for one in mutants(413, "made and removed again")]
    assert any(line.startswith("aws ec2 terminate-instances") for line in machines)


def test_each_member_of_a_command_is_given_or_changed_once() -> None:
    task = instantiate(409, 0)
    found = [mutant for mutant in member_changes(task) if mutant.about == "added"]
    assert len({mutant.place for mutant in found}) == len(found) > 10


def test_the_least_grant_is_to_be_paid_and_none_that_is_wider() -> None:
    found = {(one.place, one.what): one for one in companions(instantiate(203, 0))}
    least = found["topic to queue", "for the source"]
    wide = found["topic to queue", "anybody"]
    assert (least.expected, wide.expected) == ("paid", "unpaid")
    assert (
        extra(least)[0].startswith("aws sqs get-queue-url")
        and "sns.amazonaws.com" in extra(least)[1]
    )
    widened = [one for one in found.values() if one.expected == "unpaid"]
    assert len({one.commands for one in widened}) == len(widened) >= 5
    of_a_role = {
        one.what: one.expected
        for one in companions(instantiate(305, 0))
        if one.place == "schedule to function"
    }
    assert of_a_role["one action of it"] == "paid" and of_a_role["any resource"] == "unpaid"


def test_defaults_are_given_where_a_command_leaves_them_out() -> None:
    alarm = {one.what: one for one in given_defaults(instantiate(114, 0))}
    points = alarm["--datapoints-to-alarm = 2"]
    assert (
        points.expected == "paid" and "--datapoints-to-alarm 2" in points.commands[points.proof[0]]
    )
    retries = [
        one for one in given_defaults(instantiate(213, 0)) if "MaximumRetryAttempts" in one.what
    ]
    assert '"MaximumRetryAttempts": 185' in retries[0].commands[retries[0].proof[0]], (
        "within the target of a rule"
    )


def record(*, achieved: bool, equal: bool, expected: str = "") -> Played:
    found = Played(101, 0, "beside", "m", ("aws s3 ls",), achieved, 1.0, equal, True, (), (), 1, 0)
    return replace(found, expected=expected)


def test_what_is_known_of_a_mutant_goes_before_what_its_state_says() -> None:
    assert record(achieved=True, equal=True, expected="unpaid").wrongly_paid
    assert record(achieved=False, equal=False, expected="paid").wrongly_refused
    assert not record(achieved=False, equal=True, expected="unpaid").wrongly_refused
    again = Played.from_json(record(achieved=True, equal=True, expected="paid").to_json())
    assert again.expected == "paid" and again.right
    told = replace(again, told=("+ a default",))
    assert not told.doubtful and replace(told, expected="").doubtful, (
        "what is known needs no second opinion"
    )


@pytest.mark.sim
def test_what_is_left_is_not_paid_and_what_failed_proves_nothing(slot: Slot) -> None:
    task, goals, episode = instantiate(203, 0), Goals(), Episode(slot, MAX_STEPS)

    def played(about: str, place: str) -> Played:
        found = next(one for one in mutants(203, about) if one.place == place)
        return play_mutant(episode, task, found, goals)

    left = played("own names", "sqs create-queue")
    assert left.expected == "unpaid" and not left.achieved and not left.wrongly_paid
    removed = played("made and removed again", "sqs create-queue")
    assert removed.expected == "paid" and removed.achieved
    failing = Mutant("beside", "", "", "", ("aws sqs create-queue", *task.solution), "unpaid", (0,))
    assert play_mutant(episode, task, failing, goals).expected == ""
