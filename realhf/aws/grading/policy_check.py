"""A check of what an IAM policy permits, however it is written; see ``iam_policy``.

In a task: a resource or call check whose ``json_path`` leads to the policy, with

    allows:  grants that the policy must give       {principal: lambda.amazonaws.com, action: "sts:AssumeRole"}
    refuses: grants none of which it may give
    tolerates: grants that it may give beside ``allows``
    wider:   true where it may give more than ``allows``; otherwise nothing else may be allowed
    owner:   ARN of what the policy hangs on, where its ``Resource: "*"`` means no more than that

With ``allows`` absent or empty and no ``wider``, nothing may be allowed at all, and having no policy is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from realhf.aws.grading.iam_policy import Grant, PolicyError, allows, exceeds, may_allow, parse_policy
from realhf.aws.grading.verifier import CallCheck, ResourceCheck, StateReader, search


@dataclass(frozen=True)
class PolicyCheck:
    """Holds when the policy that ``path`` finds in ``source`` allows ``allowed``, refuses ``refused`` and, unless
    ``wider``, allows nothing else but ``tolerated``. A document that AWS would not take is no policy."""

    source: ResourceCheck | CallCheck
    path: str
    allowed: tuple[Grant, ...] = ()
    refused: tuple[Grant, ...] = ()
    tolerated: tuple[Grant, ...] = ()
    wider: bool = False
    owner: str = ""

    @property
    def service(self) -> str:
        """See ``Check``."""
        return self.source.service

    def holds(self, state: StateReader) -> bool:
        """See ``Check``."""
        if isinstance(self.source, CallCheck):
            return self._right(search(self.path, self.source.answer(state) or {}))
        objects = self.source.objects(state, [self.path])
        return any(self.source.fits(found) and self._right(search(self.path, found)) for found in objects)

    def reading(self, state: StateReader) -> Any:
        """Return the policies found."""
        if isinstance(self.source, CallCheck):
            return search(self.path, self.source.answer(state) or {})
        return [search(self.path, found) for found in self.source.objects(state, [self.path])]

    def _right(self, document: Any) -> bool:
        if document is None or document == "":
            return not self.allowed
        try:
            policy = parse_policy(document, self.owner)
        except PolicyError:
            return False
        grants = self.allowed + self.refused + self.tolerated
        known = frozenset(key for grant in grants for key in grant.context)
        return (
            all(allows(policy, request) for grant in self.allowed for request in grant.requests())
            and not any(may_allow(policy, request, known) for grant in self.refused for request in grant.requests())
            and (self.wider or exceeds(policy, self.allowed + self.tolerated) is None)
        )
