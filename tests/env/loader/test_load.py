"""An environment is found by its name or in a person's own file, and every mistake is one clear
sentence."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from realhf.api.environment import AssistantMessage, EnvironmentDefinition
from realhf.env.loader.load import build_environment, load_definition

Write = Callable[..., str]

ECHO = """
from dataclasses import dataclass

class Echo:
    @dataclass
    class Options:
        size: int = 3
        names: list[str] | None = None

    system_prompt = "Repeat."
    deterministic = False
    concurrency = 7

    def __init__(self, options):
        self.options = options

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": f"{self.options.size} {seed}"}]}

    async def step(self, message):
        return {"messages": [], "done": True, "reward": float(message.content == "hello")}
"""


async def test_a_file_with_one_class_is_an_environment_with_its_options(write: Write) -> None:
    """The options of the class stand beside those that say where rows come from."""
    spec = build_environment(write(ECHO), {"size": "5"})
    assert (spec.name, spec.system_prompt, spec.deterministic, spec.concurrency) == (
        "Echo",
        "Repeat.",
        False,
        7,
    )
    environment = spec.make("")
    opening = await environment.reset({}, seed=4)
    assert opening.messages[0]["content"] == "5 4"
    assert (await environment.step(AssistantMessage("hello"))).reward == 1.0
    await environment.close()


def test_a_definition_of_a_file_comes_before_its_classes(write: Write) -> None:
    """A file that holds a definition has said what it is about; a specification will do as well."""
    extra = """
    from realhf.api.environment import EnvironmentDefinition
    from realhf.env.loader.multi_turn import build_message_class

    DEFINITION = build_message_class(Echo)
    """
    path = write(ECHO + textwrap.dedent(extra))
    found = load_definition(path)
    assert isinstance(found, EnvironmentDefinition) and found is load_definition(
        f"{path}:DEFINITION"
    )
    assert found is not load_definition(f"{path}:Echo")
    spec = write(
        ECHO + "\nfrom realhf.env.loader.multi_turn import build_message_class as m\nSPEC = "
        "m(Echo).build(m(Echo).options())",
        "spec.py",
    )
    assert build_environment(spec, {}).name == "Echo"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sise": 3}, r"env\.sise is unknown; did you mean 'size'\?"),
        ({"size": "three"}, r"env\.size must be a whole number, not 'three'"),
        ({"size": [3]}, r"env\.size must be a whole number"),
        ({"names": ["a", {}]}, r"env\.names\[1\] must be text"),
        ({"heldout_fraction": 2}, r"env\.heldout_fraction=2\.0: must be between 0 and 0\.9"),
        ({"heldout_data": "x.jsonl"}, r"env\.heldout_data has no effect without env\.data"),
        (
            {"data": "x", "heldout_data": "y", "heldout_fraction": 0.5},
            r"heldout_fraction has no effect with",
        ),
        ({"data": "none.jsonl"}, r"env\.data=none\.jsonl: there is no such file"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(
    write: Write, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        build_environment(write(ECHO), options)


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("x = 1\nimport nowhere_at_all\n", "", r"ModuleNotFoundError: .*mine\.py, line 2\)"),
        ("def broken(:\n", "", r"SyntaxError: .*mine\.py, line 1\)"),
        ("raise SystemExit(3)\n", "", r"SystemExit: 3 \(.*mine\.py, line 1\)"),
        ("x = 1\n", "", "the file defines nothing of an EnvironmentDefinition"),
        (ECHO, "Eco", r"defines no 'Eco'; did you mean 'Echo'\?"),
        ("X = 4\n", "X", "found int, expected an EnvironmentDefinition"),
        (
            "class Half:\n    def reset(self): ...\n",
            "Half",
            r"the class Half with reset \(.*mine\.py, line 1\)",
        ),
        (
            ECHO + ECHO.replace("Echo", "Other"),
            "",
            r"the environments Echo, Other; name one: .*mine\.py:NAME",
        ),
        (
            ECHO.replace("async def step", "def step"),
            "",
            r"Echo\.step must be an async method \(.*mine\.py, line 20\)",
        ),
        (
            ECHO.replace(", *, seed", ""),
            "",
            r"reset\(self, task, \*, seed\) and step\(self, message\)",
        ),
        (
            ECHO.replace("concurrency = 7", "concurrency = 'x'"),
            "",
            "concurrency of Echo must be a positive number",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(
    write: Write, text: str, name: str, sentence: str
) -> None:
    path = write(text)
    with pytest.raises(ValueError, match=sentence) as caught:
        load_definition(f"{path}:{name}" if name else path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("no_such_environment", r"unknown environment 'no_such_environment'.*file\.py:Name"),
        ("/nowhere/mine.py:Echo", r"there is no file /nowhere/mine\.py"),
        ("/tmp:Echo", r"/tmp:Echo: /tmp is neither a Python file \(\.py\) nor a module"),
        ("nowhere.at_all:Echo", "ModuleNotFoundError: No module named 'nowhere'"),
        (":Echo", "unknown environment ':Echo'"),
        ("json:Echo", "json defines no 'Echo'"),
    ],
)
def test_a_reference_that_leads_nowhere_is_one_sentence(reference: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_definition(reference)


def test_a_build_that_fails_is_named_with_its_line(write: Write) -> None:
    """Errors of an author's own ``build`` are no stack traces, and what it returns is looked at."""
    text = """
    from dataclasses import dataclass
    from realhf.api.environment import EnvironmentDefinition

    @dataclass
    class Options:
        size: int = 1

    def fail(options):
        return {}["key"]

    FAILS = EnvironmentDefinition(Options, fail)
    RETURNS = EnvironmentDefinition(Options, lambda options: options.size)
    """
    path = write(text)
    with pytest.raises(ValueError, match=r"KeyError: 'key' \(.*mine\.py, line 10\)"):
        build_environment(f"{path}:FAILS", {})
    with pytest.raises(ValueError, match="build must return an EnvironmentSpec, not int"):
        build_environment(f"{path}:RETURNS", {})
