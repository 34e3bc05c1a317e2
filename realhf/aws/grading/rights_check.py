"""Checks that an IAM identity did not get the run of the account, by whatever policy.

In a task: ``{rights: {role: name}}`` (or ``user``, ``group``), with ``refuses`` as in a policy check. Without it,
rights are refused that reach over all of something: everything, IAM, other buckets. Rights that serve the purpose are
not examined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from realhf.aws.cli.state_client import StateCallError
from realhf.aws.grading.iam_policy import Grant, PolicyError, may_allow, parse_policy
from realhf.aws.grading.verifier import StateReader

KINDS = ("role", "user", "group")
MOST_POLICIES = 20
"""Most policies of an identity; with more it is not read to the end. AWS permits no more than that either."""
_TOO_WIDE = tuple(Grant(actions=(action,)) for action in ("*", "iam:*", "iam:createuser", "s3:deletebucket"))
_MANAGED = "arn:aws:iam::aws:policy/"
_WIDE_MANAGED = frozenset({"AdministratorAccess", "PowerUserAccess"})
"""Policies of AWS's own that give the run of the account, beside those of full access to a service; a simulator does
not keep their documents."""


@dataclass(frozen=True)
class RightsCheck:
    """Holds when the identity exists, and none of its inline and attached policies, and of those that a user has by
    groups, could allow what is ``refused``, under whatever condition."""

    kind: str
    name: str
    refused: tuple[Grant, ...] = _TOO_WIDE

    @property
    def service(self) -> str:
        """See ``Check``."""
        return "iam"

    def holds(self, state: StateReader) -> bool:
        """See ``Check``. An identity with more than MOST_POLICIES policies fails."""
        documents = self.reading(state)
        return documents is not None and len(documents) <= MOST_POLICIES and not any(map(self._too_wide, documents))

    def reading(self, state: StateReader) -> list[Any] | None:
        """Return the documents of the identity's policies, None where there is no such identity."""
        try:
            return list(self._documents(state))
        except StateCallError as error:
            if error.code == "NoSuchEntity":
                return None
            raise

    def _documents(self, state: StateReader) -> Iterator[Any]:
        yield from self._policies_of(state, self.kind.title(), self.name)
        if self.kind == "user":
            groups = state.call("iam", "ListGroupsForUser", {"UserName": self.name})["Groups"]
            for group in groups[: MOST_POLICIES + 1]:
                yield from self._policies_of(state, "Group", group["GroupName"])

    def _policies_of(self, state: StateReader, kind: str, identity: str) -> Iterator[Any]:
        who = {f"{kind}Name": identity}
        for name in state.call("iam", f"List{kind}Policies", who)["PolicyNames"][: MOST_POLICIES + 1]:
            yield state.call("iam", f"Get{kind}Policy", {**who, "PolicyName": name})["PolicyDocument"]
        attached = state.call("iam", f"ListAttached{kind}Policies", who)["AttachedPolicies"]
        for policy in attached[: MOST_POLICIES + 1]:
            name = policy["PolicyArn"].removeprefix(_MANAGED)
            if name != policy["PolicyArn"]:
                wide = name in _WIDE_MANAGED or "FullAccess" in name
                yield {"Statement": {"Effect": "Allow" if wide else "Deny", "Action": "*"}}
                continue
            arn = {"PolicyArn": policy["PolicyArn"]}
            version = state.call("iam", "GetPolicy", arn)["Policy"]["DefaultVersionId"]
            yield state.call("iam", "GetPolicyVersion", {**arn, "VersionId": version})["PolicyVersion"]["Document"]

    def _too_wide(self, document: Any) -> bool:
        try:
            policy = parse_policy(document)
        except PolicyError:
            return False  # what AWS would not take gives no right
        return any(may_allow(policy, request) for grant in self.refused for request in grant.requests())
