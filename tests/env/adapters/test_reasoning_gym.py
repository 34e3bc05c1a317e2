"""Data sets of reasoning_gym without the package: a data set in its form takes its place."""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from realhf.api.environment import (
    HELD_OUT,
    TRAIN,
    AssistantMessage,
    DemonstrationRequest,
    EnvironmentFailure,
    EnvironmentSpec,
    Turn,
)
from realhf.env.loader.load import build_environment


@dataclass
class DoublingConfig:
    """Options of a data set, in the package's form."""

    highest: int = 9
    seed: int = 0
    size: int = 500


class Doubling:
    """How much is twice a number? Verifiers of the package pay a part for a text that contains the
    right answer."""

    def __init__(self, config: DoublingConfig) -> None:
        if config.highest < 1:
            raise ValueError("highest must be positive")
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = 1 + (self.config.seed + index) % self.config.highest
        return {"question": f"Twice {number}?", "answer": str(2 * number), "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> Any:
        if answer == "hang":
            time.sleep(60)
        if answer == "nan":
            return float("nan")
        if answer == "crash":
            raise RuntimeError("no number")
        if answer == entry["answer"]:
            return 1.0
        return 0.5 if answer and entry["answer"] in answer else 0.01


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, with one data set and some whose modules evaluate text."""
    (tmp_path / "reasoning_gym_evaluating.py").write_text(
        "class Evaluating:\n"
        "    def score_answer(self, answer, entry):\n"
        "        return float(eval (answer) == 3)\n"
    )
    (tmp_path / "reasoning_gym_simplifying.py").write_text(
        "# As sympy.simplify, which parses texts.\n"
        "def simplify(text):\n"
        "    return 3\n\n"
        "def judge(answer):\n"
        "    return float(simplify(answer) == 3)\n"
    )
    (tmp_path / "reasoning_gym_importing.py").write_text(
        "from reasoning_gym_simplifying import judge\n\n"
        "class Importing:\n"
        "    def score_answer(self, answer, entry):\n"
        "        return judge(answer)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("reasoning_gym_evaluating")
    importing = importlib.import_module("reasoning_gym_importing")
    factory = ModuleType("reasoning_gym.factory")
    factory.DATASETS = {  # type: ignore[attr-defined]
        "doubling": (Doubling, DoublingConfig),
        "evaluating": (module.Evaluating, DoublingConfig),
        "importing": (importing.Importing, DoublingConfig),
        "composite": (Doubling, DoublingConfig),
    }
    factory.create_dataset = lambda name, **options: Doubling(DoublingConfig(**options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", ModuleType("reasoning_gym"))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    for name in ("evaluating", "importing", "simplifying"):
        name = f"reasoning_gym_{name}"
        monkeypatch.setitem(sys.modules, name, sys.modules[name])


def build(**options: Any) -> EnvironmentSpec:
    return build_environment("reasoning_gym", {"dataset": "doubling", **options})


async def play(text: str, seed: int = 4, **options: Any) -> Turn:
    environment = build(**options).make("")
    opening = await environment.reset({}, seed=seed)
    assert opening.messages[0]["content"] == "Twice 5?"
    return await environment.step(AssistantMessage(text))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("so <answer> 10 </answer>", 1.0),
        ("<answer>9</answer> no, <answer>10</answer>", 1.0),
        ("10", 0.0),
        ("", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>9</answer>", 0.0),
        ("<answer>9 or 10 or 11</answer>", 0.0),
        ("<answer>10", 0.0),
        (f"<answer>10{' 1' * 3000}</answer>", 0.0),
    ],
)
async def test_a_right_answer_is_paid_and_nothing_else(text: str, reward: float) -> None:
    """Not even a text that contains the answer, nor saying nothing."""
    turn = await play(text)
    assert turn.done and turn.reward == reward and turn.metrics["success"] == reward
    assert turn.metrics["verifier_failed"] == 0.0


async def test_partial_scores_are_paid_on_request() -> None:
    turn = await play("<answer>9 or 10</answer>", partial_credit=True)
    assert turn.reward == 0.5 and turn.metrics["success"] == 0.0
    assert (await play("no tags", partial_credit=True)).reward == 0.0


async def test_an_answer_on_which_the_verifier_fails_is_wrong_and_counted() -> None:
    turn = await play("<answer>crash</answer>")
    assert turn.reward == 0.0 and turn.metrics["verifier_failed"] == 1.0


@pytest.mark.parametrize(
    ("answer", "kind", "problem"),
    [("hang", "timeout", "no result within 0.2 s"), ("nan", "internal", "finite number")],
)
async def test_a_broken_verifier_is_a_failure_and_no_reward(
    answer: str, kind: str, problem: str
) -> None:
    with pytest.raises(EnvironmentFailure, match=problem) as caught:
        await play(f"<answer>{answer}</answer>", timeout_s=0.2)
    assert caught.value.kind == kind


async def test_a_step_without_an_episode_is_a_failure() -> None:
    with pytest.raises(EnvironmentFailure, match="reset comes first"):
        await build().make("").step(AssistantMessage("<answer>1</answer>"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dataset": ""}, "env.dataset is missing"),
        ({"dataset": "dubling"}, "did you mean 'doubling'"),
        ({"dataset": "evaluating"}, "evaluates text as Python"),
        ({"dataset": "importing"}, "evaluates text as Python"),
        ({"dataset": "composite"}, "mix environments with env.mix"),
        ({"args": {"lowest": 3}}, r"env.args.lowest: .* has no such option \(it has highest\)"),
        ({"args": {"seed": 3}}, "env.args.seed"),
        ({"args": {"highest": 0}}, "env.args: ValueError: highest must be positive"),
    ],
)
def test_mistakes_name_the_option(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        build(**options)


def test_the_splits_share_no_question() -> None:
    spec = build()
    seeds = [
        {spec.tasks(split).instantiate("doubling", seed).seed for seed in range(50)}
        for split in (TRAIN, HELD_OUT)
    ]
    assert not seeds[0] & seeds[1]


def test_demonstrations_are_right_and_habits_wrong() -> None:
    spec = build(args={"highest": 7})
    assert spec.demonstrate is not None
    shown = [*spec.demonstrate(DemonstrationRequest(40, 3, 0.25, 0.25))]
    assert len(shown) == 40 and sum(not each.succeeds for each in shown) == 10
    for each in shown:
        right = str(2 * (1 + each.task.seed % 7))
        assert (each.turns == (f"<answer>{right}</answer>",)) == each.succeeds


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ValueError, match=r"pip install .*\[reasoning_gym\]"):
        build()
