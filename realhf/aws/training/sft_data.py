"""Writes demonstrations: real episodes of scripted agents, as JSONL.

- *canonical*: the solution, nothing else.
- *continuation*: a solution of which the first steps are context and only the rest is to be learned.
- *recovery*: a mistake, what came of it, and then the right way.
- *verification*: a look at the account before the last step.
- *hint*: a hint is asked for first.
- *habit*: a mistake that is stuck to (nothing achieved): what a policy with room for improvement also does.

A mistake is one of the template's own or one that is possible everywhere: the last word of a name is left out. With
``--slips`` a recovery is from a slip of the command line instead: an operation that there is not, after which the
operations of the service are looked up, or a required option that is left out. What the command line says of it is
context for the right command, and the slip itself is never to be imitated: this teaches to read errors and help, which
serve with commands that were never demonstrated.

python -m realhf.aws.training.sft_data --out episodes.jsonl --episodes-per-task 20
    python -m realhf.aws.training.sft_data --out mixed.jsonl --mix recovery=0.3 habit=0.2 --tags starter

Every observation is what the simulator and the CLI really answered. Rows are split by template: ``--split heldout``
writes those of templates that training never sees.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from botocore import xform_name
from botocore.exceptions import UnknownServiceError
from botocore.session import Session
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from realhf.api.environment import AssistantMessage, ChatMessage, Environment, Opening, RolloutOutcome, Turn
from realhf.api.generation import TokenSource
from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.policy import check_command
from realhf.aws.episode.episode import HINT_COMMAND
from realhf.aws.episode.pooled_environment import MESSAGE_TIMEOUT_S, pooled_environment
from realhf.aws.messages import OBSERVATION_CHARS, episode_task
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.captures import fill_setup, resolve, setup_captures
from realhf.aws.tasks.loader import TEMPLATE_SPLITS, Template, instantiate, is_name, load_templates, mistakes
from realhf.aws.tasks.task import Task, TaskError
from realhf.base import event_loops
from realhf.base.files import whole_file
from realhf.base.text import shorten
from realhf.rollout.episode import EpisodeRequest, Witness, play_episode
from realhf.rollout.player import NO_TOKENS, Player

CANONICAL, CONTINUATION, RECOVERY = "canonical", "continuation", "recovery"
VERIFICATION, HINT, HABIT = "verification", "hint", "habit"
KINDS = (RECOVERY, HABIT, VERIFICATION, HINT, CONTINUATION, CANONICAL)
DEFAULT_MIX: Mapping[str, float] = MappingProxyType({CONTINUATION: 0.2, RECOVERY: 0.15, VERIFICATION: 0.05, HINT: 0.05})
"""Shares of the trajectory types; the rest is canonical."""
SHORTENED_SHARE = 0.6
"""Share of the mistakes that shorten a name; the others are the template's."""
LEFT_OUT_SHARE = 0.5
"""Share of the slips that leave out a required option, where the operation has one."""
PERSISTENCE = 3
"""Least number of commands of a habit episode: its last command is sent again."""
_SEED_BITS = 31


@dataclass(frozen=True)
class Line:
    """Is one command. ``number`` is its place (from 1) in the list that its captures refer to, 0 for one of no list;
    ``learned``: whether a trainer should imitate it."""

    command: str
    number: int = 0
    learned: bool = True


@dataclass(frozen=True)
class Script:
    """Is one episode to be played: the task and the lines of the scripted agent."""

    task: Task
    kind: str
    lines: tuple[Line, ...]


def write_scripts(
    episodes_per_task: int,
    seed: int,
    tiers: Sequence[str] | None = None,
    *,
    tags: Sequence[str] = (),
    split: str = "train",
    mix: Mapping[str, float] = MappingProxyType({}),
    learn_mistakes: bool = False,
    slips: bool = False,
    rephrased: bool = False,
    shown: int = OBSERVATION_CHARS,
) -> list[Script]:
    """Return the episodes to play, shuffled, decided by ``seed``. Templates whose solutions need ids that no text tells
    are left out: to imitate those would be to make ids up.

    Each template has exactly the rounded shares of each kind in ``mix``, the rest canonical. A template to which a kind
    cannot be applied (continuation of one step) gets canonical ones instead. ``split`` chooses templates, never rows.
    ``learn_mistakes``: the mistakes that are recovered from are to be imitated too; ``slips``: they are slips of the
    command line, and never are. ``rephrased``: tasks are worded in further ways, see ``instantiate``. ``shown``: so
    many characters of an answer are read. Raises ValueError for an impossible mix.
    """
    unknown = set(mix) - set(KINDS)
    if unknown:
        raise ValueError(f"unknown kind {sorted(unknown)[0]!r} in the mix; known: {', '.join(sorted(KINDS))}")
    if any(share < 0 for share in mix.values()) or sum(mix.values()) > 1 + 1e-9:
        raise ValueError("the mix holds shares of one: not negative, together at most 1")
    rng = random.Random(f"sft:{seed}")
    counted = [kind for kind in KINDS for _ in range(round(mix.get(kind, 0.0) * episodes_per_task))]
    kinds = (counted + [CANONICAL] * episodes_per_task)[:episodes_per_task]
    scripts = []
    for template in load_templates(tiers, tags=tags, split=split):
        if not _tells_ids(template):
            continue
        for kind in kinds:
            task = instantiate(template.task_id, rng.getrandbits(_SEED_BITS), rephrased=rephrased)
            scripts.append(write_script(task, kind, rng, learn_mistakes=learn_mistakes, slips=slips, shown=shown))
    rng.shuffle(scripts)
    return scripts


def _tells_ids(template: Template) -> bool:
    """Return whether its words tell every id of the set-up that its commands need."""
    repairs = [command for drift in template.possible_drifts for command in drift.get("repair", ())]
    told = [setup_captures([text, template.desired_state_spec]) for text in template.description]
    return setup_captures([*template.solution, *repairs]) <= set.intersection(*told)


def write_script(
    task: Task,
    kind: str,
    rng: random.Random,
    *,
    learn_mistakes: bool = False,
    slips: bool = False,
    shown: int = OBSERVATION_CHARS,
) -> Script:
    """Return one episode of this kind, or a canonical one where the task does not allow the kind."""
    solution = numbered(task.solution)
    if kind == HABIT:
        wrong, _ = _mistake(task, rng, any_way_back=False)
        return Script(task, kind, numbered(wrong + wrong[-1:] * (PERSISTENCE - len(wrong))))
    if kind == RECOVERY and slips:
        place = rng.randrange(len(solution))
        return Script(task, kind, solution[:place] + slip(solution[place].command, rng, shown) + solution[place:])
    if kind == RECOVERY:
        wrong, right = _mistake(task, rng, any_way_back=True)
        return Script(task, kind, numbered(wrong, learned=learn_mistakes) + numbered(right))
    if kind == HINT:
        return Script(task, kind, (Line(HINT_COMMAND), *solution))
    if kind == VERIFICATION:
        return Script(task, kind, (*solution[:-1], Line(look_command(task)), solution[-1]))
    if kind == CONTINUATION and len(solution) > 1:
        cut = rng.randrange(1, len(solution))
        return Script(task, kind, numbered(task.solution[:cut], learned=False) + solution[cut:])
    return Script(task, CANONICAL, solution)


def numbered(commands: Sequence[str], *, learned: bool = True) -> tuple[Line, ...]:
    """Return the lines of one list, whose captures refer to each other."""
    return tuple(Line(command, number, learned) for number, command in enumerate(commands, start=1))


def _mistake(task: Task, rng: random.Random, *, any_way_back: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the commands of a wrong way, and of the way back."""
    written = [mistake for mistake in mistakes(task) if mistake.recovery or not any_way_back]
    if rng.random() < SHORTENED_SHARE or not written:
        wrong = with_short_names(task)
        if any_way_back:
            # What a wrong name makes would be left behind; a look at it makes nothing.
            looks = wrong[0] != task.solution[0] and wrong[0].split(" ")[2].startswith(_LOOKS)
            wrong = wrong[:1] if looks else (_misspelt(task.solution[0]),)
        return wrong, task.solution
    mistake = rng.choice(written)
    return mistake.commands, mistake.recovery


def with_short_names(task: Task) -> tuple[str, ...]:
    """Return the solution with the last word of every drawn name left out; where no command has a drawn name (it may
    use identifiers alone), with the last letter of its operations left out."""
    drawn = [value for value in task.params.values() if is_name(value)]
    commands = task.solution
    for value in drawn:
        commands = tuple(command.replace(value, value.rpartition("-")[0]) for command in commands)
    return commands if commands != task.solution else tuple(_misspelt(command) for command in commands)


def _misspelt(command: str) -> str:
    words = command.split(" ")
    return " ".join([*words[:2], words[2][:-1], *words[3:]])


_LOOKS = ("describe-", "get-", "head-", "list-", "ls")
_VERBS = ("get", "describe", "list", "create", "put", "add", "update", "set", "delete", "remove")


def slip(command: str, rng: random.Random, shown: int) -> tuple[Line, ...]:
    """Return what goes wrong before this command is sent: it without one of the options that its operation requires, or
    by a name that no operation of the service has, which is not to be imitated, and then a look at those that there
    are, if the right one is among the ``shown`` characters that are read of it."""
    service, operation = command.split(" ")[1:3]
    options = command.split(" --")
    needed = [
        place for place, text in enumerate(options) if place and text.split(" ")[0] in _required(service, operation)
    ]
    if needed and rng.random() < LEFT_OUT_SHARE:
        left_out = rng.choice(needed)
        return (Line(" --".join(options[:left_out] + options[left_out + 1 :]), learned=False),)
    verb, _, rest = operation.partition("-")
    others = [f"{other}-{rest}" for other in _VERBS if other != verb and f"{other}-{rest}" not in ALLOWED[service]]
    wrong = command.replace(f" {operation}", f" {rng.choice(others)}", 1) if rest and others else _misspelt(command)
    look = f"aws {service} help"
    found = operation in shorten(check_command(look).answer or "", shown).split("\n")
    return (Line(wrong, learned=False), *((Line(look),) if found else ()))


@functools.cache
def _required(service: str, operation: str) -> frozenset[str]:
    """Return the options, without their hyphens, that an operation of botocore's models does not do without; none for a
    command that is not one of them."""
    try:
        model: Any = Session().get_service_model("s3" if service == "s3api" else service)
    except UnknownServiceError:
        return frozenset()
    name = next((name for name in model.operation_names if xform_name(name, "-") == operation), None)
    shape = model.operation_model(name).input_shape if name is not None else None
    if shape is None:
        return frozenset()
    # The command line itself makes up what only keeps a request from being carried out twice.
    return frozenset(
        xform_name(member, "-")
        for member in shape.required_members
        if not shape.members[member].metadata.get("idempotencyToken")
    )


def look_command(task: Task) -> str:
    """Return a listing of the service that the task's last step is about, or its help where the listing is the task."""
    service = task.solution[-1].split()[1]
    listing = _listing("s3api" if service == "s3" else service)
    return listing if listing and listing not in task.solution else f"aws {service} help"


@functools.cache
def _listing(service: str) -> str:
    """Return a command of this CLI service that lists something and needs no argument, "" where there is none."""
    model: Any = Session().get_service_model("s3" if service == "s3api" else service)
    needs: dict[str, Any] = {
        xform_name(name, "-"): model.operation_model(name).input_shape for name in model.operation_names
    }
    looks = sorted(
        (op for op in ALLOWED[service] if op.startswith(("list-", "describe-")) and op in needs),
        key=lambda op: (op.startswith("describe-"), op),
    )
    free = [op for op in looks if needs[op] is None or not needs[op].required_members]
    return f"aws {service} {free[0]}" if free else ""


class Reciting:
    """Is a ``Speaker`` without tokens, of ``script`` in the episode that ``seen`` witnesses."""

    tokens = None
    cut = False

    def __init__(self, script: Script, seen: Witness) -> None:
        self._lines, self._seen = script.lines, seen
        self._outputs: list[str] = []
        self._said: list[dict[str, Any]] = []

    def open(self, opening: Opening) -> None:
        """See ``Speaker``."""

    async def speak(self) -> AssistantMessage:
        """See ``Speaker``: the next command, its captures filled."""
        line = self._lines[len(self._said)]
        if line.number == 1:
            self._outputs = []
        answers = self._seen.opening.info["setup_answers"]
        command = resolve(fill_setup(line.command, answers), self._outputs)
        self._said.append({"role": "assistant", "content": command} | ({} if line.learned else {"train": False}))
        return AssistantMessage(command, text=command)

    def hear(self, messages: Sequence[ChatMessage]) -> bool:
        """See ``Speaker``: keep what the command printed, for the captures of later lines of its list."""
        if self._lines[len(self._said) - 1].number:
            self._outputs.append(self._seen.turns[-1].info["observation"]["command_output"])
        return True

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation. Roles: ``user`` the description, ``assistant`` a command (``"train": false`` where
        it is context, not to be imitated), ``user`` what a policy reads of the answer; the messages of the user carry
        the whole observation too."""
        found = _with_observation(self._seen.opening)
        for said, turn in zip(self._said, self._seen.turns, strict=True):
            found += [said, *_with_observation(turn)]
        return found


def _with_observation(heard: Opening | Turn) -> list[dict[str, Any]]:
    """Leaves out the random id of the episode: the file depends on the seed alone."""
    lasting = {key: value for key, value in heard.info["observation"].items() if key != "episode_id"}
    return [{**message, "observation": lasting} for message in heard.messages]


_RETRIES = 1
"""How often an episode is resumed or played again when its simulator is lost."""


class ScriptAgent:
    """Plays scripts and keeps their rows: task_id, template, tier, seed, kind, messages (``Reciting.messages``),
    achieved and reward. See ``EpisodeAgent``; ``on_row`` is called after each."""

    def __init__(self, scripts: Sequence[Script], on_row: Callable[[], None]) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self._scripts, self._on_row = scripts, on_row
        self._failures: Counter[int] = Counter()

    async def play(self, env: Environment, wanted: EpisodeRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """See ``EpisodeAgent``. Raises RuntimeError when an episode failed and is not played again, or when one of a
        kind that must succeed did not: either ends all others, since the rows would not be complete."""
        script, seen = self._scripts[wanted.index], Witness(env)
        task = script.task
        speaker = Reciting(script, seen)
        outcome = await play_episode(seen, wanted, speaker, len(script.lines))
        if outcome.valid:
            if outcome.achieved is (script.kind == HABIT):
                raise RuntimeError(f"{script.kind} episode of {task.template} (seed {task.seed}) is mislabelled")
            self.rows[wanted.index] = {
                **{"task_id": task.task_id, "template": task.template, "tier": task.tier, "seed": task.seed},
                **{"kind": script.kind, "messages": speaker.messages()},
                **{"achieved": outcome.achieved, "reward": outcome.reward},
            }
            self._on_row()
            return outcome
        self._failures[wanted.index] += 1
        if self._failures[wanted.index] > _RETRIES:
            raise RuntimeError(f"the episode {outcome.task_id} failed ({outcome.status}): {outcome.message}")
        return outcome


def play_all(
    scripts: Sequence[Script],
    pool: MiniStackPool,
    on_row: Callable[[], None] = lambda: None,
    *,
    observation_chars: int = OBSERVATION_CHARS,
    show_ids: bool = False,
) -> list[dict[str, Any]]:
    """Return the rows in the order of the scripts, played on all free slots of a started pool; what policies will read
    of the answers, see ``pooled_environment``, is in them. Raises RuntimeError as soon as an episode has failed, or one
    of a kind that must succeed did not."""
    agent = ScriptAgent(scripts, on_row)
    wanted = [EpisodeRequest(number, episode_task(script.task)) for number, script in enumerate(scripts)]
    with pooled_environment(pool, observation_chars=observation_chars, show_ids=show_ids) as spec:
        player = Player(spec, "", agent, pool.free_count, retries=_RETRIES, message_timeout_s=MESSAGE_TIMEOUT_S)
        event_loops.run(player.play_and_close(wanted, NO_TOKENS))
    return [agent.rows[number] for number in range(len(scripts))]


def statistics(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one map per tier and kind: rows, achieved, and the means of turns and reward."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["tier"], row["kind"]), []).append(row)
    return [
        {
            "tier": tier,
            "kind": kind,
            "rows": len(group),
            "achieved": sum(row["achieved"] for row in group),
            "mean_turns": sum(message["role"] == "assistant" for row in group for message in row["messages"])
            / len(group),
            "mean_reward": sum(row["reward"] for row in group) / len(group),
        }
        for (tier, kind), group in sorted(groups.items())
    ]


def _mix(texts: Sequence[str]) -> dict[str, float]:
    """Parse ``kind=share`` words. Raises ValueError."""
    mix = {}
    for text in texts:
        kind, _, share = text.partition("=")
        try:
            mix[kind] = float(share)
        except ValueError:
            raise ValueError(f"--mix takes kind=share, not {text!r}") from None
    return mix


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m realhf.aws.training.sft_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    default = " ".join(f"{kind}={share:g}" for kind, share in DEFAULT_MIX.items())
    add("--out", type=Path, required=True, help="JSONL file to write; statistics go to <out>.stats.json")
    add("--episodes-per-task", type=int, default=20)
    add("--seed", type=int, default=0)
    add("--tiers", nargs="+", help="default: all")
    add("--tags", nargs="*", default=(), help="only templates with one of these tags")
    add("--split", choices=TEMPLATE_SPLITS, default="train", help="which templates")
    add(
        "--mix",
        nargs="*",
        metavar="KIND=SHARE",
        help=f"kinds: {', '.join(KINDS)}; the rest is canonical (default: {default})",
    )
    add("--learn-mistakes", action="store_true", help="mistakes that are recovered from are marked for training too")
    add("--slips", action="store_true", help="recoveries are from slips of the command line, which are never learned")
    add("--phrasings", action="store_true", help="tasks are worded in further ways, too")
    add(
        "--observation-chars",
        type=int,
        default=OBSERVATION_CHARS,
        help="what a policy reads of an answer (%(default)s)",
    )
    add("--show-ids", action="store_true", help="it reads uuids and hexadecimal ids as they are")
    add("--pool-size", type=int, default=4, help="simulators that play in parallel")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit status: 0, 1 after an episode that failed; argparse exits on wrong options."""
    command_line = parser()
    options = command_line.parse_args(argv)
    try:
        scripts = write_scripts(
            options.episodes_per_task,
            options.seed,
            options.tiers,
            tags=options.tags,
            split=options.split,
            mix=DEFAULT_MIX if options.mix is None else _mix(options.mix),
            learn_mistakes=options.learn_mistakes,
            slips=options.slips,
            rephrased=options.phrasings,
            shown=options.observation_chars,
        )
    except (TaskError, ValueError) as error:
        command_line.error(str(error))
    console = Console(stderr=True)
    try:
        read = {"observation_chars": options.observation_chars, "show_ids": options.show_ids}
        found = statistics(write(scripts, options.pool_size, options.out, console, **read))
    except RuntimeError as error:
        print(f"sft_data: {error}", file=sys.stderr)
        return 1
    options.out.with_name(options.out.name + ".stats.json").write_text(json.dumps(found, indent=1) + "\n")
    table = Table("tier", "kind", "rows", "achieved", "turns", "reward")
    for group in found:
        head = (group["tier"], group["kind"], str(group["rows"]), str(group["achieved"]))
        table.add_row(*head, f"{group['mean_turns']:.1f}", f"{group['mean_reward']:.2f}")
    console.print(table)
    console.print(f"{len(scripts)} episodes written to {options.out}")
    return 0


def write(scripts: Sequence[Script], pool_size: int, out: Path, console: Console, **read: Any) -> list[dict[str, Any]]:
    """Play and write all rows, and return them; ``out`` appears when it is complete. ``read``: see ``play_all``."""
    pool = MiniStackPool(pool_size)
    pool.start()
    try:
        with (
            whole_file(out) as partial,
            partial.open("w") as file,
            Progress(*Progress.get_default_columns(), console=console) as progress,
        ):
            bar = progress.add_task("playing episodes", total=len(scripts))
            rows = play_all(scripts, pool, lambda: progress.advance(bar), **read)
            file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    finally:
        pool.stop()
    return rows


if __name__ == "__main__":
    sys.exit(main())
