"""Help and the reference of options are made from the fields, and the reference in the tree is current."""

import subprocess
import sys

import pytest

from realhf.base.installation import PACKAGE
from realhf.launch.__main__ import main

PAGE = PACKAGE.parent / "docs" / "reference" / "options.md"


@pytest.mark.nightly
@pytest.mark.slow
def test_the_reference_is_what_the_fields_say():
    """In a process of its own: other tests register names, which are allowed values then."""
    done = subprocess.run(
        [sys.executable, "-m", "realhf.launch", "--options-reference"],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE.read_text(encoding="utf-8"), (
        f"make it anew: python -m realhf.launch --options-reference > {PAGE}"
    )
    assert "| `ppo.group_size` | `8` |" in done.stdout and "| `env.pool_size` | `16` |" in done.stdout


def test_the_help_of_an_experiment_shows_its_own_values_and_sections(capsys):
    assert main(["experiment=sft_aws", "seed=7", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("sft_aws: Supervised training")
    assert "  total_train_steps=600 " in shown and "  seed=7 " in shown and "  env.pool_size=16 " in shown
    assert "ppo." not in shown.replace("(ppo.", ""), "it does not train with a policy gradient"


def test_a_mistake_beside_help_is_told(capsys):
    assert main(["experiment=sft_awz", "--help"]) == 2
    assert "did you mean 'sft_aws'" in capsys.readouterr().err


def test_the_general_help_says_whose_the_other_sections_are(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    at = shown.index(
        "Of grpo, grpo_async, grpo_aws, grpo_aws_async, grpo_stream_http, policy_gradient, ppo, ppo_async, reinforce, "
        "reinforce_aws:"
    )
    assert shown.index("  ppo.algo=grpo ") > at
    assert "Every task is played this many times, which makes a group. [at least 1]" in shown
