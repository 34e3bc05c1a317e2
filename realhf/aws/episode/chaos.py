"""Disturbs, silently and at most once in an episode, something that the agent made, to be noticed and repaired.

Chaos is rolled after a step that brought progress without finishing, so waiting brings nothing. A disturbance counts
only when its effect is seen in the simulator's state. Source: docs/reference/environment.md 7 (Chaos) and 8
(probabilities).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jmespath

from realhf.aws.cli.state_client import StateCallError
from realhf.aws.grading.criteria import StateReader
from realhf.aws.grading.grader import EndStateGrader, Grader
from realhf.aws.grading.tracker import Evidence, Tracker
from realhf.aws.tasks.task import ACCOUNT_ID

PROBABILITY: Mapping[str, float] = {"warmup": 0.0, "beginner": 0.0, "intermediate": 0.1, "advanced": 0.2, "expert": 0.3}
"""Probability of a disturbance at each roll, by tier."""


@dataclass(frozen=True)
class Perturbation:
    """A request that disturbs what an agent's request made. ``%(name)s`` in values is the resource of the agent's
    request, ``%(Parameter)s`` one of its parameters, ``%(found)s`` what ``lookup`` (operation, params, path) finds.
    ``probe`` (operation, params, path) reads what has to be different afterwards."""

    operation: str
    params: Mapping[str, Any]
    probe: tuple[str, Mapping[str, Any], str]
    lookup: tuple[str, Mapping[str, Any], str] | None = None


_BUCKET = {"Bucket": "%(name)s"}
_TABLE = {"TableName": "%(name)s"}
_FUNCTION = {"FunctionName": "%(name)s"}
_QUEUE = {"QueueUrl": f"http://localhost/{ACCOUNT_ID}/%(name)s"}
_TOPIC = {"TopicArn": f"arn:aws:sns:us-east-1:{ACCOUNT_ID}:%(name)s"}
_ALL_OF_QUEUE = _QUEUE | {"AttributeNames": ["All"]}
_OTHER_TIMES = Perturbation(
    "SetQueueAttributes",
    _QUEUE | {"Attributes": {"VisibilityTimeout": "7", "MessageRetentionPeriod": "61"}},
    ("GetQueueAttributes", _ALL_OF_QUEUE, "Attributes.[VisibilityTimeout,MessageRetentionPeriod]"),
)
_OTHER_FUNCTION = Perturbation(
    "UpdateFunctionConfiguration",
    _FUNCTION | {"Timeout": 1, "MemorySize": 129},
    ("GetFunctionConfiguration", _FUNCTION, "[Timeout,MemorySize]"),
)
_GONE_BUCKET = Perturbation("DeleteBucket", _BUCKET, ("HeadBucket", _BUCKET, "@"))

PERTURBATIONS: Mapping[str, tuple[Perturbation, ...]] = {
    "s3:CreateBucket": (_GONE_BUCKET,),
    "s3:PutBucketPolicy": (Perturbation("DeleteBucketPolicy", _BUCKET, ("GetBucketPolicy", _BUCKET, "Policy")),),
    "s3:PutBucketVersioning": (
        Perturbation(
            "PutBucketVersioning",
            _BUCKET | {"VersioningConfiguration": {"Status": "Suspended"}},
            ("GetBucketVersioning", _BUCKET, "Status"),
        ),
    ),
    "dynamodb:CreateTable": (
        Perturbation("DeleteTable", _TABLE, ("DescribeTable", _TABLE, "Table.TableStatus")),
        Perturbation(
            "UpdateTable",
            _TABLE
            | {
                "BillingMode": "PROVISIONED",
                "ProvisionedThroughput": {"ReadCapacityUnits": 9, "WriteCapacityUnits": 9},
            },
            ("DescribeTable", _TABLE, "Table.ProvisionedThroughput.ReadCapacityUnits"),
        ),
    ),
    "lambda:CreateFunction": (_OTHER_FUNCTION,),
    "lambda:UpdateFunctionConfiguration": (_OTHER_FUNCTION,),
    "sqs:CreateQueue": (
        Perturbation("DeleteQueue", _QUEUE, ("GetQueueAttributes", _ALL_OF_QUEUE, "Attributes")),
        _OTHER_TIMES,
    ),
    "sqs:SetQueueAttributes": (_OTHER_TIMES,),
    "sns:Subscribe": (
        Perturbation(
            "Unsubscribe",
            {"SubscriptionArn": "%(found)s"},
            ("ListSubscriptionsByTopic", _TOPIC, "Subscriptions"),
            lookup=("ListSubscriptionsByTopic", _TOPIC, "Subscriptions[-1].SubscriptionArn"),
        ),
    ),
    **{
        f"iam:Attach{kind}Policy": (
            Perturbation(
                f"Detach{kind}Policy",
                {f"{kind}Name": "%(name)s", "PolicyArn": "%(PolicyArn)s"},
                (f"ListAttached{kind}Policies", {f"{kind}Name": "%(name)s"}, "AttachedPolicies"),
            ),
        )
        for kind in ("Role", "User")
    },
}
"""For each operation of the agent, what may happen to what it made."""


@dataclass
class Chaos:
    """Disturbs one episode. ``occurred``: something was disturbed; ``broken``: what held before it and not after."""

    probability: float
    rng: random.Random
    grader: Grader | EndStateGrader
    state: StateReader
    occurred: bool = False
    broken: frozenset[str] = frozenset()

    def after_progress(self, tracker: Tracker) -> str:
        """Roll; on a hit disturb one thing and return its service, otherwise "". Raises ConnectionError when the
        simulator does not answer."""
        if self.occurred or self.rng.random() >= self.probability:
            return ""
        held = self.grader.holding()
        for deed, perturbation in self._candidates(tracker.evidence):
            if self._disturb(deed, perturbation):
                self.occurred = True
                tracker.record_disturbance(deed.service, deed.resource)
                self.broken = held - self.grader.holding()
                return deed.service
        return ""

    def survived(self) -> bool:
        """Return whether what was broken is whole again."""
        return bool(self.broken) and self.broken <= self.grader.holding()

    def _candidates(self, evidence: Sequence[Evidence]) -> list[tuple[Evidence, Perturbation]]:
        services = self.grader.criteria.named_services
        found = [
            (deed, perturbation)
            for deed in evidence
            if deed.ok and deed.service in services and deed.resource
            for perturbation in PERTURBATIONS.get(deed.operation, ())
        ]
        self.rng.shuffle(found)
        return found

    def _disturb(self, deed: Evidence, perturbation: Perturbation) -> bool:
        """Send a disturbance; returns whether its effect is seen."""
        values = {**deed.params, "name": deed.resource}
        try:
            if perturbation.lookup:
                values["found"] = self._read(deed.service, perturbation.lookup, values)
            before = self._read(deed.service, perturbation.probe, values)
            self.state.call(deed.service, perturbation.operation, _filled(perturbation.params, values))
            return self._read(deed.service, perturbation.probe, values) != before
        except (StateCallError, KeyError, RecursionError):
            return False

    def _read(self, service: str, probe: tuple[str, Mapping[str, Any], str], values: Mapping[str, Any]) -> Any:
        operation, params, path = probe
        try:
            return jmespath.search(path, self.state.call(service, operation, _filled(params, values)))
        except StateCallError:
            return None


def chaos_rng(task_id: int, seed: int) -> random.Random:
    """Return the random generator of an episode's chaos."""
    return random.Random(f"chaos:{task_id}:{seed}")


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return value % values
    if isinstance(value, Mapping):
        return {key: _filled(item, values) for key, item in value.items()}
    return [_filled(item, values) for item in value] if isinstance(value, list) else value
