"""What a policy is told of a rollout, and the prompt in which it reads that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realhf.api.chat_template import TemplateChat
from realhf.api.keys import FEEDBACK_PROMPT
from realhf.api.rollout import PlayedTurn, RolloutOutcome
from realhf.backends.training.tokenizer_loading import load_tokenizer
from realhf.rollout.feedback import Feedback, feedback_text
from realhf.rollout.rollout_sample import outcomes_to_sample

OPENING = (
    {"role": "system", "content": "Use the CLI."},
    {"role": "user", "content": "Make a bucket."},
)


@pytest.fixture(scope="module")
def chat(tiny_policy: Path) -> TemplateChat:
    return TemplateChat(load_tokenizer(str(tiny_policy), "actor"))


def rollout(
    chat: TemplateChat,
    *turns: tuple[str, str],
    achieved: bool = False,
    status: str = "finished",
    **more: Any,
) -> RolloutOutcome:
    played = tuple(
        PlayedTurn(said, heard, 0.0, messages=[{"role": "user", "content": heard}])
        for said, heard in turns
    )
    completion = chat.encode("aws s3 ls")
    n = len(completion)
    return RolloutOutcome(
        status=status,
        prompt_ids=chat.opening(OPENING),
        completion_ids=completion,
        logprobs=[-1.0] * n,
        versions=[0] * n,
        loss_mask=[True] * n,
        reward=float(achieved) if status == "finished" else None,
        achieved=achieved,
        progress=0.0,
        turns=played,
        task_id="t",
        group="g",
        seed=0,
        opening=OPENING,
        **more,
    )


def test_errors_and_solutions_are_told(chat: TemplateChat) -> None:
    """A failed rollout reads the turns that went wrong, every rollout what another one did right;
    what failed for the environment's own reasons, or did nothing that was called wrong, is told
    nothing."""
    wrong = rollout(
        chat,
        ("aws s3 mk", "error: no such command"),
        ("aws s3 ls", "ok"),
        ("f()", '{"error": "no f"}'),
    )
    right, again = (
        rollout(chat, (f"aws s3 mb {name}", "ok"), achieved=True) for name in ("a", "b")
    )
    idle = rollout(chat, ("aws s3 ls", "ok"))
    lost = rollout(chat, ("x", "error: y"), status="lost")
    group = [wrong, right, again, idle, lost]
    errors = feedback_text(wrong, group, "errors")
    assert "aws s3 mk\nerror: no such command\nf()\n" in errors and "aws s3 ls" not in errors
    assert [feedback_text(one, group, "errors") for one in group[1:]] == [""] * 4
    solved = [feedback_text(one, group, "solved") for one in group]
    assert ["mb a" in text for text in solved] == [
        True,
        False,
        True,
        True,
        False,
    ] and "mb b" in solved[1]
    assert [feedback_text(one, group, "any") for one in group] == solved
    assert (
        feedback_text(wrong, [wrong, idle], "any") == errors
        and feedback_text(wrong, [wrong], "solved") == ""
    )


def test_the_text_stands_in_the_prompt_within_its_bounds(chat: TemplateChat) -> None:
    """Behind the message of the user, in every row that begins with the opening; the rest of a
    row's prompt stays."""
    long = "error: " + " ".join(f"word{n}" for n in range(300))
    wrong = rollout(chat, ("aws s3 mk", long))
    later = replace(wrong, prompt_ids=[*wrong.prompt_ids, 7, 8, 9])
    strange = replace(wrong, prompt_ids=wrong.prompt_ids[1:])
    (told,) = Feedback(chat, "any", 64, 500)([replace(wrong, branches=(later, strange))])
    grown = len(told.feedback_prompt) - len(wrong.prompt_ids)
    assert 16 < grown <= 64
    text = chat.decode(told.feedback_prompt)
    assert (
        text.index("Make a bucket.")
        < text.index("Feedback on an earlier")
        < text.index("Solve the task correctly.")
    )
    assert (
        told.branches[0].feedback_prompt == [*told.feedback_prompt, 7, 8, 9]
        and not told.branches[1].feedback_prompt
    )
    size = len(wrong.prompt_ids) + len(wrong.completion_ids)
    for room in (0, 5, 30, 60):
        (bound,) = Feedback(chat, "any", 64, size + room)([wrong])
        assert (
            not bound.feedback_prompt
            or len(bound.feedback_prompt) + len(wrong.completion_ids) <= size + room
        )
        assert bool(bound.feedback_prompt) == (room >= 30)


def test_a_sample_has_the_prompts_where_they_are_asked_for(chat: TemplateChat) -> None:
    """A row that was told nothing, or trains nothing, has a single -1."""
    wrong = rollout(chat, ("a", "error: b"))
    idle = rollout(chat, ("a", "b"))
    lost = replace(rollout(chat, status="lost"), feedback_prompt=[1, 2])
    group = [*Feedback(chat, "errors", 64, 500)([wrong, idle]), lost]
    sample = outcomes_to_sample(["s"], [group], feedback=True)
    lengths = sample.lengths(FEEDBACK_PROMPT).values.tolist()
    assert lengths == [len(group[0].feedback_prompt), 1, 1] and lengths[0] > 1
    assert sample[FEEDBACK_PROMPT].tolist() == [*group[0].feedback_prompt, -1, -1]
    assert FEEDBACK_PROMPT not in outcomes_to_sample(["s"], [group]).keys
