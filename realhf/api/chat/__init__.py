"""Chats: conversations as token ids by the tokenizer's own template, and policy turns as messages with tool calls."""

from realhf.api.chat.call_json import CallProblem, read_json
from realhf.api.chat.families import FAMILIES, family_of, reads_tools, unread_variables
from realhf.api.chat.template_chat import ChatTemplateError, TemplateChat
from realhf.api.chat.turn_parser import parse_turn

__all__ = [
    "FAMILIES",
    "CallProblem",
    "ChatTemplateError",
    "TemplateChat",
    "family_of",
    "parse_turn",
    "read_json",
    "reads_tools",
    "unread_variables",
]
