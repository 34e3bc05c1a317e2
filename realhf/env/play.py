"""The command ``python -m realhf.env play``: lets a person play an environment."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from realhf.api.environment import (
    SPLITS,
    TRAIN,
    AssistantMessage,
    Environment,
    EnvironmentSpec,
    Opening,
    Task,
    Turn,
)
from realhf.base.loop_thread import LoopThread
from realhf.base.text import escape_controls, suggest_names
from realhf.env.check.calls import Caller, CallFailed, UserCode, environment_folders
from realhf.env.check.command import parse_seconds
from realhf.env.check.contract import ends_episode, opening_problems, tool_problems, turn_problems
from realhf.env.check.scripts import call_text, list_functions, policy_turn
from realhf.env.loader.load import build_environment, parse_options


def typed_lines(console: Console, *, terminal: bool) -> Iterator[str]:
    """Yield the typed lines until Ctrl-D or the end of the input. A line that ends with a backslash
    is continued by the next one.

    A terminal offers line editing and history. Lines read from a pipe are echoed, so that the
    output is a transcript.
    """
    if terminal:
        import readline  # noqa: F401 (enables line editing in ``input``)
    text = ""
    while True:
        line = _read_terminal_line(text) if terminal else sys.stdin.readline()
        if line.rstrip("\r\n").endswith("\\"):
            text += line.rstrip("\r\n")[:-1] + "\n"
            continue
        if not line and not text:
            return
        text += line.rstrip("\r\n")
        if not terminal:
            console.print(Text(f"> {text}"), soft_wrap=True)
        yield text
        text = ""


def _read_terminal_line(before: str) -> str:
    """Read a line from the terminal, with its newline; return "" at Ctrl-D."""
    try:
        return input("… " if before else "> ") + "\n"
    except EOFError:
        return ""


SAY = "say"
CALL = "call"
HELP = "help"
TOOLS = "tools"
RESTART = "restart"
NEXT = "next"
QUIT = "quit"
"""Kinds of typed lines: a message, a call, and the commands."""
HELP_TEXT = """\
Type what a policy would say. A line that ends with a backslash continues in the next one.
/tool NAME key=value ...   call a tool by hand; values with spaces stand in quotes
/tool NAME {"key": ...}    the same, with arguments as JSON
/tools                     show the tools
/restart                   begin the task again
/next                      play another task
/help                      show this
/quit                      end the game (so does Ctrl-D)
//text                     say /text"""
"""Shown by ``/help`` and ``--help``."""
_COMMAND_KINDS = {
    "/help": HELP,
    "/tools": TOOLS,
    "/restart": RESTART,
    "/next": NEXT,
    "/quit": QUIT,
    "/exit": QUIT,
}
"""Kinds of lines by command."""


@dataclass(frozen=True)
class TypedLine:
    """One line that a person typed at the prompt, parsed into a command, a message or a tool
    call."""

    kind: str
    """Kind of the line, such as ``SAY``."""
    text: str = ""
    """Text of a message."""
    name: str = ""
    """Name of the tool in a call."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a call."""


def read_line(line: str, tools: Sequence[Mapping[str, Any]]) -> TypedLine:
    """Parse a typed line. Raises ValueError, whose message is one sentence, for an invalid command
    or call."""
    if line.startswith("//") or not line.startswith("/"):
        return TypedLine(SAY, line.removeprefix("/") if line.startswith("//") else line)
    word, _, remainder = line.partition(" ")
    if word == "/tool":
        return _parse_call(remainder.strip(), dict(list_functions(tools)))
    if word not in _COMMAND_KINDS or remainder.strip():
        raise ValueError(
            f"{line[:60]!r} is not a command (/help shows them; //... says a text that begins with a "
            f"slash)"
        )
    return TypedLine(_COMMAND_KINDS[word])


def _parse_call(remainder: str, parameters_by_tool: Mapping[str, Mapping[str, Any]]) -> TypedLine:
    name, _, argument_text = remainder.partition(" ")
    if not name:
        raise ValueError('say which tool: /tool NAME key=value ... or /tool NAME {"key": ...}')
    argument_text = argument_text.strip()
    if argument_text.startswith("{"):
        return TypedLine(CALL, name=name, arguments=_parse_object(argument_text))
    try:
        words = shlex.split(argument_text)
    except ValueError as error:
        raise ValueError(f"the arguments cannot be read: {str(error).lower()}") from None
    properties = parameters_by_tool.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ValueError(f"{word!r} is not an argument: write key=value")
        arguments[key] = _parse_value(key, value, properties.get(key))
    return TypedLine(CALL, name=name, arguments=arguments)


def _parse_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the arguments are no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("the arguments are a JSON object")
    return value


def _parse_value(key: str, text: str, schema: Any) -> Any:
    """Parse the value of an argument according to its schema: as text if the type is string, else
    as JSON.

    Text that is not JSON is kept if the schema gives no type, the type null, or several types.
    Raises ValueError for other text.
    """
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        if kind in (None, "null") or not isinstance(kind, str):
            return text
        raise ValueError(
            f"{key} is of the type {kind}, and {text!r} is none (JSON sends it all the same)"
        ) from None


_MAX_SHOWN_CHARS = 20_000
"""Maximum length of a displayed text in characters."""
_STYLES = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}
"""Colours by role."""


def _printable_text(text: object) -> str:
    """Return a text with its control characters made visible, truncated to ``_MAX_SHOWN_CHARS``
    characters."""
    full = str(text)
    suffix = (
        f"… ({len(full) - _MAX_SHOWN_CHARS:,} more characters)"
        if len(full) > _MAX_SHOWN_CHARS
        else ""
    )
    return escape_controls(full[:_MAX_SHOWN_CHARS]) + suffix


class Board:
    """Display of a game on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def title(self, spec: EnvironmentSpec, task: Task, split: str, seed: int) -> None:
        """Show which episode starts."""
        group = f", group {task.group}" if task.group else ""
        self.line(f"── {spec.name}, task {task.id}{group}, split {split}, seed {seed}", "bold")

    def opening(self, system_prompt: str, opening: Opening) -> None:
        """Show the opening of an episode."""
        if system_prompt:
            self.message("system", system_prompt)
        self.messages(opening.messages)
        self.tools(opening.tools)

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Show the tools with their parameters."""
        if not tools:
            self.line("no tools: the environment reads plain text", "dim")
        about = {
            tool["function"]["name"]: tool["function"].get("description", "") for tool in tools
        }
        for name, parameters in list_functions(tools):
            self.line(f"tool {signature(name, parameters)}", "yellow")
            self.line(f"     {about[name]}", "dim")

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Show messages of the environment."""
        for message in messages:
            self.message(
                str(message.get("role")), message.get("content") or message.get("tool_calls", "")
            )

    def message(self, role: str, content: object) -> None:
        """Show one message."""
        self._console.print(
            Text(f"{_printable_text(role)}: ", style=_STYLES.get(role, "")), end="", soft_wrap=True
        )
        self._console.print(Text(_printable_text(content)), soft_wrap=True)

    def turn(self, turn: Turn, so_far: float) -> None:
        """Show the environment's answer. ``so_far``: return of the episode including this turn."""
        self.messages(turn.messages)
        parts = []
        if turn.reward is not None:
            parts.append(f"reward {turn.reward:+g}{' (final)' if turn.final else ''}")
        parts += [f"{name} {value:+g}" for name, value in turn.rewards.items()]
        parts += [f"{name} {value:g}" for name, value in turn.metrics.items()]
        self.line("  ".join([*parts, f"return {so_far:g}"]), "dim")
        if turn.info:
            self.line(
                f"info {json.dumps(turn.info, ensure_ascii=False, default=repr)[:_MAX_SHOWN_CHARS]}",
                "dim",
            )

    def line(self, text: str, style: str = "") -> None:
        """Print a line."""
        self._console.print(Text(_printable_text(text), style=style), soft_wrap=True)


def signature(name: str, parameters: Mapping[str, Any]) -> str:
    """Return the signature of a tool, such as ``read(path: string, lines: integer (optional))``."""
    required = parameters.get("required") or ()
    parameters_text = [
        f"{key}: {_kind(schema)}{'' if key in required else ' (optional)'}"
        for key, schema in (parameters.get("properties") or {}).items()
    ]
    return f"{name}({', '.join(parameters_text)})"


def _kind(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    kinds = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(kinds, list):
        return " | ".join(map(_kind, kinds))
    kind = schema.get("type", "any")
    return kind if isinstance(kind, str) else " | ".join(map(str, kind))


_STOP_S = 1.0
"""Seconds that the event loop may take to answer or to stop."""
_CLOSE_S = 3.0
"""Maximum seconds for closing the environment."""


def choose_task(spec: EnvironmentSpec, split: str, template: str, seed: int) -> Task:
    """Return an instance of a template. ``seed`` determines the instance and, if ``template`` is
    "", also the template.

    Raises ValueError for a template that is not in the split, and for a split without tasks.
    """
    tasks = spec.tasks(split)
    templates = [*tasks.group_of]
    if not templates:
        raise ValueError(f"{spec.name} has no task in the split {split!r}")
    if template and template not in tasks.group_of:
        raise ValueError(
            f"the split {split!r} has no task {template!r}{suggest_names(template, templates)}"
        )
    return tasks.instantiate(template or random.Random(seed).choice(templates), seed)


class Game:
    """Player of episodes of ``spec`` on its own event loop; every call of the environment is
    limited to ``timeout_s`` seconds.

    ``close`` must be called at the end.
    """

    def __init__(
        self, spec: EnvironmentSpec, board: Board, code: UserCode, timeout_s: float
    ) -> None:
        self._spec = spec
        self._board = board
        self._timeout_s = timeout_s
        self._caller = Caller(code, timeout_s, lambda name, task: None)
        self._loop = LoopThread("play", instead="the environment itself")
        self._environment: Environment | None = None
        self._opening: Opening | None = None
        self._return = 0.0
        self._is_over = True

    def play(self, lines: Iterable[str], split: str, template: str, seed: int) -> int:
        """Play until the lines end. Return 0, or 1 if the environment failed in the last episode.

        Raises ValueError for an unknown task.
        """
        task = choose_task(self._spec, split, template, seed)
        works = self._start_episode(task, split, seed)
        for line in lines:
            try:
                typed = read_line(line, self._opening.tools if self._opening else ())
            except ValueError as error:
                self._board.line(f"error: {error}", "red")
                continue
            if typed.kind == QUIT:
                break
            if typed.kind == NEXT:
                seed += 1
                task = choose_task(self._spec, split, "", seed)
            if typed.kind in (NEXT, RESTART):
                works = self._start_episode(task, split, seed)
            elif typed.kind == HELP:
                self._board.line(HELP_TEXT)
            elif typed.kind == TOOLS:
                self._board.tools(self._opening.tools if self._opening else ())
            elif self._is_over:
                self._board.line(
                    "the episode is over: /restart begins it again, /next another one, /quit ends",
                    "red",
                )
            else:
                works = self._send(typed, task)
        return 0 if works else 1

    def close(self) -> None:
        """Close the environment and stop the loop, within a few seconds. Raises CallFailed if the
        environment does not close."""
        self._timeout_s = min(self._timeout_s, _CLOSE_S)
        try:
            if self._environment is not None and self._is_blocked():
                raise CallFailed(
                    "it blocks the event loop and cannot be closed", "", "blocked", hung=True
                )
            self._release()
        finally:
            self._loop.stop(_STOP_S)

    def _start_episode(self, task: Task, split: str, seed: int) -> bool:
        """Start an episode; return False if the environment failed."""
        self._board.title(self._spec, task, split, seed)
        self._return = 0.0
        self._is_over = True
        self._opening = None
        try:
            if self._environment is None:
                self._environment = self._make_environment()
            environment = self._environment
            opening = self._call(
                "reset", task.id, lambda: environment.reset(task.payload, seed=task.seed)
            )
        except CallFailed as error:
            return self._report_failure(error)
        problems = [*opening_problems(opening, self._spec.system_prompt)]
        problems = problems or [*tool_problems(opening.tools)]
        if problems:
            return self._report_problems(problems)
        self._opening = opening
        self._is_over = False
        self._board.opening(self._spec.system_prompt, opening)
        return True

    def _send(self, typed: TypedLine, task: Task) -> bool:
        """Send a message or call; return False if the environment failed."""
        environment = self._environment
        opening = self._opening
        assert environment is not None and opening is not None
        message = self._build_message(typed, opening.tools)
        try:
            turn = self._call("step", task.id, lambda: environment.step(message))
        except CallFailed as error:
            return self._report_failure(error)
        if problems := [*turn_problems(turn)]:
            return self._report_problems(problems)
        self._show_turn(turn)
        return True

    def _build_message(
        self, typed: TypedLine, tools: Sequence[Mapping[str, Any]]
    ) -> AssistantMessage:
        if typed.kind != CALL:
            return policy_turn(typed.text, tools)
        if typed.name not in dict(list_functions(tools)):
            self._board.line(f"there is no tool {typed.name!r}; it is called all the same", "dim")
        return policy_turn(call_text(typed.name, typed.arguments), tools)

    def _show_turn(self, turn: Turn) -> None:
        self._return = (turn.reward or 0.0) + (0.0 if turn.final else self._return)
        self._board.turn(turn, self._return)
        if ends_episode(turn):
            self._is_over = True
            self._board.line(f"the episode is over, its return is {self._return:g}", "bold")

    def _report_failure(self, error: CallFailed) -> bool:
        """Report that the environment failed, and release the instance, because its state is
        unknown. Returns False."""
        self._is_over = True
        self._board.line(
            f"the environment failed: {error.what}{f', at {error.where}' if error.where else ''}",
            "red",
        )
        try:
            self._release()
        except CallFailed as close_error:
            self._board.line(f"and then {close_error.what}", "red")
        return False

    def _report_problems(self, problems: Sequence[str]) -> bool:
        self._is_over = True
        self._board.line(f"the environment breaks its contract: {problems[0]} (see `check`)", "red")
        return False

    def _release(self) -> None:
        environment = self._environment
        self._environment = None
        if environment is not None:
            self._call("close", "", environment.close)

    def _make_environment(self) -> Environment:
        async def make() -> Environment:
            return self._caller.make(self._spec.make, "")

        return self._run_on_loop(make())

    def _call(self, name: str, task: str, method: Any) -> Any:
        return self._run_on_loop(self._caller.call(name, task, method))

    def _run_on_loop(self, work: Any) -> Any:
        """Run a coroutine on the loop and return its result. Raises CallFailed, also if the loop is
        blocked."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop.loop)
        try:
            return future.result(self._timeout_s + 2 * _STOP_S)
        except TimeoutError:
            raise CallFailed(
                "it blocks the event loop and gives no answer", "", "blocked", hung=True
            ) from None
        finally:
            future.cancel()

    def _is_blocked(self) -> bool:
        """Return whether the loop no longer runs callbacks."""
        alive = threading.Event()
        self._loop.loop.call_soon_threadsafe(alive.set)
        return not alive.wait(_STOP_S)


ABOUT = f"""\
Play an environment by hand: you are the policy. Without a terminal, lines are read from standard input.

{HELP_TEXT}"""
"""Shown by ``--help``."""
_MAX_SEED = 1 << 31
"""Exclusive upper bound of randomly drawn seeds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = ABOUT
    parser.add_argument(
        "reference", metavar="ENVIRONMENT", help="a registered name, file.py:Name or module:Name"
    )
    parser.add_argument(
        "options", nargs="*", default=[], metavar="option=value", help="options of the environment"
    )
    parser.add_argument("--task", default="", metavar="ID", help="template of the task (drawn)")
    parser.add_argument("--seed", type=int, help="instance of the task (drawn)")
    parser.add_argument(
        "--split", choices=SPLITS, default=TRAIN, help="tasks of training, or those held out"
    )
    parser.add_argument(
        "--timeout",
        type=parse_seconds,
        default=60.0,
        metavar="S",
        help="seconds one call may take (60)",
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Play until the input ends. Return the exit status. Raises ValueError for wrong arguments."""
    spec = build_environment(arguments.reference, parse_options(arguments.options))
    if spec.launch is not None:
        raise ValueError(
            f"{spec.name} is played on a service ({spec.launch.module}), which `play` does not "
            f"start; a service may "
            "have a page of its own for that"
        )
    seed = random.randrange(_MAX_SEED) if arguments.seed is None else arguments.seed
    lines = typed_lines(console, terminal=sys.stdin.isatty() and sys.stdout.isatty())
    board = Board(console)
    game = Game(spec, board, UserCode(environment_folders(arguments.reference)), arguments.timeout)
    try:
        if sys.stdin.isatty():
            board.line("/help shows the commands, /quit ends", "dim")
        return game.play(lines, arguments.split, arguments.task, seed)
    except KeyboardInterrupt:
        board.line("\ninterrupted", "dim")
        return 130
    finally:
        try:
            game.close()
        except CallFailed as error:
            board.line(f"the environment failed: {error.what}", "red")
