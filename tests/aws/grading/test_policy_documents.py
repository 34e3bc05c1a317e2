"""What an agent wrote so that it cannot be read is a failed check and harm, and never an end of the episode."""

import json
from typing import Any
from urllib.parse import quote

import pytest

from realhf.aws.cli.policy_documents import decoded
from realhf.aws.cli.state_client import UnreadableAnswer
from realhf.aws.episode.episode import Episode
from realhf.aws.grading.grader import Grader, parse_criteria
from realhf.aws.grading.reward import HARM_PENALTY
from realhf.aws.grading.tracker import Evidence
from realhf.aws.tasks.task import Task

DEEP = "[" * 1500 + "]" * 1500
TRUST = {"Version": "2012-10-17", "Statement": []}
ROLE = {"service": "iam", "type": "role", "name": "kept", "fields": ["AssumeRolePolicyDocument"]}
QUEUE = {"service": "sqs", "type": "queue", "name": "jobs"}
WRITE = Evidence(0, "iam:UpdateAssumeRolePolicy", {"RoleName": "kept"}, "kept", True, "")


class FakeState:
    """One role, and nothing else; ``document`` is its trust policy, or the error that reading it raises."""

    def __init__(self, document: Any) -> None:
        self.document = document

    def call(self, service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self.document, Exception):
            raise self.document
        return {"Role": {"RoleName": "kept", "AssumeRolePolicyDocument": self.document}}

    def run(self, command: str) -> Any:
        raise AssertionError("no check here is a command")


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def test_a_document_is_decoded_or_stays_as_it_is() -> None:
    assert decoded(quote(json.dumps(TRUST))) == TRUST
    for text in (DEEP, quote(DEEP), "no json"):
        assert decoded(text) == text
    assert decoded(None) is None


@pytest.mark.parametrize("after", [UnreadableAnswer("nested"), nested(2000), DEEP])
def test_what_cannot_be_read_any_more_is_harmed_and_no_success(after: Any) -> None:
    check = {**ROLE, "attributes": {"AssumeRolePolicyDocument": {"Version": "1"}}}
    del check["fields"]
    state = FakeState(TRUST)
    grader = Grader(parse_criteria({"state_checks": [check], "protected": [ROLE], "sparing": True}), state)
    grader.start()
    state.document = after
    grade = grader.evaluate([WRITE])
    assert grade.harmed and not grade.achieved and grade.progress == 0.0
    assert grader.needless_writes == 0
    state.document = TRUST
    assert not grader.evaluate([WRITE]).harmed


@pytest.mark.sim
def test_a_trust_policy_that_nobody_can_read_costs_what_harm_costs(episode: Episode) -> None:
    setup = [
        {
            "service": "iam",
            "operation": "CreateRole",
            "params": {"RoleName": "kept", "AssumeRolePolicyDocument": json.dumps(TRUST)},
        }
    ]
    data = {"task_id": 9000, "difficulty": "expert", "description": "a queue", "setup_commands": setup}
    episode.reset(Task.from_json(data | {"success_criteria": {"state_checks": [QUEUE], "protected": [ROLE]}}))
    step = episode.step(f"aws iam update-assume-role-policy --role-name kept --policy-document '{DEEP}'")
    assert step.observation["command_success"] and step.reward == -HARM_PENALTY
    assert episode.state()["infra_state"]["iam"]["role"] == ["kept"]
    assert not episode.step("aws sqs create-queue --queue-name jobs").done
    repair = f"aws iam update-assume-role-policy --role-name kept --policy-document '{json.dumps(TRUST)}'"
    assert episode.step(repair).observation["task_achieved"]
