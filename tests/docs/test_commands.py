"""Every command that a page prints is right: what trains is composed and checked, the rest is read
by its own parser.

``make test-docs`` runs them as well (``test_run_commands.py``)."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realhf.env.__main__ import main as environment_command
from realhf.launch.__main__ import main as launch
from realhf.launch.compose import experiment_names
from tests.docs.commands import ROOT, Command, commands_in, commands_of, pages

ELSEWHERE = {
    r"^(docker|git|pip|ray|sbatch|srun|openenv|curl|printf|nsys)$": "is no program of this project",
    r"^(pytest|sh|-c)$": "is run by hand, or by another test",
    r"^examples/trl_grpo.py$": "needs TRL; make test-trl",
    r"^module$": "stands for any module",
    r"^realhf\.algorithms\.presets$": "prints a page, which a test compares with what it prints",
}
"""Programs that are not looked into, and why."""
LAUNCHED = {
    r"env=openenv": "asks a server that does not run; make test-openenv",
    r"env=(gymnasium|verifiers|reasoning_gym|textarena)": "needs packages of others; make test-verifiers",
    r"env.path=mcp:": "needs a package of others; make test-mcp",
    r"reward_model.path=runs/": "takes what another run trained",
    r"recover_mode=resume": "goes on from a checkpoint, which there is none of",
    r"experiment=(NAME|mine|focal|\.\.\.)( |$)": "stands for any experiment",
    r"\+experiment_path=focal.py --help": "is help",
}
"""Launches that cannot be checked here, and why."""
PLACEHOLDERS = {
    "FILE.py:Name": "mine.py:Mine",
    "file.py:Name": "mine.py:Mine",
    "my_env.py:Name": "mine.py:Mine",
    "guess.py:Guess": "mine.py:Mine",
    "file.py:function": "agent.py:rollout",
    "/path/focal.py": "focal.py",
    "env=NAME": "env=sql",
    "engine.name=NAME": "engine.name=embedded",
    "=FOLDER": "=policy",
    "=POLICY": "=policy",
    "=STUDENT": "=policy",
    "=TEACHER": "=policy",
    "$seed": "1",
    "$eta": "1",
    "N": "1",
}
"""What a page leaves to the reader, and what is put in its place: a word, or its end."""
USAGE = re.compile(r"\s*\[[^\]=]*=?\.\.\.\]")
"""What the page says may follow: ``[key=value ...]``."""


class Parsed(BaseException):
    """The arguments were understood."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> Path:
    """A folder in which the pages' commands find what they name."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("docs", "examples", "benchmarks", "tests", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    shutil.copytree(tiny_policy, folder / "policy")
    described = json.loads((folder / "policy" / "config.json").read_text())
    (folder / "policy" / "config.json").write_text(
        json.dumps(described | {"max_position_embeddings": 1 << 15})
    )
    (folder / "models").mkdir()
    (folder / "models" / "smollm2_135m").symlink_to(folder / "policy")
    assert environment_command(["init", "mine", "--folder", str(folder)]) == 0
    for name, page in (("focal", "extend/experiment.md"), ("agent", "black_box_agents.md")):
        code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)[0]
        # Under a name of its own: other tests of this process load the same algorithm from where it
        # lies.
        (folder / f"{name}.py").write_text(code.replace('"focal_sft"', '"focal_sft_of_the_page"'))
    [sums] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (folder / "sums.py").write_text(sums)
    blocks = re.findall(
        r"```json\n(.*?)```", (ROOT / "docs" / "data_files.md").read_text(), re.DOTALL
    )
    for name, rows in zip(("rows", "pairs"), blocks, strict=True):
        (folder / f"{name}.jsonl").write_text(rows)
    (folder / "chats.jsonl").write_text('{"messages": []}\n')
    return folder


def filled(words: tuple[str, ...]) -> list[str]:
    """The words with what a page leaves open put in."""
    found = []
    for word in words:
        if word.startswith("["):
            break
        for gap, text in PLACEHOLDERS.items():
            whole = r"(?<![\w/])" if gap[0].isalnum() else ""
            word = re.sub(
                f"{whole}{re.escape(gap)}$" if len(gap) == 1 else f"{whole}{re.escape(gap)}",
                text,
                word,
            )
        found.append(word)
    return found


def launched(command: Command) -> list[str] | None:
    """The arguments of a launch, None for what is none. Options alone are those of a launch, as
    they are on a page."""
    words = filled(command.words)
    if "--" in words:
        words = ["python", "-m", "realhf.launch", *words[words.index("--") + 1 :]]
    if words[0].startswith("experiment="):
        return words
    if "realhf.launch" not in words:
        return None
    found = words[words.index("realhf.launch") + 1 :]
    return ["experiment=grpo", "env=sql", *found[1:]] if found[:1] == ["..."] else found


def check_launch(command: Command, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with a launch, "" if nothing is. A refusal that the page shows below is right,
    and so are words within a sentence that leave open which environment is meant."""
    if any(re.search(pattern, " ".join(arguments)) for pattern in LAUNCHED):
        return ""
    if "engine.tensor_parallel_size=" in " ".join(arguments):
        arguments = [*arguments, "machine=8xH100"]  # only vLLM has the option
    told = ""
    code = 2
    for added in ([], ["env=sql"]) if not command.whole else ([],):
        asked = [*arguments, *added]
        code = launch(
            asked
            if not asked or {"--help", "--options-reference"} & {*asked}
            else [*asked, "mode=check"]
        )
        told = capsys.readouterr().err.strip()
        if "choose an environment" not in told:
            break
    refusals = [line for line in command.shown[:1] if line.startswith("config error:")]
    if refusals:
        return (
            ""
            if code == 2 and told == refusals[0]
            else f"says {told!r}, and not what the page shows"
        )
    if "trace=true" in arguments and "has no config.json here" in told:
        return ""  # nothing is downloaded here, and the error says what to type
    return "" if code == 0 else told or "failed"


def check_parsed(command: Command, capsys: pytest.CaptureFixture[str]) -> str:
    """What a program's own parser has against its arguments, "" if nothing."""
    scripts = {
        "aws-env": "workers.env_worker",
        "run-api": "realhf.trajectory",
        "train-api": "realhf.tinker",
    }
    name = scripts.get(command.program, command.program)
    if name.endswith(".py"):
        file = Path(name)
        if not file.is_file():
            return f"there is no file {name}"
    else:
        spec = importlib.util.find_spec(name)
        spec = (
            importlib.util.find_spec(f"{name}.__main__")
            if spec and spec.submodule_search_locations
            else spec
        )
        if spec is None or not spec.origin:
            return f"there is no program {name}"
        file = Path(spec.origin)
    if file.name != "__main__.py" and "parse_" not in file.read_text():
        return ""
    arguments = filled(command.words)[len(command.words) - len(command.arguments) :]
    before = sys.argv
    path = [*sys.path]
    sys.argv, sys.path[:0] = (
        [name, *arguments],
        [str(file.parent.resolve())] if name.endswith(".py") else [],
    )
    try:
        runpy.run_path(name, run_name="__main__") if name.endswith(".py") else runpy.run_module(
            name, run_name="__main__"
        )
    except Parsed:
        return ""
    except SystemExit as end:
        told = capsys.readouterr().err.strip()
        part = not command.whole and re.search(
            r"are required|expected (one|at least one) argument", told
        )
        return "" if end.code in (0, None) or part else told
    finally:
        sys.argv = before
        sys.path[:] = path
    return ""


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, ...], str]:
    """What was found about a launch: several pages print the same."""
    return {}


@pytest.fixture
def only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs end where they have understood their arguments, and start no other."""
    depth = 0

    def patched(understood: Callable[..., Any]) -> Callable[..., Any]:
        def parse(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1  # A parser asks itself, and those of its subcommands.
            try:
                found = understood(*args, **kwargs)
            finally:
                depth -= 1
            if not depth:
                raise Parsed
            return found

        return parse

    for name in (
        "parse_args",
        "parse_known_args",
        "parse_intermixed_args",
        "parse_known_intermixed_args",
    ):
        monkeypatch.setattr(
            argparse.ArgumentParser, name, patched(getattr(argparse.ArgumentParser, name))
        )
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda *_, **__: pytest.fail("it was run"))


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_is_understood(
    page: Path,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    only_parse: None,
    known: dict[tuple[str, ...], str],
) -> None:
    """A launch composes and passes its checks, or is refused as the page shows; a target of make
    exists; any other program understands its arguments. Whoever adds a page adds commands to this
    test."""
    monkeypatch.chdir(workplace)
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wrong = {}
    for command in {each.words: each for each in commands_of(page)}.values():
        if (arguments := launched(command)) is not None:
            same = tuple(
                text
                for text in arguments
                if not text.startswith(("seed=", "trial_name=", "torch_threads="))
            )
            problem = known[same] if same in known else check_launch(command, arguments, capsys)
            known[same] = problem
        elif command.program == "make":
            unknown = [
                word for word in command.arguments if "=" not in word and word not in targets
            ]
            problem = f"there is no target {unknown[0]}" if unknown else ""
        elif any(re.fullmatch(pattern, command.program) for pattern in ELSEWHERE):
            problem = ""
        else:
            problem = check_parsed(command, capsys)
        if problem:
            wrong[f"{command.where}: {' '.join(command.words)}"] = problem
    assert not wrong, "\n".join(f"{command}\n    {problem}" for command, problem in wrong.items())


def test_commands_are_found_wherever_they_stand() -> None:
    """In blocks, over several lines, in sentences, behind other commands; not in blocks of other
    languages."""
    text = (
        "See `make test` or\n`python -m realhf.env\nlist`, not `train`.\n\n"
        "    $ cd x && python -m one a \\\n        b # c\n    config error: no\n\n"
        "```python\nprintf x\n```\n```\nA=1 run-api | python two.py > out\n```\n`experiment=grpo "
        "env=sql`\n"
    )
    found = commands_in(text, "page")
    assert [(each.number, each.program, each.arguments) for each in found] == [
        (1, "make", ["test"]),
        (2, "realhf.env", ["list"]),
        (5, "one", ["a", "b"]),
        (13, "run-api", []),
        (13, "two.py", []),
        (15, "experiment=grpo", ["env=sql"]),
    ]
    assert found[2].shown == ("config error: no",) and [each.whole for each in found] == [
        False,
        False,
        *3 * [True],
        False,
    ]


def test_the_pages_hold_commands_of_every_kind() -> None:
    """So that a change of how pages are written does not empty the test above."""
    every = [command for page in pages() for command in commands_of(page)]
    assert len(every) > 250 and sum(command.program == "realhf.launch" for command in every) > 40
    named = {
        word.partition("=")[2]
        for command in every
        for word in command.words
        if word.startswith("experiment=")
    }
    assert named >= {*experiment_names()} - {"sft_aws", "reinforce", "reinforce_aws"}


@pytest.mark.slow
def test_the_options_of_a_short_try_are_taken(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind the launches of the page, which play what ``init`` wrote: one was of a warm start, and
    there is none."""
    page = (ROOT / "docs" / "environments" / "README.md").read_text()
    [options] = re.findall(r"^`(total_train_steps=[^`]*)` behind these", page, re.MULTILINE)
    monkeypatch.chdir(workplace)
    for experiment in ("grpo", "grpo_async"):
        arguments = [
            f"experiment={experiment}",
            "env.path=mine.py:Mine",
            *options.split(),
            "mode=check",
        ]
        assert launch(arguments) == 0, capsys.readouterr().err
