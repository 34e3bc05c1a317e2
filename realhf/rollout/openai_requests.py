"""Messages of conversations, and requests for chat completions, as the ``openai`` package sends
them: validation and parsing.

A client sends earlier answers back, but not byte for byte: it may write JSON arguments differently,
and an empty content as null or not at all. ``OpenAiMessage`` objects of such variants are equal;
all other differences make them unequal.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
)

from realhf.api.environment import AssistantMessage
from realhf.api.messages import message_problems
from realhf.api.tool_parser import MAX_CALLS, CallProblem, read_json
from realhf.base.json_values import json_problem
from realhf.rollout.answer_rules import (
    AnswerRules,
    JsonAnswer,
    ToolChoice,
    check_stop,
    check_tool_names,
)
from realhf.rollout.api_errors import ApiError, check_fields, invalid, unsupported
from realhf.rollout.json_schema import JsonSchema, read_schema, read_strict_schemas

_Part = TypeVar("_Part", bound=BaseModel)
_TAGGED = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
"""Reasoning at the beginning of a content, in tags."""
_WHOLE_FLOATS = 2.0**53
"""Every integer below this number can be represented exactly as a float."""


@dataclass(frozen=True)
class OpenAiCall:
    """One tool call. Calls are equal if the JSON values of their arguments are."""

    id: str
    """Id of the call."""
    name: str
    """Name of the tool."""
    arguments: str = field(compare=False)
    """JSON text of the arguments, as the client or the policy wrote it."""
    _value: str = ""
    """Canonical JSON of the arguments."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_value", canonical_json(self.arguments))


@dataclass(frozen=True)
class OpenAiMessage:
    """One message of a conversation."""

    role: str
    """Role name as in chat templates: system, user, assistant or tool."""
    content: str
    """Text of the message."""
    calls: tuple[OpenAiCall, ...] = ()
    """Tool calls of an assistant's message."""
    call_id: str = ""
    """For the role ``tool``: id of the call whose result this is."""
    name: str = ""
    """For the role ``tool``: name of the called tool; "" if no earlier call has this id."""
    stop: str = field(default="", compare=False)
    """For the policy's answer: stop string that ended it, which ``content`` does not contain."""
    reasoning: str = field(default="", compare=False)
    """Reasoning of the message, which ``content`` does not contain; "" if a client left it out."""

    def is_sent_as(self, message: OpenAiMessage) -> bool:
        """Return whether a client that got this message sends it back as ``message``. Some append
        the stop string, because their own parser needs it, some put the reasoning before the
        content, in tags, and some drop the content beside calls, whose ids tell which turn it
        is."""
        if self == message:
            return True
        if self.calls and replace(self, content="") == message:
            return True
        if self.stop and replace(self, content=self.content + self.stop) == message:
            return True
        tagged = _TAGGED.match(message.content) if self.reasoning else None
        return (
            tagged is not None
            and tagged[1].strip() == self.reasoning.strip()
            and replace(message, content=message.content[tagged.end() :].strip())
            == replace(self, content=self.content.strip())
        )

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form of the chat API, which chat templates expect."""
        body: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            body["tool_calls"] = [call_body(call) for call in self.calls]
        if self.role == "tool":
            body |= {"tool_call_id": self.call_id} | ({"name": self.name} if self.name else {})
        return body


ToolSchemas = tuple[Mapping[str, Any], ...]
"""Descriptions of the tools that a request offers, in the form of the chat API."""


def call_body(call: OpenAiCall) -> dict[str, Any]:
    """Convert a call to the form of the chat API."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def build_message(
    turn: AssistantMessage,
    prompt: Sequence[int],
    ids: Sequence[int],
    *,
    reads_calls: bool = True,
    frames_words: bool = False,
) -> OpenAiMessage:
    """Return the message that a client gets for a turn that was sampled as ``ids`` after
    ``prompt``.

    The ids of its calls are a hash of ``prompt`` and ``ids``. Calls that could not be parsed remain
    in the content, and so do all calls if calls are not read. If nothing but such calls would be
    taken out of the text, the content is the whole text, unless it ``frames_words``, that is, has
    control words.
    """
    calls = [call for call in turn.tool_calls if not call.problem] if reads_calls else []
    if turn.tool_calls and not calls and not turn.reasoning and not frames_words:
        return OpenAiMessage("assistant", turn.text)
    problems = dict.fromkeys(call.text for call in turn.tool_calls if call not in calls)
    digest = hashlib.blake2b(array("q", [len(prompt), *prompt, *ids]).tobytes(), digest_size=16)
    return OpenAiMessage(
        "assistant",
        "\n".join(filter(None, [turn.content, *problems])),
        tuple(
            OpenAiCall(
                _call_id(digest.digest(), number),
                call.name,
                json.dumps(call.arguments, ensure_ascii=False),
            )
            for number, call in enumerate(calls)
        ),
        reasoning=turn.reasoning,
    )


def canonical_json(text: str) -> str:
    """Return ``text`` as canonical JSON, or unchanged if it is not JSON that every parser reads the
    same way."""
    words = text.strip()
    try:
        value, end = read_json(words, 0)
    except CallProblem:
        return text
    return (
        json.dumps(_normalize_numbers(value), sort_keys=True, separators=(",", ":"))
        if end == len(words)
        else text
    )


def _normalize_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _normalize_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalize_numbers(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE_FLOATS:
        return int(value)
    return value


def _call_id(digest: bytes, number: int) -> str:
    """Return a call id of nine letters and digits, the form that some chat templates require."""
    return "c" + hashlib.blake2b(digest + number.to_bytes(4, "big"), digest_size=4).hexdigest()


MAX_MESSAGES = 512
"""Maximum number of messages in a request."""
MAX_TOOLS = 128
"""Maximum number of tools in a request."""
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Maps each role of the API to the role that chat templates use."""


def validate_part(model: type[_Part], value: Any, param: str) -> _Part:
    """Return the part of a request at ``param``, validated. Raises ApiError, which names the
    field."""
    if problem := json_problem(value):
        raise invalid(param, problem)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([param, *map(str, first["loc"])])
        raise invalid(place, first["msg"]) from None


def read_text(content: Any, param: str, types: Sequence[str], *, joiner: str = "") -> str:
    """Return the text of a content, which is a string or a list of text parts of one of ``types``.

    Raises ApiError for other content, with the type of the part that is not read.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(param, "must be text or a list of parts of text")
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in types:
            raise unsupported(
                param, f"only text is read, and part {number} is of the type {str(kind)[:32]!r}"
            )
        if not isinstance(part.get("text"), str):
            raise invalid(param, f"part {number} has no text")
        texts.append(part["text"])
    return joiner.join(texts)


def check_message(message: OpenAiMessage, param: str) -> None:
    """Raise ApiError if no chat template can render a message, which the request has at
    ``param``, or if it has more calls than a policy can make."""
    check_call_count(message, param)
    for problem in message_problems([message.for_template()], ""):
        raise invalid(param, problem.removeprefix("[0]").lstrip(": "))


def check_call_count(message: OpenAiMessage, param: str) -> None:
    """Raise ApiError if a message has more calls than a turn of a policy can have."""
    if len(message.calls) > MAX_CALLS:
        raise invalid(param, f"a turn has at most {MAX_CALLS} calls")


def name_tool_results(messages: Sequence[OpenAiMessage]) -> list[OpenAiMessage]:
    """Return the messages, in which each result of a call has the name of the called tool."""
    tool_of: dict[str, str] = {}
    named = []
    for message in messages:
        tool_of |= {call.id: call.name for call in message.calls}
        is_result = message.role == "tool"
        named.append(
            replace(message, name=tool_of.get(message.call_id, "")) if is_result else message
        )
    return named


class TextPart(BaseModel):
    """One text part of a message's content."""

    type: Literal["text"]
    text: str


def _check_content(content: object) -> object:
    """Raise ValueError for content other than text. This runs before pydantic's union check, whose
    errors would name the union's types instead of the problem."""
    if content is not None and not isinstance(content, str | list):
        raise ValueError("must be text, a list of parts of text, or null")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping):
            raise ValueError(f"only text is read, and part {number} is not a valid part")
        if part.get("type") != "text":
            raise ValueError(
                f"only text is read, and part {number} is of the type "
                f"{str(part.get('type'))[:32]!r}"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {number} has no text")
    return content


class FunctionCall(BaseModel):
    """Function name of a call, and its arguments as JSON text."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str


class CallPart(BaseModel):
    """One tool call of an assistant's message."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message of a conversation; ``content`` is a string, a list of text parts, or null."""

    role: str
    content: Annotated[str | list[TextPart] | None, BeforeValidator(_check_content)] = None
    tool_calls: list[CallPart] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    model_config = ConfigDict(extra="allow")

    def text(self) -> str:
        """Return the whole content as one string."""
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content or ())
        )

    def reasoning(self) -> str:
        """Return the reasoning that the client sent back; "" if it sent none."""
        reasoning = (self.model_extra or {}).get("reasoning_content")
        return reasoning if isinstance(reasoning, str) else ""

    def check_served(self, param: str) -> None:
        """Raise ApiError for a field whose meaning would be lost; ``param`` is the message's
        place."""
        for name, served in _REFUSED_OF_MESSAGES.items():
            if (self.model_extra or {}).get(name):
                raise unsupported(f"{param}.{name}", served)

    def calls(self) -> tuple[OpenAiCall, ...]:
        """Return the tool calls."""
        return tuple(
            OpenAiCall(c.id, c.function.name, c.function.arguments) for c in self.tool_calls or ()
        )


class Function(BaseModel):
    """Description of a function. Other keys, such as ``description``, are not checked because only
    the policy reads them."""

    name: str = Field(min_length=1, max_length=256)
    parameters: dict[str, Any] | None = None


class OpenAiTool(BaseModel):
    """Description of a tool that the policy may call."""

    type: Literal["function"]
    function: Function


def _check_tool(schema: dict[str, Any]) -> dict[str, Any]:
    """Validate the schema of a tool and return it unchanged: the policy sees its keys in this
    order."""
    OpenAiTool.model_validate(schema)
    if problem := json_problem(schema):
        raise ValueError(problem)
    return schema


class StreamOptions(BaseModel):
    """Options of a streamed answer; ``include_usage`` asks for a last chunk with token counts."""

    include_usage: StrictBool | None = None


_IGNORED = frozenset(
    {
        "frequency_penalty",
        "max_completion_tokens",
        "max_tokens",
        "metadata",
        "min_p",
        "prediction",
        "presence_penalty",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "repetition_penalty",
        "safety_identifier",
        "seed",
        "service_tier",
        "store",
        "temperature",
        "top_k",
        "top_p",
        "user",
        "verbosity",
    }
)
"""Fields that are ignored: the policy is sampled as it is trained, and answers are not stored."""
_GEN_OPTIONS = "the policy is sampled as it is trained (gen.*)"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "answers are text"),
    "chat_template": ((), "set it in the tokenizer of actor.path"),
    "chat_template_kwargs": (({},), "set actor.chat_template_kwargs"),
    "function_call": (("auto", "none"), "use tool_choice"),
    "functions": (([],), "use tools"),
    "logit_bias": (({},), _GEN_OPTIONS),
    "modalities": ((["text"],), "answers are text"),
    "n": ((1,), "an answer has one choice; send several requests"),
    "top_logprobs": ((0,), "logprobs are those of the sampled tokens only"),
    "web_search_options": ((), "nothing is searched; offer a tool"),
}
"""Fields that would change the answer and are not served: the values that ask for nothing, and what
is served."""
_REFUSED_OF_MESSAGES = {
    "audio": "only text is read",
    "function_call": "use tool_calls",
    "refusal": "answers contain no refusal",
    "prefix": "an answer does not continue a message",
}
"""Fields of a message that would be lost, and what is served."""


class ChatRequest(BaseModel):
    """Body of a request: the fields that the endpoint honours, and all others in ``model_extra``.

    The policy is sampled as it is trained, so temperature, top_p, max_tokens, seed and the like are
    ignored (``_IGNORED``). Every other field is refused unless it asks for nothing.
    """

    model_config = ConfigDict(extra="allow")
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: str | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    logprobs: StrictBool | None = None
    stop: Any = None
    tools: list[Annotated[dict[str, Any], AfterValidator(_check_tool)]] | None = Field(
        None, max_length=MAX_TOOLS
    )
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    response_format: Any = None

    def conversation(self) -> list[OpenAiMessage]:
        """Return the messages. Raises ApiError for fields and messages that are not served."""
        self._check_served()
        tool_of: dict[str, str] = {}
        messages = []
        for number, message in enumerate(self.messages):
            message.check_served(f"messages.{number}")
            role = _template_role(message.role, f"messages.{number}.role")
            calls = message.calls()
            if message.content is None and role != "assistant":
                raise invalid(f"messages.{number}.content", "only an assistant's may be null")
            if calls and role != "assistant":
                raise invalid(f"messages.{number}.tool_calls", "only an assistant makes calls")
            if (role == "tool") != (message.tool_call_id is not None):
                raise invalid(
                    f"messages.{number}.tool_call_id", "messages of the role tool have one"
                )
            tool_of |= {call.id: call.name for call in calls}
            call_id = message.tool_call_id or ""
            messages.append(
                OpenAiMessage(
                    role,
                    message.text(),
                    calls,
                    call_id,
                    tool_of.get(call_id, ""),
                    reasoning=message.reasoning(),
                )
            )
            check_call_count(messages[-1], f"messages.{number}.tool_calls")
        check_messages(messages)
        return messages

    def parse_tools(self) -> ToolSchemas:
        """Return the offered tools. The policy sees them with every ``tool_choice``."""
        return tuple(self.tools or ())

    def parse_rules(self) -> AnswerRules:
        """Return what the request asks of the answer. Raises ApiError."""
        choice, names = _read_tool_choice(self.tool_choice)
        rules = AnswerRules(
            stop=_read_stop(self.stop),
            tool_choice=choice,
            tool_names=names,
            parallel_calls=self.parallel_tool_calls is not False,
            json=_read_response_format(self.response_format),
            strict_tools=read_strict_tools(self.parse_tools()),
        )
        check_tool_names(rules, self.parse_tools())
        return rules

    def _check_served(self) -> None:
        check_fields(self.model_extra, _IGNORED, _REFUSED)


def check_messages(messages: Sequence[OpenAiMessage]) -> None:
    """Raise ApiError for messages that no chat template can render."""
    for problem in message_problems([message.for_template() for message in messages], "messages"):
        raise ApiError(400, "invalid_request", problem, "messages")


def read_strict_tools(tools: ToolSchemas) -> dict[str, JsonSchema]:
    """Return the schemas of the arguments of those tools that are ``strict``. Raises ApiError."""
    return read_strict_schemas(
        (
            tool["function"]["name"],
            tool["function"].get("parameters") or {},
            f"tools.{number}.function.parameters",
        )
        for number, tool in enumerate(tools)
        if tool["function"].get("strict") is True
    )


def _template_role(role: str, param: str) -> str:
    if role not in _ROLES:
        raise unsupported(param, f"the roles are {', '.join(_ROLES)}, not {role[:32]!r}")
    return _ROLES[role]


def _read_stop(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if strings is None:
        return ()
    if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings):
        raise invalid("stop", "a string or a list of strings")
    return check_stop(strings)


def _read_tool_choice(value: Any) -> tuple[ToolChoice, tuple[str, ...]]:
    """Return whether the answer has to contain calls, and the tools that it may call. Raises
    ApiError."""
    match value:
        case None | "auto":
            return "auto", ()
        case "none":
            return "none", ()
        case "required":
            return "required", ()
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", (name,)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_, *_] as tools}}:
            names = [_read_tool_choice(tool)[1] for tool in tools if isinstance(tool, Mapping)]
            if mode in ("auto", "required") and len(names) == len(tools):
                return mode, tuple(name for each in names for name in each)
    raise unsupported(
        "tool_choice", "auto, none, required, a function by its name, or allowed_tools are served"
    )


def _read_response_format(value: Any) -> JsonAnswer | None:
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return JsonAnswer()
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return JsonAnswer(read_schema(schema, "response_format.json_schema.schema"))
        case {"type": "json_schema"}:
            raise invalid("response_format.json_schema.schema", "the schema is missing")
    raise unsupported("response_format", "text, json_object and json_schema are served")
