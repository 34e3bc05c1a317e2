"""An algorithm with a hyper-parameter of its own, in one Python file and one YAML outside the
tree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.api.config import BuiltinModelConfig
from realhf.backends.builtin_policy import build_builtin_policy
from realhf.base.installation import PACKAGE
from realhf.launch.__main__ import main

HERE = Path(__file__).resolve().parent
PAGE = PACKAGE.parent / "docs" / "extend" / "experiment.md"
TINY = BuiltinModelConfig(
    vocab_size=300, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The algorithm as somebody would have it: its two files, conversations and a model."""
    folder = tmp_path_factory.mktemp("outside")
    for suffix in ("py", "yaml"):
        shutil.copy(HERE / f"own_algorithm.{suffix}", folder / f"focal.{suffix}")
    ask = {"role": "user", "content": "list the queues"}
    answer = {"role": "assistant", "content": "aws sqs list-queues"}
    (folder / "chats.jsonl").write_text(
        "\n".join(json.dumps({"messages": [ask, answer]}) for _ in range(4))
    )
    build_builtin_policy(folder / "chats.jsonl", folder / "model", TINY, seed=0)
    return folder


def arguments(folder: Path, *more: str) -> list[str]:
    return [
        f"+experiment_path={folder / 'focal.py'}",
        f"actor.path={folder / 'model'}",
        f"algorithm.chats={folder / 'chats.jsonl'}",
        f"fileroot={folder / 'runs'}",
        *more,
    ]


@pytest.mark.nightly
@pytest.mark.slow
def test_it_trains_two_steps_and_its_option_reaches_the_loss(folder: Path):
    command = [sys.executable, "-m", "realhf.launch", *arguments(folder, "algorithm.focus=3")]
    done = subprocess.run(
        command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    (run,) = (folder / "runs" / "focal").iterdir()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    [call] = json.loads((run / "plan.json").read_text())["spec"]["mfcs"]
    assert call["interface_args"]["algorithm"]["focus"] == 3.0
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["policy/loss"] < step["policy/nll"], (
            "every token counts less than in the plain loss"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            "algorithm.focsu=1",
            "unknown option 'algorithm.focsu'; did you mean 'algorithm.focus'? The larger it is, "
            "the less a likely "
            "token counts; 0 is the plain loss.",
        ),
        (
            "algorithm.focus=7",
            "algorithm.focus=7.0: must be between 0 and 5. The larger it is, the less a likely "
            "token counts; 0 is the "
            "plain loss.",
        ),
        (
            "algorithm.focus=much",
            "algorithm.focus=much: Value 'much' of type 'str' could not be converted to Float",
        ),
        (
            "ppo.group_size=2",
            "option ppo.group_size has no effect in experiment focal: it belongs to dpo, ",
        ),
        ("rollout.max_turns=2", "option rollout.max_turns has no effect in experiment focal"),
    ],
)
def test_a_mistake_is_refused_with_the_text_of_the_option(
    folder: Path, capsys, option: str, said: str
):
    assert main(arguments(folder, "mode=check", option)) == 2
    assert f"config error: {said}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [("{focsu: 1}", "did you mean 'algorithm.focus'?"), ("{focus: -1}", "must be between 0 and 5")],
)
def test_a_mistake_in_its_yaml_is_refused_too(folder: Path, capsys, text: str, said: str):
    yaml = folder / "focal.yaml"
    before = yaml.read_text()
    try:
        yaml.write_text(f"algorithm: {text}\n")
        assert main(arguments(folder, "mode=check")) == 2
        assert said in capsys.readouterr().err
    finally:
        yaml.write_text(before)


@pytest.mark.slow
def test_it_is_in_order_as_it_is(folder: Path):
    """What is refused elsewhere is refused for its mistake."""
    assert main(arguments(folder, "mode=check")) == 0


@pytest.mark.slow
def test_its_options_are_in_its_help_with_the_values_of_its_yaml(folder: Path, capsys):
    assert main([f"+experiment_path={folder / 'focal.py'}", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "  algorithm.focus=1.0 " in shown and "0 is the plain loss. [between 0 and 5]" in shown
    assert "ppo." not in shown and "  total_train_steps=2 " in shown


def test_the_page_about_algorithms_shows_these_files():
    page = PAGE.read_text(encoding="utf-8")
    for suffix in ("py", "yaml"):
        assert (HERE / f"own_algorithm.{suffix}").read_text(encoding="utf-8") in page
