"""A chat format without a model, in which decoding and encoding again does not give the same ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realhf.api.environment import AssistantMessage

END, FOLLOW, CUE = 900, 901, 902


class WordChat:
    """One token per character. The policy's tokens are another spelling of the same characters (+ 1000)."""

    stop_ids = (END,)

    def opening(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        del tools
        return [*(ord(c) % 900 for message in messages for c in message["content"]), CUE]

    def following_messages(
        self, messages: Sequence[Mapping[str, Any]], *, ended: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        del tools
        shown = [ord(c) % 900 for message in messages for c in message["content"]]
        return [*([] if ended else [END]), FOLLOW, *shown, CUE]

    def parse(self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()) -> AssistantMessage:
        del tools
        text = "".join(chr(i - 1000) for i in token_ids if i >= 1000)
        return AssistantMessage(text, text=text, token_count=len(token_ids))

    def forgotten(self, shape: Sequence[Sequence[str]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[bool, ...]:
        del tools
        return (False,) * (len(shape) - 1)

    def without_reasoning(self, token_ids: Sequence[int]) -> list[int] | None:
        del token_ids
        return None

    def without_open_reasoning(self, token_ids: Sequence[int]) -> list[int]:
        return list(token_ids)
