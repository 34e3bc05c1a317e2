"""Evaluation of an agent on AWS tasks, by tier: success, reward, steps to solve, hints, drift
repair, and recovery after a failed command.

Episodes run in this process on a ``MiniStackPool`` and are graded by the environment. They are
played in lockstep: in every round the agent answers all unfinished conversations, then all commands
run concurrently.

    python -m realhf.aws.evaluate --model runs/grpo_aws/NAME/policy --split names --tags starter
    python -m realhf.aws.evaluate --model http://127.0.0.1:8000/v1 --split heldout

A scripted expert (ceiling) and a random agent (floor) play the same tasks as the model. This is a
program: like the launcher it may import from all packages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

import realhf
from realhf.api.config import GenConfig
from realhf.api.environment import Environment, Turn
from realhf.api.evaluation import mean_interval, wilson_interval
from realhf.api.generation import TokenSource
from realhf.api.rollout import FAILURE_STATUSES, RolloutOutcome
from realhf.aws.agents import (
    Agent,
    AgentError,
    ChatApiAgent,
    LocalModelAgent,
    RandomAgent,
    ScriptedExpert,
    served_model,
)
from realhf.aws.episode.pooled_environment import MESSAGE_TIMEOUT_S, pooled_environment
from realhf.aws.messages import OBSERVATION_CHARS, episode_task
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import instantiate, load_templates
from realhf.aws.tasks.task import TIERS, Task, TaskError
from realhf.base import process_clock
from realhf.rollout.blocking_player import BlockingPlayer
from realhf.rollout.episode import EpisodeRequest, RecordingEnvironment
from realhf.rollout.player import EpisodeAgent, EpisodePlayer

DRIFT = "drift"
OVERALL = "overall"
_STATUS_NAMES = {"max_turns": "finished", "token_budget": "gave_up"}


@dataclass(frozen=True)
class EpisodeRecord:
    """Result of one episode."""

    task_id: int
    """Number of the template."""
    template: str
    """Name of the template."""
    tier: str
    """Tier of the task."""
    drift: bool
    """Whether resources may have drifted, so that the task is to repair them."""
    seed: int
    """Seed of the instance."""
    status: str
    """How the episode ended: achieved, finished (no steps or turns left), gave_up (or no tokens
    left), or an environment failure, see ``FAILURE_STATUSES``."""
    achieved: bool = False
    """Whether the task was solved."""
    reward: float = 0.0
    """Total reward of the episode."""
    progress: float = 0.0
    """Progress at the end, 0 to 1."""
    steps: int = 0
    """Number of turns, including turns without a command and the turn in which the agent gave
    up."""
    hints: int = 0
    """Number of hints requested."""
    failed_commands: int = 0
    """Number of commands that did not succeed."""

    @property
    def valid(self) -> bool:
        """Whether the episode counts in the metrics, that is, whether its environment did not
        fail."""
        return self.status not in FAILURE_STATUSES


def play_tasks(
    agent: Agent,
    pool: MiniStackPool,
    tasks: Sequence[Task],
    *,
    max_turns: int,
    spare_turns: int | None = None,
    observation_chars: int = OBSERVATION_CHARS,
    show_ids: bool = False,
    on_episode: Callable[[EpisodeRecord], None] = lambda record: None,
) -> list[EpisodeRecord]:
    """Let an agent play the tasks, and return one record per task in the same order.

    ``on_episode`` is called after each episode. An episode has at most ``max_turns`` turns, and at
    most ``spare_turns`` more than its solution has commands. ``observation_chars`` limits the text
    of an observation; ``show_ids``: see ``normalise``. Raises AgentError when the agent fails.
    """
    recorder = _RecordingAgent(agent.episode_agent(max_turns), tasks, on_episode)
    size = min(pool.free_count, max(1, len(tasks)))
    with pooled_environment(
        pool, max_steps=max_turns, observation_chars=observation_chars, show_ids=show_ids
    ) as spec:
        player = BlockingPlayer(
            EpisodePlayer(spec, "", recorder, size, message_timeout_s=MESSAGE_TIMEOUT_S)
        )
        try:
            player.play(
                [
                    EpisodeRequest(n, episode_task(task, spare_turns))
                    for n, task in enumerate(tasks)
                ],
                agent,
            )
        finally:
            player.close()
    return [recorder.records[place] for place in range(len(tasks))]


class _RecordingAgent:
    """An ``EpisodeAgent`` that delegates to ``agent`` and records the result of each episode."""

    def __init__(
        self,
        agent: EpisodeAgent,
        tasks: Sequence[Task],
        on_episode: Callable[[EpisodeRecord], None],
    ) -> None:
        self.records: dict[int, EpisodeRecord] = {}
        self._agent = agent
        self._tasks = tasks
        self._on_episode = on_episode

    async def play(
        self, env: Environment, request: EpisodeRequest, llm: TokenSource, slot: int
    ) -> RolloutOutcome:
        """Play the episode with the wrapped agent and record its result."""
        recorder = RecordingEnvironment(env)
        outcome = await self._agent.play(recorder, request, llm, slot)
        record = self.records[request.index] = _build_record(
            self._tasks[request.index], outcome, recorder.turns
        )
        self._on_episode(record)
        return outcome


def _build_record(task: Task, outcome: RolloutOutcome, turns: Sequence[Turn]) -> EpisodeRecord:
    observations: list[Mapping[str, Any]] = [
        turn.info["observation"] for turn in turns if "observation" in turn.info
    ]
    status = "achieved" if outcome.achieved else _STATUS_NAMES.get(outcome.status, outcome.status)
    return EpisodeRecord(
        task.task_id,
        task.template,
        task.tier,
        bool(task.possible_drifts),
        task.seed,
        status,
        achieved=outcome.achieved,
        reward=outcome.reward or 0.0,
        progress=outcome.progress,
        steps=len(outcome.turns) + (status == "gave_up"),
        hints=int(observations[-1]["hints_used"]) if observations else 0,
        failed_commands=sum(not each["command_success"] for each in observations),
    )


def report(records: Sequence[EpisodeRecord]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each group of records: "overall", every tier (without its drift tasks)
    and "drift".

    Rates and means are dicts with value, low, high (a confidence interval) and n (the number of
    observations); None without observations. ``recovery`` is the success rate of episodes with a
    failed command, ``steps_to_solve`` the mean number of steps of solved episodes. Episodes whose
    environment failed are counted in ``env_errors`` only.
    """
    groups = {OVERALL: list(records)}
    for tier in dict.fromkeys(record.tier for record in records):
        groups[tier] = [record for record in records if record.tier == tier and not record.drift]
    groups[DRIFT] = [record for record in records if record.drift]
    return {name: _metrics(members) for name, members in groups.items() if members}


def _metrics(records: Sequence[EpisodeRecord]) -> dict[str, Any]:
    valid = [record for record in records if record.valid]
    with_failures = [record for record in valid if record.failed_commands]
    return {
        "episodes": len(valid),
        "env_errors": len(records) - len(valid),
        "success": _rate([record.achieved for record in valid]),
        "reward": _mean([record.reward for record in valid]),
        "progress": _mean([record.progress for record in valid]),
        "steps_to_solve": _mean([float(record.steps) for record in valid if record.achieved]),
        "hints": _mean([float(record.hints) for record in valid]),
        "recovery": _rate([record.achieved for record in with_failures]),
    }


def _rate(outcomes: Sequence[bool]) -> dict[str, float] | None:
    if not outcomes:
        return None
    low, high = wilson_interval(sum(outcomes), len(outcomes))
    return {"value": sum(outcomes) / len(outcomes), "low": low, "high": high, "n": len(outcomes)}


def _mean(values: Sequence[float]) -> dict[str, float] | None:
    interval = mean_interval(values)
    return (
        None
        if interval is None
        else dict(zip(("value", "low", "high"), interval, strict=True), n=len(values))
    )


SPLITS = {
    "heldout": "templates and names that a run with env.split=train never sees",
    "names": "training templates on names that training never sees",
    "train": "training templates and names",
    "ten": "the templates that a run with env.split=all_but_ten never sees",
    "all_but_ten": "its templates on names that training never sees",
}
"""Descriptions of the splits, by name."""
_TABLE_WIDTH = 130
_LINE_EVERY_S = 15.0


def choose_tasks(
    split: str, episodes: int, tiers: Sequence[str] | None, tags: Sequence[str], seed: int
) -> list[Task]:
    """Return ``episodes`` instances of every matching template of the split. Raises TaskError if no
    template matches."""
    templates = load_templates(tiers, tags=tags, split="train" if split == "names" else split)
    if not templates:
        raise TaskError(f"no template of the split {split!r} has these tiers and tags")
    names = "train" if split == "train" else "heldout"
    first = seed * episodes
    return [
        instantiate(t.task_id, number, names)
        for t in templates
        for number in range(first, first + episodes)
    ]


@contextmanager
def make_agent(options: argparse.Namespace) -> Iterator[Agent]:
    """Context manager that builds the agent for ``--model`` and closes it at the end. Raises
    AgentError or ModelLoadError (a ValueError)."""
    if options.model.startswith(("http://", "https://")):
        key = options.api_key_file.read_text().strip() if options.api_key_file else ""
        name = options.model_name or served_model(options.model, key)
        agent = ChatApiAgent(
            options.model,
            name,
            key,
            options.temperature,
            options.max_new_tokens,
            concurrency=options.pool_size,
            chat_template_kwargs=options.chat_template_kwargs,
        )
        try:
            yield agent
        finally:
            agent.close()
        return
    gen = GenConfig(temperature=options.temperature, max_new_tokens=options.max_new_tokens)
    label = options.model_name or Path(options.model).name
    yield LocalModelAgent(
        options.model,
        gen,
        options.seed,
        options.max_total_tokens,
        label,
        options.chat_template_kwargs,
    ).load(options.threads)


def play(
    agent: Agent, tasks: Sequence[Task], pool: MiniStackPool, options: argparse.Namespace
) -> list[EpisodeRecord]:
    """Let an agent play all tasks and return their records. Progress is shown on standard error: a
    bar on a terminal, otherwise lines."""
    with _progress(agent.name, len(tasks)) as advance:
        return play_tasks(
            agent,
            pool,
            tasks,
            max_turns=options.max_turns,
            spare_turns=options.spare_turns,
            observation_chars=options.observation_chars,
            show_ids=options.show_ids,
            on_episode=lambda record: advance(),
        )


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    if sys.stderr.isatty():
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task(name, total=total)
            yield lambda: progress.advance(bar)
        return
    print(f"{name}: {total} episodes", file=sys.stderr, flush=True)
    yield _progress_lines(name, total, _LINE_EVERY_S)


def _progress_lines(name: str, total: int, every_s: float) -> Callable[[], None]:
    """Return a function to call after each episode. It prints a progress line if ``every_s``
    seconds have passed since the last line, and after the last episode."""
    done = 0
    written = process_clock.now()

    def advance() -> None:
        nonlocal done, written
        done += 1
        if done == total or process_clock.now() >= written + every_s:
            written = process_clock.now()
            print(f"{name}: {done}/{total} episodes", file=sys.stderr, flush=True)

    return advance


def table(reports: dict[str, dict[str, Any]], title: str) -> Table:
    """Return a table of the reports with one row per agent and group."""
    rows = Table(
        "agent",
        "tier",
        "episodes",
        "success %",
        "reward",
        "steps to solve",
        "hints",
        "recovery %",
        title=title,
    )
    for agent, groups in reports.items():
        for group, metrics in groups.items():
            rows.add_row(
                agent if group == OVERALL else "",
                group,
                str(metrics["episodes"]),
                _percent(metrics["success"]),
                _number(metrics["reward"]),
                _number(metrics["steps_to_solve"]),
                _number(metrics["hints"]),
                _percent(metrics["recovery"]),
            )
        rows.add_section()
    return rows


def _percent(interval: dict[str, float] | None) -> str:
    if interval is None:
        return "-"
    return (
        f"{100 * interval['value']:.1f} [{100 * interval['low']:.0f}, {100 * interval['high']:.0f}]"
    )


def _number(interval: dict[str, float] | None) -> str:
    return (
        "-"
        if interval is None
        else f"{interval['value']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]"
    )


_MINIMUMS = {
    **dict.fromkeys(
        ("episodes", "max_turns", "max_new_tokens", "max_total_tokens", "pool_size", "threads"), 1
    ),
    **dict.fromkeys(("spare_turns", "temperature"), 0),
    "observation_chars": 40,  # same as the training option
}
"""Smallest values of numeric options."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m realhf.aws.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    add = parser.add_argument
    add(
        "--model",
        help="folder or hub id of a model, or the base URL (.../v1) of an OpenAI-compatible "
        "endpoint; "
        "without it only expert and random agent play",
    )
    add(
        "--model-name",
        default="",
        help="model to ask for at the endpoint (default: the first it lists); label",
    )
    add("--api-key-file", type=Path, help="file that holds the endpoint's key")
    add(
        "--split",
        choices=list(SPLITS),
        default="heldout",
        help="; ".join(f"{name}: {text}" for name, text in SPLITS.items()),
    )
    add("--tiers", nargs="+", choices=TIERS, help="default: all")
    add(
        "--tags",
        nargs="*",
        default=(),
        help="only templates with one of these tags (starter: the training set)",
    )
    add("--episodes", type=int, default=4, help="instances of every template")
    add("--max-turns", type=int, default=15, help="turns of an episode")
    add(
        "--spare-turns",
        type=int,
        help="turns beside as many as the solution has (training: env.spare_turns)",
    )
    add("--temperature", type=float, default=1.0, help="0: greedy")
    add("--max-new-tokens", type=int, default=96, help="of one turn")
    add("--max-total-tokens", type=int, default=4096, help="of an episode (local model)")
    add(
        "--observation-chars",
        type=int,
        default=200,
        help="what the model reads of one output (training: 200)",
    )
    add(
        "--show-ids",
        action="store_true",
        help="the model reads uuids and hexadecimal ids (training: env.show_ids)",
    )
    add(
        "--chat-template-kwargs",
        type=json.loads,
        default={},
        metavar="JSON",
        help="variables of the chat template, e.g. '{\"enable_thinking\": false}' (an endpoint "
        "must know the field)",
    )
    add("--pool-size", type=int, default=8, help="simulators that play in parallel")
    add("--threads", type=int, default=2, help="torch threads of a local model")
    add("--seed", type=int, default=0)
    add(
        "--out",
        type=Path,
        default=Path("evaluation"),
        help="folder for evaluation.json and evaluation.png",
    )
    options = parser.parse_args(argv)
    for name, minimum in _MINIMUMS.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            parser.error(f"--{name.replace('_', '-')} {value:g}: at least {minimum} is needed")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return the exit status: 0, 1 after an error, 130 after an interrupt."""
    options = parse(argv)
    try:
        tasks = choose_tasks(
            options.split, options.episodes, options.tiers, options.tags, options.seed
        )
        played = evaluate(tasks, options)
    except (AgentError, TaskError, ValueError, OSError, RuntimeError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("evaluate: interrupted, nothing was written", file=sys.stderr)
        return 130
    write(played, options)
    return 0


def evaluate(tasks: Sequence[Task], options: argparse.Namespace) -> dict[str, list[EpisodeRecord]]:
    """Play the tasks with all agents and return the records by agent name, the model first."""
    pool = MiniStackPool(options.pool_size)
    played: dict[str, list[EpisodeRecord]] = {}
    pool.start()
    try:
        if options.model:
            with make_agent(options) as agent:
                played[agent.name] = play(agent, tasks, pool, options)
        for agent in (ScriptedExpert(), RandomAgent(options.seed)):
            played[agent.name] = play(agent, tasks, pool, options)
    finally:
        pool.stop()
    return played


def write(played: dict[str, list[EpisodeRecord]], options: argparse.Namespace) -> None:
    """Print the table of metrics, and write the plot and a JSON file with metrics and all
    episodes."""
    reports = {agent: report(records) for agent, records in played.items()}
    title = f"{options.split}: {SPLITS[options.split]}"
    console = Console()
    Console(width=max(console.width, _TABLE_WIDTH)).print(table(reports, title))
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(options).items()
    }
    document = {
        "options": settings,
        "reports": reports,
        "episodes": {
            agent: [asdict(record) for record in records] for agent, records in played.items()
        },
    }
    (options.out / "evaluation.json").write_text(json.dumps(document, indent=1) + "\n")
    plot_success(reports, title, options.out / "evaluation.png")
    print(f"written to {options.out}/evaluation.json and evaluation.png")


def plot_success(reports: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """Plot the success rates as bars to a PNG file. ``reports``: {agent name: {group: {"success":
    {value, low, high, n}}}}."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(group for report in reports.values() for group in report))
    fig = Figure(figsize=(1.6 + 1.3 * len(groups), 3.6), layout="constrained")
    axes = fig.subplots()
    width = 0.8 / len(reports)
    for number, (agent, groups_of) in enumerate(reports.items()):
        rates = [
            (position, groups_of[group]["success"])
            for position, group in enumerate(groups)
            if groups_of.get(group, {}).get("success")
        ]
        values = [100 * rate["value"] for _, rate in rates]
        errors = [
            [100 * max(0.0, rate["value"] - rate["low"]) for _, rate in rates],
            [100 * max(0.0, rate["high"] - rate["value"]) for _, rate in rates],
        ]
        positions = [position + (number - (len(reports) - 1) / 2) * width for position, _ in rates]
        axes.bar(
            positions, values, width * 0.92, yerr=errors, capsize=2, label=agent, error_kw={"lw": 1}
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 105)
    axes.set_ylabel("episodes solved, %")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(reports))
    fig.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
