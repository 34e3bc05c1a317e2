"""The command that plays mutants: its verdicts, its sample within the tests, what it keeps and how it ends."""

import json
from pathlib import Path

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.loader import Template, instantiate, load_templates
from tests.aws.validation.mutant_player import MAX_STEPS, Goals, Played, play_mutant
from tests.aws.validation.mutants import Kind, Mutant, mutants_of
from tests.aws.validation.mutation import main
from tests.aws.validation.play import is_look

BY_END_STATE = [template for template in load_templates() if not template.success_criteria]
SAMPLE = 6


def record(
    kind: str = "field",
    *,
    achieved: bool,
    equal: bool,
    score: float = 1.0,
    needless: bool = True,
    told: tuple[str, ...] = (),
) -> Played:
    return Played(101, 0, kind, "m", ("aws s3 ls",), achieved, score, equal, needless, (), told, 1, 0)


def test_wrong_verdicts() -> None:
    assert record(achieved=True, equal=False).wrongly_paid and record(achieved=False, equal=True).wrongly_refused
    right = record(achieved=True, equal=True)
    assert not right.wrongly_paid and not right.wrongly_refused
    assert record("blind", achieved=True, equal=True).wrongly_paid, "a blind repair is not paid in full"
    assert not record("blind", achieved=True, equal=True, score=0.9).wrongly_paid
    assert not record("blind", achieved=True, equal=True, needless=False).wrongly_paid, "its dirty write was refused"
    assert record(achieved=True, equal=True, told=("- a",)).doubtful and record(achieved=False, equal=False).doubtful
    assert not right.doubtful and not record(achieved=False, equal=False, told=("- a",)).doubtful
    assert is_look("aws ec2 describe-vpcs") and not is_look("aws sqs create-queue --queue-name describe-it")


@pytest.mark.sim
def test_a_mutant_is_compared_with_what_the_solution_leaves(slot: Slot) -> None:
    task, goals, episode = instantiate(203, 0), Goals(), Episode(slot, MAX_STEPS)

    def played(kind: Kind, *commands: str) -> Played:
        return play_mutant(episode, task, Mutant(kind, "test", "", "", commands), goals)

    same = played("order", *task.solution[:-1], "aws sts get-caller-identity", task.solution[-1])
    assert (same.achieved, same.equal, same.needless, same.sent) == (True, True, False, len(task.solution) + 1)
    raw = played("field", *task.solution[:-1], f"{task.solution[-1]} --attributes RawMessageDelivery=true")
    assert not raw.equal and not raw.achieved
    for texts in (raw.differences, raw.told):
        assert any("RawMessageDelivery" in text for text in texts), "both judges see it"
    failing = played("field", "aws sqs create-queue", *task.solution[1:])
    assert not failing.equal and failing.failed and not failing.achieved


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("template", BY_END_STATE[:: max(1, len(BY_END_STATE) // 6)], ids=lambda one: one.name)
def test_a_sample_of_mutants_is_judged_by_grader_snapshots_and_describe_calls_alike(
    template: Template, slot: Slot
) -> None:
    task, goals, episode = instantiate(template.task_id, 0), Goals(), Episode(slot, MAX_STEPS)
    results = [play_mutant(episode, task, mutant, goals) for mutant in mutants_of(task, SAMPLE, 0)]
    assert not [one for one in results if one.wrongly_paid or one.wrongly_refused]
    assert not [one for one in results if one.achieved and one.told], "paid, and an agent sees another account"
    assert any(one.told for one in results), "a sample of right plays alone proves nothing"


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
    assert run("--most", "4", "--output", str(file), "--wrongly-refused", "1") == 1, "one of four is wrongly paid"
    printed = capsys.readouterr().out
    assert "4 mutants, 1 played now" in printed and "wrongly paid" in printed and "state: - a thing" in printed


def test_impossible_options_and_records_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "x.jsonl"
    broken.write_text('{"task_id": 1}\n{}\n')
    for arguments, text in (
        (("--most", "0"), "--most is at least 1"),
        (("--templates", "99999"), "no task template has the id 99999"),
        (("--templates", "101", "--most", "1", "--output", str(broken)), "line 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        assert ended.value.code == 2 and text in capsys.readouterr().err
