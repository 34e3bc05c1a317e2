"""Settings as fields, flags and variables."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest

from realhf.web.settings import SettingError, Settings, setting


@dataclass(frozen=True)
class _Settings(Settings):
    PREFIX: ClassVar[str] = "SOME_"
    UNPREFIXED: ClassVar[dict[str, str]] = {"kind": "KIND"}
    FLAGS: ClassVar[dict[str, str]] = {"lambda_mode": "lambda"}
    FOREIGN: ClassVar[frozenset[str]] = frozenset({"URL"})

    name: str = setting("", "a name")
    kind: str = setting("a", "one of two", choices=("a", "b"))
    lambda_mode: str = setting("stub", "a word that Python keeps")
    count: int = setting(1, "a count", limits=(0, 8))
    share: float = setting(0.5, "a fraction; 100 % is all", limits=(0, 1))
    bound: float | None = setting(None, "at least one", limits=(1, math.inf))
    on: bool = setting(False, "a switch")
    rows: str = setting("", "some rows", bare="all")


@dataclass(frozen=True)
class _WithoutVariables(Settings):
    model: str = setting(about="a required flag")
    count: int = setting(1, "a count", limits=(0, 8))


def test_a_flag_wins_over_its_variable_and_that_over_the_default() -> None:
    environment = {
        "SOME_COUNT": "3",
        "SOME_SHARE": "0.25",
        "KIND": "b",
        "SOME_URL": "elsewhere",
        "COUNT": "7",
    }
    found = _Settings.parse(["--count", "5", "--lambda", "sandbox", "--rows"], environment)
    assert found == _Settings(count=5, share=0.25, kind="b", lambda_mode="sandbox", rows="all")
    assert _Settings.resolve(None, found.to_environment()) == found
    assert set(found.to_environment()) == {
        "SOME_COUNT",
        "SOME_SHARE",
        "KIND",
        "SOME_LAMBDA",
        "SOME_ROWS",
    }


@pytest.mark.parametrize(
    ("arguments", "environment", "on"),
    [
        ([], {}, False),
        (["--on"], {}, True),
        (["--on", "1"], {}, True),
        (["--on", "false"], {}, False),
        (["--no-on"], {"SOME_ON": "yes"}, False),
        ([], {"SOME_ON": "TRUE"}, True),
        ([], {"SOME_ON": ""}, False),
    ],
)
def test_a_switch_is_given_bare_negated_or_with_a_word(arguments, environment, on: bool) -> None:
    assert _Settings.parse(arguments, environment).on is on


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        (["--count", "9"], {}, r"SOME_COUNT \(--count\) is 9; allowed: 0 to 8"),
        ([], {"SOME_COUNT": "two"}, r"SOME_COUNT \(--count\) is 'two'; give a whole number"),
        (["--share", "nan"], {}, r"SOME_SHARE \(--share\) is 'nan'; give a number"),
        (["--bound", "0.5"], {}, r"SOME_BOUND \(--bound\) is 0.5; allowed: at least 1"),
        (["--on", "perhaps"], {}, r"SOME_ON \(--on\) is 'perhaps'; give 1 or 0"),
        ([], {"KIND": "c"}, r"KIND \(--kind\) is 'c'; allowed: a, b"),
        ([], {"SOME_KOUNT": "1"}, r"unknown setting SOME_KOUNT \(known: .*SOME_COUNT"),
    ],
)
def test_a_mistake_is_named_with_variable_and_flag(arguments, environment, text: str) -> None:
    with pytest.raises(SettingError, match=text):
        _Settings.parse(arguments, environment)


def test_a_program_without_a_prefix_reads_no_variables() -> None:
    found = _WithoutVariables.parse(["--model", "m"], {"COUNT": "5", "MODEL": "n"})
    assert found == _WithoutVariables(model="m")
    with pytest.raises(SettingError, match=r"^--count is 9; allowed"):
        _WithoutVariables.parse(["--model", "m", "--count", "9"], {})
    with pytest.raises(SystemExit):
        _WithoutVariables.parse([], {})


def test_help_names_the_default_and_the_variable() -> None:
    parser = argparse.ArgumentParser()
    _Settings.add_arguments(parser)
    words = " ".join(parser.format_help().split())
    assert "--count INT a count; default 1 [SOME_COUNT]" in words and "100 % is all" in words
