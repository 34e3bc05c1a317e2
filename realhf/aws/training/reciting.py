"""Speaks the lines of a script in an episode, and writes the conversation down as a demonstration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realhf.api.environment import AssistantMessage, ChatMessage, Opening
from realhf.aws.tasks.captures import fill_setup, resolve
from realhf.aws.training.demonstrations import Script
from realhf.rollout.episode import Witness


class Reciting:
    """Is a ``Speaker`` without tokens, of ``script`` in the episode that ``seen`` witnesses."""

    tokens = None
    cut = False

    def __init__(self, script: Script, seen: Witness) -> None:
        self._lines, self._seen = script.lines, seen
        self._outputs: list[str] = []
        self._said: list[dict[str, Any]] = []

    def open(self, opening: Opening) -> None:
        """See ``Speaker``."""

    async def speak(self) -> AssistantMessage:
        """See ``Speaker``: the next command, its captures filled."""
        line = self._lines[len(self._said)]
        if line.number == 1:
            self._outputs = []
        answers = self._seen.opening.info["setup_answers"]
        command = resolve(fill_setup(line.command, answers), self._outputs)
        self._said.append({"role": "assistant", "content": command} | ({} if line.learned else {"train": False}))
        return AssistantMessage(command, text=command)

    def hear(self, messages: Sequence[ChatMessage]) -> bool:
        """See ``Speaker``: keep what the command printed, for the captures of later lines of its list."""
        if self._lines[len(self._said) - 1].number:
            self._outputs.append(self._seen.turns[-1].info["observation"]["command_output"])
        return True

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation. Roles: ``user`` the description, ``assistant`` a command (``"train": false`` where
        it is context, not to be imitated), ``user`` what a policy reads of the answer; the messages of the user carry
        the whole observation too."""
        return [*self._conversation()]

    def _conversation(self) -> Iterator[dict[str, Any]]:
        yield from _with_observation(self._seen.opening.messages, self._seen.opening.info)
        for said, turn in zip(self._said, self._seen.turns, strict=True):
            yield said
            yield from _with_observation(turn.messages, turn.info)


def _with_observation(messages: Sequence[ChatMessage], info: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Leaves out the random id of the episode: the file depends on the seed alone."""
    lasting = {key: value for key, value in info["observation"].items() if key != "episode_id"}
    for message in messages:
        yield {**message, "observation": lasting}
