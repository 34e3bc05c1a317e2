"""Check before a run that the policy's parser finds the tool calls that a model's chat template
writes.

    python -m realhf.rollout.tool_call_check files --model models/smollm2_135m

With ``--request`` it checks the calls of the demonstrations that a warm start would train on,
otherwise one call of each tool. If a call is not found, the program prints one line and exits with
code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import realhf
from realhf.api.chat_template import TemplateChat
from realhf.api.environment import DemonstrationRequest, EnvironmentSpec
from realhf.api.tool_parser import AUTO, FAMILIES, parse_turn, schema_kinds
from realhf.env.loader.load import build_environment
from realhf.rollout.demonstrations import SCRIPT_FAMILY, script_message

_WORDS = "some words"
_VALUES: Mapping[str, Any] = {
    "string": _WORDS,
    "integer": 3,
    "number": 2.5,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}
"""An example value for each JSON type. If a schema allows several types, the first one in this
order is used."""
_USER = {"role": "user", "content": "task"}


def check_calls(
    chat: TemplateChat, messages: Iterator[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> int:
    """Encode messages with tool calls, parse them back, and return the number of messages.

    Raises ChatTemplateError for the first message that differs, and for a template that does not
    show the tools.
    """
    chat.opening([_USER], tools)
    checked = 0
    for message in messages:
        chat.encode_turn(message, tools)
        checked += 1
    return checked


def read_demonstrated_calls(
    spec: EnvironmentSpec, request: DemonstrationRequest
) -> Iterator[dict[str, Any]]:
    """Yield the turns with tool calls in an environment's scripts. Raises ValueError for a call
    that cannot be parsed."""
    assert spec.demonstrate is not None
    for script in spec.demonstrate(request):
        for text in script.turns:
            message = script_message(parse_turn(text, SCRIPT_FAMILY))
            if message.get("tool_calls"):
                yield message


def build_example_calls(tools: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one example call of each tool, with its required arguments."""
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") or {}
        required = parameters.get("required") or ()
        properties = parameters.get("properties") or {}
        arguments = {
            name: _build_example_value(schema)
            for name, schema in properties.items()
            if name in required
        }
        call = {
            "type": "function",
            "id": "call00000",
            "function": {"name": function["name"], "arguments": arguments},
        }
        yield {"role": "assistant", "content": "", "tool_calls": [call]}


def _build_example_value(schema: Any) -> Any:
    """Return a value that a schema allows. Some parsers interpret untyped arguments by the
    schema."""
    if isinstance(schema, Mapping):
        if schema.get("enum"):
            return schema["enum"][0]
        if "const" in schema:
            return schema["const"]
    kinds = schema_kinds(schema) or {"string"}
    return next((value for kind, value in _VALUES.items() if kind in kinds), _WORDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit status; argparse exits on wrong options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("environment", help="a registered name, or file.py:Name")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="the environment's own options, as JSON"
    )
    parser.add_argument("--model", required=True, help="a folder or hub id with a tokenizer")
    parser.add_argument(
        "--template-kwargs",
        type=json.loads,
        default={},
        help="variables of the chat template, as JSON",
    )
    parser.add_argument(
        "--tool-parser", choices=(AUTO, *FAMILIES), default=AUTO, help="the syntax of calls"
    )
    parser.add_argument(
        "--request", type=json.loads, help="fields of DemonstrationRequest, as JSON"
    )
    args = parser.parse_args(argv)
    from transformers import AutoTokenizer

    try:
        spec = build_environment(args.environment, args.options)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        chat = TemplateChat(
            tokenizer, template_kwargs=args.template_kwargs, tool_parser=args.tool_parser
        )
        if args.request is None or spec.demonstrate is None:
            messages = build_example_calls(spec.tools)
        else:
            messages = read_demonstrated_calls(spec, DemonstrationRequest(**args.request))
        checked = check_calls(chat, messages, spec.tools)
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    print(
        f"{checked} turns with calls, written by the chat template and read back by the parser "
        f"{chat.family}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
