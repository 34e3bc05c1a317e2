"""What the pages print is run, as it stands: by a shell, in a folder of its own, made small by the
tests alone.

``make test-docs``. A file ``sitecustomize.py`` that only these processes see adds options to a
launch and a free port to a server; nothing of the product knows of it. ``test_commands.py`` looks
at every command, also at those not run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from realhf.api.config import ConfigError
from realhf.env.scaffold import ENV_FORMATS
from realhf.launch.build import build_experiment
from realhf.launch.checks import check_config
from realhf.launch.compose import compose_config
from tests.docs.commands import ROOT, Command, commands_in, commands_of, pages
from tests.docs.test_commands import ELSEWHERE, LAUNCHED, launched, workplace

__all__ = ["workplace"]
pytestmark = [pytest.mark.documented, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_S = 600
NOT_RUN = {
    r"scheduler=(join|ray|slurm)": "needs hosts of its own; make test-cluster, make test-ray",
    r"stream.url=": "needs a server and producers that run already",
    r"experiment=grpo_stream_http": "waits for producers; tests/test_stream_end_to_end.py brings "
    "them",
    r"model=qwen3": "asks a hub for weights",
    r"docs/extend/examples/pinned_scheduler.py": "tests/docs/test_extend.py runs it",
    r"(mine|guess)\.py": "is run by the tests of the page and of init below",
    r"focal.py": "tests/docs/test_extend.py runs it",
    r"/home/|[A-Z]{4,}": "leaves something open",
}
"""Launches that are composed and not run, and why, beside those that cannot be composed."""
PARSED = {
    r"benchmarks[./].*": "measures for minutes",
    r"examples/.*|docs/extend/examples/.*": "is run by tests/examples, tests/tinker or "
    "tests/docs/test_extend.py",
    r"tests\..*": "is a test",
    r"realhf": "prints its version; tests/packaging/test_wheel.py runs it",
    r"realhf\.(aws\.|cluster|worker|monitor\.|dataflow\.|view).*": "needs a finished run, a pool "
    "for minutes, or hosts",
    r"workers\.producer_worker": "needs two servers and a policy",
    r"train-api|realhf\.tinker": "needs the client tinker; make test-tinker",
    r"realhf\.rollout\.tool_call_check": "needs a model; tests/launch/test_tool_calls.py runs it",
    r"realhf\.api\.tool_syntax\.reference": "prints a table, which a test compares with the page",
    r"(pip|pytest|make|module|sh|venv)": "is no command of the package",
}
"""Programs whose arguments are read and that are not run, and why."""
SERVERS = ("aws-env", "run-api", "realhf.trajectory", "workers.env_worker")
SMALLER = (
    "total_train_steps=2",
    "critic.warmup_steps=1",
    "dataset.train_bs_n_seqs=2",
    "ppo.group_size=2",
    "rollout.sessions=4",
    "gen.max_new_tokens=8",
    "evaluation.episodes_per_task=1",
    "evaluation.greedy_episodes_per_task=0",
    "evaluation.templates=2",
    "warm_start.episodes_per_task=1",
    "warm_start.train_steps=2",
    "builtin.hidden_size=32",
    "builtin.num_heads=2",
    "builtin.num_layers=2",
    "builtin.intermediate_size=64",
    "env.pool_size=4",
    "torch_threads=1",
    "monitor.progress=false",
)
SITE = """import os, sys
asked = sys.orig_argv[1:3]
if asked == ["-m", "realhf.launch"]:
    sys.argv += os.environ["LAUNCH_SMALLER"].split()
elif asked[:1] == ["-m"] and asked[1:] in (["workers.env_worker"], ["realhf.trajectory"]) or asked[:1] and (
    asked[0].endswith(("/aws-env", "/run-api"))
):
    sys.argv += ["--port", "0"]
"""


def smaller(arguments: list[str]) -> list[str]:
    """Those of ``SMALLER`` that have an effect beside these arguments. Raises ConfigError for
    arguments that are wrong by themselves."""
    chosen = [
        text
        for text in SMALLER
        if not text.startswith("env.") or "pool_size" in str(arguments) or "aws" in str(arguments)
    ]
    while True:
        try:
            composed = compose_config([*arguments, *chosen])
            check_config(composed.config)
            build_experiment(composed)
            return chosen
        except ConfigError as error:
            left = [text for text in chosen if text.partition("=")[0] not in str(error)]
            if left == chosen:
                raise
            chosen = left


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell finds this Python under its usual names, and what makes its programs small."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{ROOT}")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LAUNCH_SMALLER", "")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


def run(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, typed: str = "") -> str:
    """What a line printed, which must succeed; a launch is made small."""
    [*_, words] = [[*each.words] for each in commands_in(f"    {line}", "line")] or [[]]
    if "realhf.launch" in words:
        monkeypatch.chdir(folder)
        monkeypatch.setenv(
            "LAUNCH_SMALLER", " ".join(smaller(words[words.index("realhf.launch") + 1 :]))
        )
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        input=typed,
        capture_output=True,
        text=True,
        timeout=MAX_S,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    if "realhf.launch" in words and "mode=check" not in words:
        report = re.search(
            r"^2 steps in \d+ s.*\n(warning: .*\n)*results: ", done.stdout, re.MULTILINE
        )
        assert report, done.stdout[-2000:]
    return done.stdout


def whole_launches() -> list[Command]:
    """The launches that the pages print on lines of their own, each once, whatever its seed and
    name."""
    found: dict[tuple[str, ...], Command] = {}
    for command in (
        each for page in pages() for each in commands_of(page) if each.whole and launched(each)
    ):
        text = " ".join(command.words)
        if command.program == "realhf.launch" and not any(
            re.search(not_run, text) for not_run in (*NOT_RUN, *LAUNCHED)
        ):
            same = re.sub(r"(seed|trial_name|torch_threads|total_train_steps)=\S+ ?", "", text)
            refused = command.shown[:1] and command.shown[0].startswith("config error")
            if not refused and "mode=" not in text and "--" not in text:
                found.setdefault(tuple(same.split()), command)
    return [*found.values()]


@pytest.mark.sim
@pytest.mark.parametrize("command", whole_launches(), ids=lambda command: command.where)
def test_what_a_page_launches_trains(
    command: Command, workplace: Path, shell: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, with all before and after them."""
    arguments = launched(command)
    assert arguments is not None
    shutil.rmtree(workplace / "runs" / "kept", ignore_errors=True)
    run(
        shlex.join(["python", "-m", "realhf.launch", *arguments, "recover_mode=disabled"]),
        workplace,
        monkeypatch,
    )


def test_one_of_your_own_by_the_words_of_the_page(
    tmp_path: Path, shell: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an empty folder to finished runs, synchronous and asynchronous: every line of the page,
    in its order."""
    page = (ROOT / "docs" / "environments" / "README.md").read_text()
    section = page.partition("## One of your own, in an empty folder")[2].partition("\n## ")[0]
    lines = [each for each in commands_in(section, "page") if each.whole]
    assert len(lines) >= 6
    folder = tmp_path / "empty"
    folder.mkdir()
    printed = [run(each.line, folder, monkeypatch, typed="/quit\n") for each in lines]
    assert "no faults" in printed[1] and "passed" in printed[2]
    assert len({*re.findall(r"results: (\S+)", "".join(printed))}) == 2


@pytest.mark.parametrize("door", ENV_FORMATS)
def test_what_init_prints(
    door: str, tmp_path: Path, shell: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line, as printed; the agent plays asynchronously."""
    folder = tmp_path / "empty"
    folder.mkdir()
    told = run(
        f"python -m realhf.env init my_game --door {door}", folder, monkeypatch
    ).splitlines()[1:]
    assert len(told) == 3
    for line in told:
        run(line.strip(), folder, monkeypatch, typed="/quit\n")


def played() -> list[Command]:
    """The commands of environments that the pages print, and what they are said to print; those
    about a file that a page prints are typed in test_extend.py, those about an MCP server, which
    need a package of others, in tests/env/adapters (``make test-mcp``)."""
    every = [
        each
        for page in pages()
        for each in commands_of(page)
        if each.whole and each.program == "realhf.env"
    ]
    mine = re.compile(r"mine\.py|guess\.py|mean\.py|shelf\.py|init |gymnasium|mcp:")
    return [*{each.line: each for each in every if not mine.search(each.line)}.values()]


@pytest.mark.parametrize("command", played(), ids=lambda command: command.where)
def test_what_a_page_plays(
    command: Command, workplace: Path, shell: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page shows what is printed, but for what it leaves out."""
    printed = run(command.line, workplace, monkeypatch, typed="/quit\n").splitlines()
    shown = [
        line
        for line in command.shown
        if line and line != "[...]" and not line.startswith("python -m")
    ]
    if shown and command.page.endswith("environment_command.md"):
        assert [line for line in shown if line not in [each.strip() for each in printed]] == []


def served() -> list[Command]:
    """The servers that the pages start on lines of their own."""
    every = [
        each
        for page in pages()
        for each in commands_of(page)
        if each.whole and each.program in SERVERS
    ]
    return [
        *{
            each.line: each
            for each in every
            if "redis://" not in each.line and "key=value" not in each.line
        }.values()
    ]


@pytest.mark.sim
@pytest.mark.parametrize("command", served(), ids=lambda command: command.where)
def test_what_a_page_serves(
    command: Command, workplace: Path, shell: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server says where it listens, and ends when it is asked to."""
    line = command.line.replace("my_env.py:Name", "mine.py:Mine").replace(
        "file.py:Name", "mine.py:Mine"
    )
    server = subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        cwd=workplace,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with server:
        assert server.stdout is not None
        guard = threading.Timer(120, server.kill)
        guard.start()
        told = []
        for text in server.stdout:
            told.append(text)
            if re.search(r"https?://(127\.0\.0\.1|0\.0\.0\.0|\[?::)", text):
                break
        server.send_signal(signal.SIGINT)
        told += server.stdout
        code = server.wait(60)
        guard.cancel()
    assert code in (0, 130, -signal.SIGINT), "".join(told)[-3000:]
    assert any("http" in text for text in told), "".join(told)


def test_every_program_is_run_or_has_a_reason() -> None:
    """A program that a new page brings is put into one of the tables."""
    tried = ("realhf.launch", "realhf.env", *SERVERS)
    every = {
        each.program
        for page in pages()
        for each in commands_of(page)
        if not each.words[0].startswith("experiment")
    }
    reasons = [*PARSED, *ELSEWHERE]
    assert [
        name
        for name in every
        if name not in tried and not any(re.fullmatch(text, name) for text in reasons)
    ] == []
