"""Mutants of a solution: which are generated, that they are a balanced sample, and the command that
plays them: its verdicts, what it keeps and how it ends."""

import json
from collections import Counter
from pathlib import Path

import pytest

from realhf.api.passport import Counts
from realhf.aws.cli.policy import check_command
from realhf.aws.episode.episode import Episode
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.loader import Template, instantiate, load_templates, whole_state
from realhf.aws.tasks.task import TIERS, Task
from tests.aws.validation.field_changes import Words, line_changes
from tests.aws.validation.mutant import KINDS, Kind, Mutant, inserted
from tests.aws.validation.mutant_player import MAX_STEPS, Goals, Played, play_mutant
from tests.aws.validation.mutants import mutants_of
from tests.aws.validation.mutation import main, passport_of
from tests.aws.validation.play import is_look
from tests.aws.validation.resource_deeds import Request, deeds

NOTHING = Words((), (), ())
EVERYTHING = 1_000_000


def changed(line: str, words: Words = NOTHING) -> set[str]:
    return {text for _, _, text in line_changes(line, words)}


def mutants(task_id: int) -> list[Mutant]:
    return mutants_of(instantiate(task_id, 0), EVERYTHING, 0)


def test_every_member_of_the_operation_is_removed_added_and_changed() -> None:
    line = (
        "aws scheduler create-schedule --name a --flexible-time-window Mode=OFF "
        "--schedule-expression 'rate(1 day)'"
    )
    found = changed(line)
    start = "aws scheduler create-schedule --name a --flexible-time-window"
    rest = "--schedule-expression 'rate(1 day)'"
    assert f'{start} \'{{"Mode": "OFF"}}\' {rest} --state DISABLED' in found, (
        "an enumeration's values are all added"
    )
    assert f'{start} \'{{"Mode": "FLEXIBLE"}}\' {rest}' in found, (
        "and exchanged, within a structure in shorthand"
    )
    assert f"aws scheduler create-schedule --name a {rest}" in found, "an option is removed"
    assert any("DeadLetterConfig" in text for text in found), "members of members are added"


def test_numbers_lists_and_flags_are_changed() -> None:
    found = changed(
        "aws lambda create-event-source-mapping --function-name f --batch-size 5 --enabled"
    )
    line = "aws lambda create-event-source-mapping --function-name f --batch-size"
    assert {f"{line} {number} --enabled" for number in (0, 1, 10, 10000)} <= found, (
        "twice, and the model's bounds"
    )
    assert (
        "aws lambda create-event-source-mapping --function-name f --batch-size 5 --no-enabled"
        in found
    )
    found = changed("aws elbv2 create-load-balancer --name b --subnets one two")
    for value in ('["two", "one"]', '["one"]', '["one", "two", "two"]', "[]"):
        assert f"aws elbv2 create-load-balancer --name b --subnets '{value}'" in found


def test_documents_inside_texts_are_changed() -> None:
    policy = '{"Statement":[{"Effect":"Allow","Principal":{"AWS":"arn:aws:iam::000000000000:root"},"Action":"sqs:*"}]}'
    found = changed(
        f"aws sqs set-queue-attributes --queue-url u --attributes '{{\"Policy\":{quoted(policy)}}}'"
    )
    assert any('\\"Effect\\": \\"Deny\\"' in text for text in found)
    assert any('\\"Principal\\": \\"*\\"' in text for text in found), (
        "a statement for anybody stands beside it"
    )
    assert any("444455556666" in text for text in found), "another account"


def quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def test_texts_are_exchanged_for_other_resources_and_captures_stay_whole() -> None:
    words = Words(("one", "two"), (), ("${step1:A[?b=='c d'].Id | [0]}", "${setup2:Id}"))
    line = "aws ec2 create-subnet --vpc-id ${step1:A[?b=='c d'].Id | [0]} --cidr-block 10.0.0.0/24"
    found = changed(line, words)
    assert "aws ec2 create-subnet --vpc-id ${setup2:Id} --cidr-block 10.0.0.0/24" in found
    assert (
        "aws ec2 create-subnet --vpc-id ${step1:A[?b=='c d'].Id | [0]} --cidr-block 0.0.0.0/0"
        in found
    )
    assert not any("__" in text for text in found), "a capture is never changed within"
    assert "aws s3api create-bucket --bucket two" in changed(
        "aws s3api create-bucket --bucket one", words
    )


def test_what_can_be_done_to_a_resource_comes_from_the_models() -> None:
    queue = Request("sqs", "create-queue", {"QueueName": "q"}, "setup1")
    found = {line: kind for kind, _, line in deeds(queue, NOTHING)}
    assert found["aws sqs delete-queue --queue-url ${setup1:QueueUrl}"] == "undone"
    assert any(
        line.startswith("aws sqs set-queue-attributes") and "Policy" in line for line in found
    )
    attached = Request(
        "iam",
        "attach-role-policy",
        {"RoleName": "r", "PolicyArn": "arn:aws:iam::aws:policy/P"},
        "step2",
    )
    lines = [line for kind, _, line in deeds(attached, NOTHING) if kind == "undone"]
    assert (
        "aws iam detach-role-policy --role-name r --policy-arn arn:aws:iam::aws:policy/P" in lines
    )
    assert not list(deeds(Request("ec2", "describe-vpcs", {}, "step1"), NOTHING)), (
        "a look leaves nothing to undo"
    )


def test_captures_follow_their_commands() -> None:
    lines = ("aws a b", "aws c d --e ${step1:X}")
    assert inserted(lines, 1, ["aws x y"]) == ("aws a b", "aws x y", "aws c d --e ${step1:X}")
    assert inserted(lines, 0, ["aws x y"])[2].endswith("${step2:X}")


@pytest.mark.slow
def test_the_kinds_of_a_task_with_a_set_up() -> None:
    task = instantiate(416, 0)
    found = mutants(416)
    assert {one.kind for one in found} == set(KINDS) - {"blind", "companions", "defaults"}
    assert task.solution not in {one.commands for one in found}
    damage = [one for one in found if one.kind == "damage"]
    assert any(one.commands[0].startswith("aws logs delete-log-group") for one in damage)
    assert any(one.commands[1].startswith("aws logs create-log-group") for one in damage), (
        "deleted and made again"
    )
    assert all(one.commands[-1].split()[:3] == task.solution[-1].split()[:3] for one in damage), (
        "then it is solved"
    )


@pytest.mark.slow
def test_drift_tasks_are_solved_blind() -> None:
    task = instantiate(505, 0)
    blind = {one.commands for one in mutants(505) if one.kind == "blind"}
    whole = tuple(whole_state(task))
    assert whole in blind and whole[::-1] in blind
    assert any(commands[1:] == whole and commands[0] != whole[0] for commands in blind), (
        "after a dirty write"
    )


@pytest.mark.slow
def test_namesakes_and_copies_are_neighbours() -> None:
    name = instantiate(311, 0).params["name"]
    found = [one for one in mutants(311) if one.kind == "neighbour"]
    assert any(all(f"{name}-2" in line for line in one.commands if name in line) for one in found)
    assert any(one.commands[0] == "aws ec2 describe-subnets" for one in found), (
        "another subnet: of the default VPC too"
    )


@pytest.mark.slow
@pytest.mark.parametrize("task_id", [101, 216, 422, 505])
def test_a_sample_is_balanced_and_one_seed_gives_one_list(task_id: int) -> None:
    task = instantiate(task_id, 0)
    sample = mutants_of(task, 40, 7)
    assert sample == mutants_of(task, 40, 7) != mutants_of(task, 40, 8)
    assert len(sample) == 40 == len({one.commands for one in sample})
    kinds = Counter(one.kind for one in sample)
    possible = Counter(one.kind for one in mutants(task_id))
    assert set(kinds) == set(possible) and all(
        kinds[kind] >= min(2, possible[kind]) for kind in kinds
    )


@pytest.mark.slow
def test_mutants_of_every_tier_can_be_sent() -> None:
    templates = load_templates(TIERS[1:])
    for template in templates[::30]:
        task: Task = instantiate(template.task_id, 0)
        sample = mutants_of(task, 100, 0)
        assert len(sample) >= 30, template.name
        unparsed = [
            line
            for one in sample
            for line in one.commands
            if check_command(line).rule == "malformed"
        ]
        assert not unparsed


BY_END_STATE = [template for template in load_templates() if not template.success_criteria]
SAMPLE = 8


def record(
    kind: str = "field",
    *,
    achieved: bool,
    equal: bool,
    score: float = 1.0,
    needless: bool = True,
    told: tuple[str, ...] = (),
) -> Played:
    return Played(
        101, 0, kind, "m", ("aws s3 ls",), achieved, score, equal, needless, (), told, 1, 0
    )


def test_wrong_verdicts() -> None:
    assert (
        record(achieved=True, equal=False).wrongly_paid
        and record(achieved=False, equal=True).wrongly_refused
    )
    right = record(achieved=True, equal=True)
    assert not right.wrongly_paid and not right.wrongly_refused
    assert record("blind", achieved=True, equal=True).wrongly_paid, (
        "a blind repair is not paid in full"
    )
    assert not record("blind", achieved=True, equal=True, score=0.9).wrongly_paid
    assert not record("blind", achieved=True, equal=True, needless=False).wrongly_paid, (
        "its dirty write was refused"
    )
    assert (
        record(achieved=True, equal=True, told=("- a",)).doubtful
        and record(achieved=False, equal=False).doubtful
    )
    assert not right.doubtful and not record(achieved=False, equal=False, told=("- a",)).doubtful
    assert is_look("aws ec2 describe-vpcs") and not is_look(
        "aws sqs create-queue --queue-name describe-it"
    )


@pytest.mark.sim
def test_a_mutant_is_compared_with_what_the_solution_leaves(slot: Slot) -> None:
    task, goals, episode = instantiate(203, 0), Goals(), Episode(slot, MAX_STEPS)

    def played(kind: Kind, *commands: str) -> Played:
        return play_mutant(episode, task, Mutant(kind, "test", "", "", commands), goals)

    same = played("order", *task.solution[:-1], "aws sts get-caller-identity", task.solution[-1])
    assert (same.achieved, same.equal, same.needless, same.sent) == (
        True,
        True,
        False,
        len(task.solution) + 1,
    )
    raw = played(
        "field", *task.solution[:-1], f"{task.solution[-1]} --attributes RawMessageDelivery=true"
    )
    assert not raw.equal and not raw.achieved
    for texts in (raw.differences, raw.told):
        assert any("RawMessageDelivery" in text for text in texts), "both judges see it"
    failing = played("field", "aws sqs create-queue", *task.solution[1:])
    assert not failing.equal and failing.failed and not failing.achieved


@pytest.mark.sampled(1)
@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize(
    "template", BY_END_STATE[:: max(1, len(BY_END_STATE) // 6)], ids=lambda one: one.name
)
def test_a_sample_of_mutants_is_judged_by_grader_snapshots_and_describe_calls_alike(
    template: Template, slot: Slot
) -> None:
    task = instantiate(template.task_id, 0)
    goals = Goals()
    episode = Episode(slot, MAX_STEPS)
    results = [play_mutant(episode, task, mutant, goals) for mutant in mutants_of(task, SAMPLE, 1)]
    assert not [one for one in results if one.wrongly_paid or one.wrongly_refused]
    told = [
        one
        for one in results
        if one.achieved and one.doubtful and not all(map(_is_former_value, one.told))
    ]
    assert not told, "paid, and an agent sees another account"
    assert any(one.told for one in results), "a sample of right plays alone proves nothing"


def _is_former_value(line: str) -> bool:
    """Return whether it is said of a version of a secret, of which AWS keeps those that were
    replaced."""
    return line[2:].startswith("secretsmanager:GetSecretValue") and '"VersionId"' in line


def run(*arguments: str) -> int:
    return main(["--templates", "101", "--pool-size", "1", *arguments])


@pytest.mark.nightly
@pytest.mark.sim
def test_a_run_is_kept_gone_on_with_and_judged_by_its_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mutation.jsonl"
    bounds = ("--wrongly-paid", "1", "--wrongly-refused", "1")
    assert run("--most", "4", "--output", str(file), "--markdown", *bounds) == 0
    printed = capsys.readouterr().out
    assert "4 mutants, 4 played now" in printed and "| beginner | 1 | 4 |" in printed
    kept = file.read_text().splitlines()
    assert len(kept) == 4
    wrong = json.loads(kept[1]) | {"achieved": True, "equal": False, "differences": ["- a thing"]}
    file.write_text("\n".join([kept[0], json.dumps(wrong), kept[2], kept[3][:20]]))
    assert run("--most", "4", "--output", str(file), "--wrongly-refused", "1") == 1, (
        "one of four is wrongly paid"
    )
    printed = capsys.readouterr().out
    assert (
        "4 mutants, 1 played now" in printed
        and "wrongly paid" in printed
        and "state: - a thing" in printed
    )


def test_a_passport_counts_by_kind_what_was_wrongly_paid_and_refused() -> None:
    results = [
        record(achieved=True, equal=False),
        record(achieved=False, equal=False),
        record("blind", achieved=True, equal=True),
        record("beside", achieved=False, equal=True),
    ]
    kinds = passport_of(results, "make mutation").kinds
    assert kinds == {
        "field": Counts(wrong=2, paid=1),
        "blind": Counts(wrong=1, paid=1),
        "beside": Counts(right=1, refused=1),
    }


@pytest.mark.slow
def test_impossible_options_and_records_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "x.jsonl"
    broken.write_text('{"task_id": 1}\n{}\n')
    for arguments, text in (
        (("--most", "0"), "--most is at least 1"),
        (("--templates", "101", "--passport"), "--passport is about all templates"),
        (("--templates", "99999"), "no task template has the id 99999"),
        (("--templates", "101", "--most", "1", "--output", str(broken)), "line 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        assert ended.value.code == 2 and text in capsys.readouterr().err
