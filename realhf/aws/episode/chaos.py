"""Chaos: a silent disturbance of a resource that the agent created, at most once in an episode. The
agent has to notice and repair it.

The dice are rolled after each step that made progress without finishing, so waiting never triggers
a disturbance. A disturbance counts only if its effect is visible in the simulator's state. Source:
docs/reference/environment.md 7 (Chaos) and 8 (probabilities).
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

PROBABILITY: Mapping[str, float] = {
    "warmup": 0.0,
    "beginner": 0.0,
    "intermediate": 0.1,
    "advanced": 0.2,
    "expert": 0.3,
}
"""Probability of a disturbance after each such step, by tier."""


@dataclass(frozen=True)
class Perturbation:
    """A request that disturbs what an agent's request created.

    In its parameters, ``%(name)s`` is the resource of the agent's request, ``%(Parameter)s`` a
    parameter of that request, and ``%(found)s`` the result of ``lookup``.
    """

    operation: str
    """Operation that disturbs."""
    params: Mapping[str, Any]
    """The operation's parameters, with placeholders."""
    probe: tuple[str, Mapping[str, Any], str]
    """(operation, parameters, JMESPath) of a read whose result must be different afterwards."""
    lookup: tuple[str, Mapping[str, Any], str] | None = None
    """(operation, parameters, JMESPath) of a read whose result becomes ``%(found)s``."""


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
_DELETED_BUCKET = Perturbation("DeleteBucket", _BUCKET, ("HeadBucket", _BUCKET, "@"))

PERTURBATIONS: Mapping[str, tuple[Perturbation, ...]] = {
    "s3:CreateBucket": (_DELETED_BUCKET,),
    "s3:PutBucketPolicy": (
        Perturbation("DeleteBucketPolicy", _BUCKET, ("GetBucketPolicy", _BUCKET, "Policy")),
    ),
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
"""Possible disturbances of what an agent's request created, by the request's operation."""


@dataclass
class Chaos:
    """The chaos of one episode."""

    probability: float
    """Probability of a disturbance after each step that makes progress."""
    rng: random.Random
    """Random generator for this episode."""
    grader: Grader | EndStateGrader
    """Grader that shows what is satisfied before and after the disturbance."""
    state: StateReader
    """Client that reads the account and sends the disturbance."""
    occurred: bool = False
    """Whether a resource has been disturbed."""
    broken: frozenset[str] = frozenset()
    """Criteria that were satisfied before the disturbance and not after it, as ``find_satisfied``
    names them."""

    def after_progress(self, tracker: Tracker) -> str:
        """With the given probability, disturb one resource and return its service; otherwise return
        "".

        Raises ConnectionError if the simulator does not answer.
        """
        if self.occurred or self.rng.random() >= self.probability:
            return ""
        satisfied_before = self.grader.find_satisfied()
        for request, perturbation in self._candidates(tracker.evidence):
            if self._disturb(request, perturbation):
                self.occurred = True
                tracker.record_disturbance(request.service, request.resource)
                self.broken = satisfied_before - self.grader.find_satisfied()
                return request.service
        return ""

    def survived(self) -> bool:
        """Return whether everything that the disturbance broke has been repaired."""
        return bool(self.broken) and self.broken <= self.grader.find_satisfied()

    def _candidates(self, evidence: Sequence[Evidence]) -> list[tuple[Evidence, Perturbation]]:
        services = self.grader.criteria.named_services
        candidates = [
            (request, perturbation)
            for request in evidence
            if request.ok and request.service in services and request.resource
            for perturbation in PERTURBATIONS.get(request.operation, ())
        ]
        self.rng.shuffle(candidates)
        return candidates

    def _disturb(self, request: Evidence, perturbation: Perturbation) -> bool:
        """Send one disturbance and return whether its effect is visible."""
        values = {**request.params, "name": request.resource}
        try:
            if perturbation.lookup:
                values["found"] = self._read(request.service, perturbation.lookup, values)
            before = self._read(request.service, perturbation.probe, values)
            self.state.call(
                request.service,
                perturbation.operation,
                _fill_placeholders(perturbation.params, values),
            )
            return self._read(request.service, perturbation.probe, values) != before
        except (StateCallError, KeyError, RecursionError):
            return False

    def _read(
        self, service: str, probe: tuple[str, Mapping[str, Any], str], values: Mapping[str, Any]
    ) -> Any:
        operation, params, path = probe
        try:
            return jmespath.search(
                path, self.state.call(service, operation, _fill_placeholders(params, values))
            )
        except StateCallError:
            return None


def chaos_rng(task_id: int, seed: int) -> random.Random:
    """Return the random generator for an episode's chaos."""
    return random.Random(f"chaos:{task_id}:{seed}")


def _fill_placeholders(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return value % values
    if isinstance(value, Mapping):
        return {key: _fill_placeholders(item, values) for key, item in value.items()}
    return (
        [_fill_placeholders(item, values) for item in value] if isinstance(value, list) else value
    )
