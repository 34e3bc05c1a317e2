"""Finds out from the text of a chat template what it reads, and how a policy that was trained with it writes calls."""

from __future__ import annotations

import re
from collections.abc import Iterable

HERMES, XML, LLAMA, PLAIN = "hermes", "xml", "llama", "plain"
FAMILIES = (HERMES, XML, LLAMA, PLAIN)
"""How tool calls are written: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen 2.5 and 3,
SmolLM); ``<tool_call><function=name><parameter=key>`` (Qwen3-Coder); ``{"name": ..., "parameters": {...}}`` as the
whole turn (Llama 3); not at all, or in a way that is not known here, so that calls stay text."""

_SET_HERE = frozenset({"messages", "add_generation_prompt", "tokenize", "chat_template", "tools"})


def family_of(template: str) -> str:
    """Return the one of ``FAMILIES`` that a chat template asks for, "plain" when it asks for no other."""
    if "<tool_call>" in template:
        return XML if "<function=" in template else HERMES
    if "<|python_tag|>" in template or re.search(r'"parameters\\?":', template):
        return LLAMA
    return PLAIN


def reads_tools(template: str) -> bool:
    """Whether a chat template reads the schemas of tools."""
    return bool(re.search(r"\btools\b", template))


def unread_variables(template: str, names: Iterable[str]) -> list[str]:
    """Return the names that do not occur in the text of a chat template, and those that are set at every rendering
    anyway."""
    return [name for name in names if name in _SET_HERE or not re.search(rf"\b{re.escape(name)}\b", template)]
