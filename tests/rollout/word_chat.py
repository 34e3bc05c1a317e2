"""Chat formats without a model, in which decoding and encoding again does not give the same ids,
and a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from realhf.api.environment import AssistantMessage
from realhf.api.model import GenOutput, GenRequest

END = 900
FOLLOW = 901
CUE = 902


class WordChat:
    """One token per character. The policy's tokens are another spelling of the same characters (+
    1000)."""

    stop_ids = (END,)

    def opening(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        del tools
        return [*(ord(c) % 900 for message in messages for c in message["content"]), CUE]

    def following_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        ended: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        end: int | None = None,
    ) -> list[int]:
        del tools, end
        shown = [ord(c) % 900 for message in messages for c in message["content"]]
        return [*([] if ended else [END]), FOLLOW, *shown, CUE]

    def parse(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> AssistantMessage:
        del tools
        text = self.decode(token_ids)
        return AssistantMessage(text, text=text, token_count=len(token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(i - 1000) for i in token_ids if i >= 1000)

    def find_forgotten_turns(
        self, shape: Sequence[Sequence[str]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[bool, ...]:
        del tools
        return (False,) * (len(shape) - 1)

    def without_reasoning(self, token_ids: Sequence[int]) -> list[int] | None:
        del token_ids
        return None

    def without_open_reasoning(self, token_ids: Sequence[int]) -> list[int]:
        return list(token_ids)


class LossyChat(WordChat):
    """Leaves out system messages, and needs no messages for a task and an observation."""

    def opening(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        return super().opening(
            [message for message in messages if message["role"] != "system"], tools
        )

    def first(self, task: str) -> list[int]:
        return self.opening([{"role": "user", "content": task}])

    def following(self, observation: str, *, ended: bool) -> list[int]:
        return self.following_messages([{"role": "user", "content": observation}], ended=ended)


class ScriptedPolicy:
    """Says ``speak(prompt, turn)``, where the prompt is the episode's task text; records every
    batch.

    ``finish`` is the finish reason (without it no end token)."""

    def __init__(self, speak: Callable[[str, int], str], *, finish: str = "stop") -> None:
        self.chat = LossyChat()
        self.batches: list[list[tuple[int, tuple[int, ...]]]] = []
        self.freed: list[int] = []
        self._speak = speak
        self._finish = finish

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        assert round_index == len(self.batches)
        self.batches.append([(request.slot, tuple(request.token_ids)) for request in requests])
        outputs = []
        for request in requests:
            ids = list(request.token_ids)
            task = "".join(chr(i) for i in ids[: ids.index(CUE)])
            words = self._speak(task, ids.count(CUE) - 1)
            tokens = [ord(c) + 1000 for c in words] + ([END] if self._finish == "stop" else [])
            version = round_index
            outputs.append(
                GenOutput(tokens, [-0.25] * len(tokens), [version] * len(tokens), self._finish)
            )
        return outputs

    def free(self, slots: Iterable[int]) -> None:
        self.freed += slots
