"""What a request asks of the answer: where it stops, which calls it makes, which JSON it is.

Stop strings are applied. All other rules are *checked*: the policy samples freely, since it is
trained on what it samples, and an answer that breaks a rule is returned as it was sampled, so that
the client's library finds it invalid and asks again. Broken rules are counted in a metric.

A stop string ends a turn at the first token with which the text contains it. Whether a token is the
last one depends on the tokens up to it only, so the tokens up to it are a sample of the policy.
Engines sample further; those tokens are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from realhf.api.tool_parser import CallProblem, read_json
from realhf.base.json_values import json_problem
from realhf.rollout.api_errors import invalid
from realhf.rollout.json_schema import CheckBudget, JsonSchema

ToolChoice = Literal["auto", "none", "required"]
"""Whether an answer may contain calls (``auto``), contains none because calls stay text (``none``),
or has to contain at least one (``required``)."""
MAX_STOPS = 4
"""Maximum number of stop strings of a request."""
MAX_STOP_CHARS = 256
"""Maximum number of characters of a stop string."""
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Character to which bytes are decoded that do not form a complete character."""


@dataclass(frozen=True)
class JsonAnswer:
    """Rule that an answer without calls is one JSON object or, with a schema, a JSON value that
    fits it. Reasoning before it does not count."""

    schema: JsonSchema | None = None
    """The schema; None for any JSON object."""

    def accepts(self, content: str, budget: CheckBudget | None = None) -> bool:
        """Return whether the content of an answer follows the rule. ``budget`` is as in
        ``JsonSchema.accepts``."""
        try:
            words = content.strip()
            value, end = read_json(words, 0)
        except CallProblem:
            return False
        if end != len(words):
            return False
        return (
            isinstance(value, dict) if self.schema is None else self.schema.accepts(value, budget)
        )


@dataclass(frozen=True)
class AnswerRules:
    """Rules of one request for its answer. The default asks for nothing."""

    stop: tuple[str, ...] = ()
    """The text of the turn, with reasoning and calls, ends before the first of these strings."""
    tool_choice: ToolChoice = "auto"
    """Whether the answer contains calls."""
    tool_names: tuple[str, ...] = ()
    """Names of the tools that may be called; () for all tools."""
    parallel_calls: bool = True
    """Whether the answer may contain several calls."""
    json: JsonAnswer | None = None
    """Which JSON the answer is; None for any text."""
    strict_tools: Mapping[str, JsonSchema] = field(default_factory=dict)
    """Schema of the arguments of each tool whose calls have to fit it, by the tool's name."""

    @property
    def reads_calls(self) -> bool:
        """Whether calls are parsed; otherwise they stay text."""
        return self.tool_choice != "none"

    def has_checks(self, *, reads_calls: bool) -> bool:
        """Return whether an answer can break a rule. ``reads_calls``: whether it can contain calls,
        because the request offers tools and does not keep calls as text."""
        rules_of_calls = (
            self.tool_choice == "required"
            or self.tool_names
            or not self.parallel_calls
            or self.strict_tools
        )
        return self.json is not None or bool(reads_calls and rules_of_calls)

    def find_broken(self, content: str, calls: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
        """Return the rules that an answer breaks, in the names of the chat API.

        content: text that the client gets. calls: name and JSON value of the arguments of each
        call that the client gets.
        """
        names = [name for name, _ in calls]
        budget = CheckBudget()
        broken = {
            "tool_choice": (self.tool_choice == "required" and not calls)
            or any(name not in self.tool_names for name in names if self.tool_names),
            "parallel_tool_calls": not self.parallel_calls and len(calls) > 1,
            "strict": any(
                name in self.strict_tools and not self.strict_tools[name].accepts(arguments, budget)
                for name, arguments in calls
            ),
            "response_format": self.json is not None
            and not calls
            and not self.json.accepts(content, budget),
        }
        return tuple(name for name, is_broken in broken.items() if is_broken)


NO_RULES = AnswerRules()


@dataclass(frozen=True)
class StopMatch:
    """Where a stop string ends a turn."""

    string: str
    """The stop string."""
    tokens: int
    """Number of tokens of the turn, up to and including the one that completes the string."""
    text: str
    """Text of the turn before the string."""


def find_stop(
    ids: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> StopMatch | None:
    """Return where the first of the stop strings ends a turn; None if it contains none.

    If a token completes several stop strings, the one that starts first counts, and of two that
    start together the longer one. ``decode`` must return texts of which each continues that of
    fewer tokens, except for a character whose last bytes are missing.
    """
    if not stop:
        return None
    text = decode(ids)
    ends = [start + len(string) for string in stop if (start := text.find(string)) >= 0]
    if not ends:
        return None
    low = 1
    high = len(ids)
    while low < high:
        middle = (low + high) // 2
        if _count_complete(decode(ids[:middle])) >= min(ends):
            high = middle
        else:
            low = middle + 1
    shown = text[: max(min(ends), _count_complete(decode(ids[:low])))]
    start, _, string = min(
        (start, -len(string), string) for string in stop if (start := shown.find(string)) >= 0
    )
    return StopMatch(string, low, text[:start])


def _count_complete(text: str) -> int:
    """Return the number of characters before an incomplete last one."""
    return len(text.rstrip(_NO_CHARACTER))


def check_stop(stop: Sequence[str], param: str = "stop") -> tuple[str, ...]:
    """Return the stop strings of a request. Raises ApiError for invalid ones."""
    if len(stop) > MAX_STOPS:
        raise invalid(param, f"at most {MAX_STOPS} strings are served")
    if not all(0 < len(string) <= MAX_STOP_CHARS for string in stop):
        raise invalid(param, f"each string has 1 to {MAX_STOP_CHARS} characters")
    if problem := json_problem(list(stop)):
        raise invalid(param, problem)
    return tuple(stop)


def check_tool_names(
    rules: AnswerRules, tools: Sequence[Mapping[str, Any]], param: str = "tool_choice"
) -> None:
    """Raise ApiError if ``rules`` require a tool that is not offered.

    tools: schemas in the form of the chat API.
    """
    offered = {tool["function"]["name"] for tool in tools}
    if rules.tool_choice == "required" and not offered:
        raise invalid(param, "a call is required, but the request offers no tools")
    for name in rules.tool_names:
        if name not in offered:
            raise invalid(param, f"the request offers no tool {name[:64]!r}")
