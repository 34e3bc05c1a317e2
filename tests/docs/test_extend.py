"""The pages of ``docs/extend/`` link the files of ``examples/`` and show some of them word for word,
and every example does what its page says."""

from __future__ import annotations

import ast
import json
import math
import os
import queue
import random
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

from realhf.algorithms.policy_loss import LossTerms
from realhf.api.config import AsyncConfig, EngineConfig, GenConfig
from realhf.api.environment import AssistantMessage, Task, ToolCall
from realhf.api.experiment import ModelSpec
from realhf.api.model import GenOutput, GenRequest
from realhf.api.tool_syntax.reference import write_table
from realhf.api.trace import Tracer
from realhf.aws.environment import AwsEnvironment
from realhf.aws.episode.validation import template_problems, validate
from realhf.aws.tasks import loader
from realhf.backends import streaming_engines
from realhf.base.plugin import load_plugin
from realhf.base.tensor_digest import digest_tensors
from realhf.env.__main__ import main as environment_command
from realhf.env.loader.author import ATTRIBUTES
from realhf.env.loader.load import build_environment
from realhf.env.loader.single_turn import DatasetOptions
from realhf.env.openenv_client import OpenEnvClient
from realhf.env.server.process import ServerProcess
from realhf.launch.__main__ import main
from realhf.registry import advantage_estimators, policy_losses
from realhf.rollout.black_box_agent import BlackBoxAgent, load_agent
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from realhf.scheduler.base import WorkerExit, WorkerLine, WorkerSpec
from realhf.scheduler.local import LocalScheduler
from realhf.trajectory.client import TrajectoryClient
from tests.rollout.black_box import FakeTokens, chat
from tests.rollout.fake_env_server import FakeEnvServer

ROOT = Path(__file__).resolve().parents[2]
EXTEND = ROOT / "docs" / "extend"
EXAMPLES = EXTEND / "examples"
PAGES = (
    "README",
    "agent",
    "algorithm",
    "backend",
    "data_source",
    "environment",
    "generation_engine",
    "metric",
    "policy_loss",
    "remote_environment",
    "scheduler",
    "task",
    "tool_syntax",
)
SHOWN = re.compile(
    r"\[(?P<name>[\w.]+)\]\(examples/(?P=name)\):\n\n```(?:python|yaml)\n(?P<code>.*?)^```$",
    re.M | re.S,
)
"""A link to a file with a colon, followed by the file itself."""
LINKED = re.compile(r"\]\(examples/([\w.]+)\)")
"""A link to an example."""
DEADLINE_S = 120.0


def page(name: str) -> str:
    """The text of a page."""
    return (EXTEND / f"{name}.md").read_text(encoding="utf-8")


def example(name: str) -> ModuleType:
    """An example as a module, imported as the launcher imports a user's file."""
    return load_plugin(EXAMPLES / f"{name}.py")


# ---- the pages


def test_a_page_shows_its_files_word_for_word() -> None:
    """Every file of the examples is linked from exactly one page; code under a link is that file."""
    for name in PAGES:
        for found in SHOWN.finditer(page(name)):
            text = (EXAMPLES / found["name"]).read_text(encoding="utf-8")
            assert found["code"] == text, found["name"]
    linked = [name for each in PAGES for name in {*LINKED.findall(page(each))}]
    files = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")]
    assert sorted(linked) == sorted(files)


@pytest.mark.parametrize("name", PAGES[1:])
def test_a_page_says_when_what_and_how(name: str) -> None:
    """Every page has the same four parts, and the index and the documentation's front page lead to
    it."""
    assert re.findall(r"^## (.+)$", page(name), re.M) == [
        "When",
        "The contract",
        "An example",
        "Try it",
    ]
    assert f"({name}.md)" in page("README")
    assert f"extend/{name}.md" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def test_the_page_on_tool_syntaxes_shows_the_table_of_the_code() -> None:
    """``python -m realhf.api.tool_syntax.reference`` writes it."""
    assert write_table() in page("tool_syntax")


def section(path: str, title: str) -> str:
    """The lines of a Markdown section."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return next(part for part in re.split(r"(?m)^## ", text) if part.startswith(f"{title}\n"))


def test_the_newcomers_walk_names_files_that_exist() -> None:
    """Whoever follows the walk of the contributing page finds every file that it opens."""
    files = re.findall(
        r"`((?:realhf|tests|docs|configs|experiments)/[\w/.]+)`",
        section("CONTRIBUTING.md", "A first walk"),
    )
    assert len(files) > 10
    assert [name for name in files if not (ROOT / name).exists()] == []


# ---- backend, data source, metric: one experiment


@pytest.mark.nightly
@pytest.mark.slow
def test_the_experiment_of_ones_own_parts_learns_to_count(tmp_path: Path) -> None:
    """Launched from outside the tree, it draws from its source, trains its backend and logs its
    metric."""
    options = ("trial_name=t", f"fileroot={tmp_path}")
    command = [
        sys.executable,
        "-m",
        "realhf.launch",
        f"+experiment_path={EXAMPLES / 'counting.py'}",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    rows = [
        json.loads(line)
        for line in (tmp_path / "counting" / "t" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 12
    assert (rows[0]["actor_train/sure"], rows[-1]["actor_train/sure"]) == (0.0, 1.0)
    assert rows[-1]["policy/loss"] < 0.1 * rows[0]["policy/loss"]
    assert rows[-1]["source/drawn"] >= 12 * 16


def test_the_source_goes_on_after_a_checkpoint_as_if_nothing_had_happened() -> None:
    """A second source with the state of the first draws what the first would have drawn."""
    make = example("counting_source").CountingSource
    first, second = (make(seed=3, vocabulary=10, length=4) for _ in range(2))
    first.next_batch(5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.next_batch(7) == second.next_batch(7)
    assert len({item.id for item in make(seed=3, vocabulary=10, length=4).next_batch(50)}) == 50


def test_the_engine_goes_on_after_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Table and optimizer come back to the last bit."""
    engines = [example("bigram_engine").BigramEngine(4, 0.1) for _ in range(2)]

    def step(engine: object) -> None:
        engine.table.grad = torch.arange(16.0).reshape(4, 4)  # type: ignore[attr-defined]
        engine._optimizer.step()  # type: ignore[attr-defined]

    step(engines[0])
    engines[0].save_checkpoint(tmp_path)
    engines[1].load_checkpoint(tmp_path)
    for engine in engines:
        step(engine)
    assert torch.equal(engines[0].table, engines[1].table)
    assert not torch.equal(engines[0].table, torch.zeros(4, 4))


# ---- generation engine


class Answers:
    """Collects what an engine answers."""

    def __init__(self) -> None:
        self._queue: queue.Queue[GenOutput | Exception] = queue.Queue()
        self.done = self._queue.put

    def next(self) -> GenOutput | Exception:
        """The next answer."""
        return self._queue.get(timeout=DEADLINE_S)


def test_the_generation_engine_keeps_its_contract() -> None:
    """Requests wait for weights, go on under new ones, can be paused and aborted, and fail when the
    engine closes."""
    engine = example("bigram_generation").BigramGenerator()
    answers = Answers()
    greedy = GenConfig(temperature=0.0, max_new_tokens=3)
    counting = torch.roll(torch.eye(5), 1, dims=1) * 9
    engine.submit(GenRequest(0, [1]), greedy, [], answers.done)
    assert (engine.version, engine.stats()["waiting"]) == (-1, 1.0)
    engine.load_weights(0, {"logits": counting})
    assert (
        engine.weight_digests(["logits", "other"])["logits"].digest
        == digest_tensors({"logits": counting})["logits"]
    )
    first = answers.next()
    assert isinstance(first, GenOutput)
    assert (first.token_ids, first.versions, first.finish_reason) == (
        [2, 3, 4],
        [0, 0, 0],
        "length",
    )
    engine.submit(GenRequest(0, [1, 2]), greedy, [3], answers.done)
    stopped = answers.next()
    assert isinstance(stopped, GenOutput) and (stopped.token_ids, stopped.finish_reason) == (
        [3],
        "stop",
    )
    engine.pause(5)
    engine.submit(GenRequest(7, [1]), greedy, [], answers.done)
    engine.abort([7])
    aborted = answers.next()
    assert isinstance(aborted, GenOutput) and (aborted.token_ids, aborted.finish_reason) == (
        [],
        "aborted",
    )
    with pytest.raises(ValueError, match="older"):
        engine.load_weights(-1, {"logits": counting})
    with pytest.raises(ValueError, match="shape"):
        engine.load_weights(1, {"logits": counting[:3]})
    engine.submit(GenRequest(8, [1]), greedy, [], answers.done)
    engine.close()
    assert isinstance(answers.next(), RuntimeError)


def test_a_seeded_request_gets_its_tokens_in_any_company() -> None:
    """Tokens depend on the request's seed and their positions, and on nothing else."""
    engine = example("bigram_generation").BigramGenerator()
    answers = Answers()
    others = Answers()
    gen = GenConfig(max_new_tokens=20)
    engine.load_weights(0, {"logits": torch.zeros(50, 50)})
    engine.submit(GenRequest(0, [1], seed=11), gen, [], answers.done)
    alone = answers.next()
    engine.pause(5)
    for slot in range(1, 5):
        engine.submit(GenRequest(slot, [slot]), gen, [], others.done)
    engine.submit(GenRequest(0, [1], seed=11), gen, [], answers.done)
    engine.resume()
    again = answers.next()
    engine.close()
    assert isinstance(alone, GenOutput) and isinstance(again, GenOutput)
    assert alone.token_ids == again.token_ids and len(set(alone.token_ids)) > 5


def test_the_addition_that_the_page_shows_makes_the_engine_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of the page fits where the page says, and a generation worker then gets the new
    engine."""
    [branch] = re.findall(
        r"```python\n(        elif model\.engine.*?)```", page("generation_engine"), re.S
    )
    text = Path(streaming_engines.__file__).read_text(encoding="utf-8")
    before = "        else:\n            url = model.engine.vllm_url"
    assert text.count(before) == 1
    changed = ModuleType("changed_streaming_engines")
    exec(compile(text.replace(before, branch + before), "changed", "exec"), vars(changed))
    module = example("bigram_generation")
    monkeypatch.setitem(sys.modules, "realhf.backends.bigram_generation", module)
    with changed.make_streaming_generator(
        ModelSpec("actor", "", engine=EngineConfig(name="bigram")),
        AsyncConfig(),
        log=tmp_path / "log",
        timeout_s=1.0,
        tracer=Tracer(),
        on_death=print,
    ) as engine:
        assert isinstance(engine, module.BigramGenerator)
    assert engine._closed


# ---- scheduler


def pinned(log: Path, name: str) -> WorkerSpec:
    """A worker that prints the cores that it may use."""
    code = "import os; print(sorted(os.sched_getaffinity(0)), flush=True)"
    return WorkerSpec(name, "timeit", ("-n", "1", "-r", "1", code), log, events=True)


def test_the_scheduler_pins_its_workers_and_reports_their_ends(tmp_path: Path) -> None:
    """Each worker sees one core, in turn; the caller keeps all of its own."""
    mine = sorted(os.sched_getaffinity(0))
    scheduler = example("pinned_scheduler").PinnedScheduler(LocalScheduler())
    cores = {}
    ends = {}
    try:
        for name in ("a/0", "a/1"):
            scheduler.start(pinned(tmp_path / "log", name))
        end = time.monotonic() + DEADLINE_S
        while len(ends) < 2 and time.monotonic() < end:
            for event in scheduler.wait(0.5):
                if isinstance(event, WorkerExit):
                    ends[event.name] = event.exit_code
                elif isinstance(event, WorkerLine) and event.text.startswith("["):
                    cores[event.name] = ast.literal_eval(event.text)
    finally:
        scheduler.stop(0.5)
    assert ends == {"a/0": 0, "a/1": 0}
    assert [cores["a/0"], cores["a/1"]] == [[mine[0]], [mine[1 % len(mine)]]]
    assert sorted(os.sched_getaffinity(0)) == mine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("scheduler.corse=2", None),
        ("scheduler.cores=0", None),
        (
            "scheduler.cores=9999",
            f"scheduler.cores=9999: this machine has {len(os.sched_getaffinity(0))}",
        ),
    ],
)
def test_a_wrong_option_of_the_scheduler_is_refused_as_the_page_says(
    capsys: pytest.CaptureFixture[str], given: str, said: str | None
) -> None:
    """A name that does not exist, a value out of range and one that this machine does not have end
    the launch."""
    path = f"scheduler.path={EXAMPLES / 'pinned_scheduler.py'}:PINNED"
    assert main(["experiment=sft_aws", "mode=check", path, given]) == 2
    [line] = capsys.readouterr().err.splitlines()
    if said is None:
        assert f"    {line}\n" in page("scheduler"), line
    else:
        assert line == f"config error: {said}"


# ---- policy loss, advantage


def test_the_loss_is_what_its_page_says() -> None:
    """Its value and gradient by hand; what the mask leaves out is not seen, whatever it holds."""
    example("own_policy_gradient")
    logprobs = torch.tensor([-1.0, -2.0, float("nan")], requires_grad=True)
    old = torch.tensor([-1.2, -2.0, 0.0])
    advantages = torch.tensor([1.0, -2.0, float("nan")])
    terms = LossTerms(
        logprobs,
        old,
        advantages,
        torch.tensor([True, True, False]),
        torch.zeros(3, dtype=torch.int64),
        1,
    )
    found = policy_losses.get("soft_clip")(terms, SimpleNamespace(ratio="token"))
    ratio = math.exp(0.2)
    assert found.loss.tolist() == pytest.approx([-math.tanh(ratio - 1), 0.0, 0.0])
    found.loss.sum().backward()
    slope = (1 - math.tanh(ratio - 1) ** 2) * ratio
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-slope, 2.0, 0.0])


def test_the_advantage_is_what_its_page_says() -> None:
    """The distance to the median of the group; invalid rollouts enter nothing, equal scores give
    nothing."""
    example("own_policy_gradient")
    scores = torch.tensor([0.0, 0.0, 1.0, float("nan"), 0.5, 0.5])
    valid = torch.tensor([True, True, True, False, True, True])
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    assert advantage_estimators.get("above_median")(scores, valid, group).tolist() == [
        0,
        0,
        1,
        0,
        0,
        0,
    ]


# ---- agent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "max_turns", "speech", "status", "reward", "turns"),
    [
        ({}, 5, ["aws s3 ls", "aws s3api list-buckets"], "achieved", 1.0, 2),
        ({}, 5, ["ok"], "finished", -0.1, 3),
        ({"attempts": 1, "given_up": -0.5}, 5, ["ok"], "finished", -0.5, 1),
        ({}, 2, ["ok"], "max_turns", 0.0, 2),
    ],
    ids=["achieved", "gave up", "gave up by its options", "ran out of turns"],
)
async def test_the_agent_plays(
    options: dict[str, float],
    max_turns: int,
    speech: list[str],
    status: str,
    reward: float,
    turns: int,
) -> None:
    """The environment's reward counts, unless the agent gives up; an episode that ran out of turns
    is valid data."""

    def speak(prompt: str) -> str:
        return speech[min(len(speech), prompt.count("<|user|>")) - 1]

    solve = load_agent("docs.extend.examples.patient_agent:rollout", options)
    agent = BlackBoxAgent(solve, chat(), EpisodeLimits(max_turns, 600, 40), timeout_s=60)
    with FakeEnvServer() as server:
        env = AwsEnvironment(server.url)
        try:
            outcome = await agent.play(
                env, EpisodeRequest(0, Task("1"), sampling_seed=5), FakeTokens(speak), 2
            )
        finally:
            await agent.close()
            await env.close()
    assert (outcome.status, outcome.reward, len(outcome.turns), outcome.valid) == (
        status,
        reward,
        turns,
        True,
    )


# ---- environment


@pytest.mark.parametrize("split", ["train", "heldout"])
async def test_the_class_with_tools_is_played(split: str) -> None:
    """Halving finds the number within seven guesses, a wrong call is answered, and an idle policy
    earns nothing."""
    spec = build_environment(str(EXAMPLES / "guess_tools.py"), {})
    tasks = spec.tasks(split)
    environment = spec.make("")
    [template] = tasks.group_of
    for seed in range(20):
        task = tasks.instantiate(template, seed)
        opening = await environment.reset(task.payload, seed=task.seed)
        assert [tool["function"]["name"] for tool in opening.tools] == ["guess"]
        turn = await environment.step(
            AssistantMessage("", (ToolCall("guess", {"number": "many"}),))
        )
        assert "must be a whole number" in turn.messages[0]["content"] and turn.reward == 0.0
        low = 1
        high = 100
        while not turn.done:
            middle = (low + high) // 2
            turn = await environment.step(
                AssistantMessage("", (ToolCall("guess", {"number": middle}),))
            )
            low, high = (
                (middle + 1, high) if turn.messages[0]["content"] == "higher" else (low, middle - 1)
            )
        assert (turn.reward, turn.metrics["success"], turn.metrics["tool_failures"]) == (
            1.0,
            1.0,
            1.0,
        )
        assert turn.metrics["tool_calls"] <= 8
        await environment.reset(task.payload, seed=task.seed)
        idle = await environment.step(AssistantMessage("50, I guess"))
        assert (idle.done, idle.reward, idle.metrics["success"]) == (True, 0.0, 0.0)


async def test_the_class_with_messages_is_played() -> None:
    """It has options and tasks of its own; the same seed brings the same number back."""
    spec = build_environment(str(EXAMPLES / "guess_messages.py"), {"most_guesses": 15})
    assert spec.system_prompt and spec.tasks("train").groups == ("1", "2", "3")
    assert not set(spec.tasks("train").group_of) & set(spec.tasks("heldout").group_of)
    environment = spec.make("")
    for template in spec.tasks("heldout").group_of:
        task = spec.tasks("heldout").instantiate(template, 5)
        await environment.reset(task.payload, seed=task.seed)
        assert (await environment.step(AssistantMessage("⁵"))).reward == -0.1
        low = 1
        high = task.payload["highest"]
        done = False
        said = 0
        while not done:
            said = (low + high) // 2
            turn = await environment.step(AssistantMessage(str(said)))
            done = turn.done
            if not done:
                low, high = (
                    (said + 1, high)
                    if turn.messages[0]["content"] == "Higher."
                    else (low, said - 1)
                )
        await environment.reset(task.payload, seed=task.seed)
        assert (await environment.step(AssistantMessage(str(said)))).metrics == {"success": 1.0}


async def test_the_customer_of_the_support_desk_answers_and_leaves() -> None:
    """A turn without a call is answered by the user; half is paid for the deed and half for telling
    of it; the user leaves when they hear that it is done, not when they hear that it is not, or
    when nothing comes of it."""
    spec = build_environment(str(EXAMPLES / "support_desk.py"), {})
    for said, told in (("It is done.", True), ("Hm.", False), ("It is not done.", False)):
        environment = spec.make("")
        reward = 1.0 if told else 0.5
        await environment.reset({"wish": "move", "split": "heldout"}, seed=4)
        number = await environment.step(AssistantMessage("What is the number of the order?"))
        city = await environment.step(AssistantMessage("And which city?"))
        assert [message["role"] for message in (*number.messages, *city.messages)] == [
            "user",
            "user",
        ]
        arguments = {
            "number": number.messages[0]["content"][6:-1],
            "city": city.messages[0]["content"][:-1],
        }
        moved = await environment.step(AssistantMessage("", (ToolCall("move", arguments),)))
        assert not moved.done and moved.messages[0]["role"] == "tool" and moved.reward == 0.5
        turn = moved
        turns = 0
        while not turn.done:
            turn = await environment.step(AssistantMessage(said))
            turns = turns + 1
        assert (turn.reward, turn.metrics["success"], turn.messages) == (reward, float(told), [])
        assert turns == (1 if told else 3)


@pytest.mark.slow
def test_the_reward_that_the_page_shows_is_bought_until_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command is typed, and every line that the page shows is in the answer; with the other
    reward none is."""
    part = page("environment").partition("### Can its reward be bought?")[2]
    code = re.findall(r"```python\n(.*?)```", part, re.DOTALL)[0]
    command, *shown = [
        line[4:] for line in part.replace(code, "").splitlines() if line.startswith("    ")
    ]
    (tmp_path / "shelf.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.removeprefix("$ python -m realhf.env"))
    assert environment_command(words) == 1
    told = iter(capsys.readouterr().out.splitlines())
    for line in shown:
        beginning, more, _ = line.partition("[...]")
        found = any(each == line or (more and each.startswith(beginning)) for each in told)
        assert found, f"the page shows {line!r}, and the command does not"
    assert len(shown) > 6
    [mended] = re.findall(r"`(return float\(.*?\))` nothing is found", part)
    [bought] = re.findall(r"return float\(.*\)\n", code)
    (tmp_path / "shelf.py").write_text(code.replace(bought, f"{mended}\n"))
    assert environment_command(words) == 0


async def test_the_verifier_judges_the_last_word(tmp_path: Path) -> None:
    """Its own rows share no question; without ``tasks`` the page's option brings them from a
    file."""
    spec = build_environment(str(EXAMPLES / "sums.py"), {})
    tasks = {split: spec.tasks(split) for split in ("train", "heldout")}
    assert {split: len(each.group_of) for split, each in tasks.items()} == {
        "train": 320,
        "heldout": 80,
    }
    rows = [each.instantiate(name, 0).payload for each in tasks.values() for name in each.group_of]
    assert len({row["prompt"] for row in rows}) == 400
    environment = spec.make("")
    for text, reward in ((f"It is {rows[0]['answer']}", 1.0), ("It is 5000", 0.0), ("", 0.0)):
        await environment.reset(rows[0], seed=0)
        assert (await environment.step(AssistantMessage(text))).reward == reward
    source = (EXAMPLES / "sums.py").read_text(encoding="utf-8")
    (tmp_path / "own.py").write_text(
        source[: source.index("def tasks")] + source[source.index("def reward") :]
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = build_environment(
        str(tmp_path / "own.py"), {"data": "rows.jsonl", "heldout_fraction": 0.2}
    )
    assert 40 < len(own.tasks("heldout").group_of) < 120


def test_the_tables_of_the_page_name_what_there_is() -> None:
    """Every option of rows, and every attribute that a class may add, stands in a table and
    works."""
    text = page("environment")
    for each in fields(DatasetOptions):
        assert f"`env.{each.name}`" in text
    for name in (*ATTRIBUTES, "Options", "tasks(split)", "done", "metrics", "close()"):
        assert f"`{name}`" in text


# ---- remote environment


@pytest.mark.nightly
@pytest.mark.slow
async def test_the_environment_is_played_over_the_wire() -> None:
    """Halving finds the number, a wrong message is answered, and the same seed brings the same
    number back."""
    reference = f"{EXAMPLES / 'guess_messages.py'}:Dialogue"
    with ServerProcess("--env", reference, "--pool-size", "1") as server:
        env = OpenEnvClient(server.url)
        await env.connect()
        first = await env.reset(task_id="up to 100", seed=5)
        assert [message["role"] for message in first.observation["messages"]] == ["system", "user"]
        assert (await env.step({"content": "shout"})).observation["messages"][0][
            "content"
        ] == "Say a number."
        low = 1
        high = 100
        result = first
        while not result.done:
            guess = (low + high) // 2
            result = await env.step({"content": str(guess)})
            higher = not result.done and result.observation["messages"][0]["content"] == "Higher."
            low, high = (guess + 1, high) if higher else (low, guess - 1)
        assert result.observation["metrics"] == {"success": 1.0} and result.reward == 1.0
        await env.reset(task_id="up to 100", seed=5)
        assert (await env.step({"content": str(guess)})).done
        await env.reset(task_id="up to 100", seed=6)
        assert not (await env.step({"content": str(guess)})).done
        await env.close()


@contextmanager
def trajectory_server() -> Iterator[str]:
    """The address of a trajectory server in memory."""
    command = [sys.executable, "-m", "realhf.trajectory", "--store", "memory", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield next(
                found[1]
                for line in process.stderr
                if (found := re.search(r"running on (http\S+)", line))
            )
        finally:
            process.terminate()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_producer_feeds_a_trainer_until_it_has_enough() -> None:
    """A trainer pulls whole groups of sound episodes, and the producer ends with the run."""
    pushed: list[int] = []
    with (
        trajectory_server() as url,
        TrajectoryClient(url, binary=False, explicit_acks=True) as trainer,
    ):
        trainer.register(batch_size=8, max_token_len=17, num_steps=2)
        produce = example("guessing_producer").produce
        producer = threading.Thread(target=lambda: pushed.append(produce(url)), daemon=True)
        producer.start()
        for _ in range(3):
            batch = trainer.pull(timeout_s=DEADLINE_S)
            assert batch.n_sequences == 8 and [len(group["scores"]) for group in batch.groups] == [
                4,
                4,
            ]
            trainer.ack(batch.lease_id)
        producer.join(DEADLINE_S)
    assert pushed and pushed[0] >= 6


def test_an_episode_of_the_producer_is_a_sound_row() -> None:
    """Only guesses are trained, with the log-probability that the policy had; the score is one over
    their number."""
    module = example("guessing_producer")
    for secret in range(0, 100, 7):
        tokens, masks, logprobs, score = module.play(secret, random.Random(secret))
        trained = [
            token for token, mask in zip(tokens, masks, strict=True) if mask != module.NOT_TRAINED
        ]
        assert len(tokens) == len(logprobs) <= 17 and max(trained) < 100
        assert score == (1 / len(trained) if secret in trained else 0.0)


# ---- task


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> Iterator[loader.Template]:
    """The task of the page, among those of the tree."""
    files = [*loader._iterate_files(), ("beginner", EXAMPLES / "delayed_queue.yaml")]
    loader._all_templates.cache_clear()
    monkeypatch.setattr(loader, "_iterate_files", lambda: iter(files))
    yield loader.get_template(126)
    monkeypatch.undo()
    loader._all_templates.cache_clear()


def test_the_task_is_sound_on_paper(template: loader.Template) -> None:
    """Its number and name are free, and nothing in its text gives the solution away."""
    assert template_problems(template) == []
    names = [other.name for other in loader.load_templates()]
    assert names.count(template.name) == 1
    task = loader.instantiate(template.task_id, 3)
    assert task.params["seconds"] in task.description


@pytest.mark.nightly
@pytest.mark.sim
def test_the_task_keeps_its_promises(template: loader.Template) -> None:
    """On a real simulator its solution earns everything, and doing half of it does not."""
    assert validate([template], 1, 1, Console(quiet=True)) == {template.task_id: []}
