"""MCP servers as environments: ``env.path=mcp:COMMAND`` for one that speaks over its standard
streams, ``env.path=mcp:http://HOST/PATH`` for one at an address.

The server's tools are the tools of the episode. The tasks are rows of a file, and a function of the
user's judges the final answer. Each episode has a server of its own: a process, contained
(``realhf.env.containment.programs``), or a session at the address.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from realhf.api.environment import (
    AssistantMessage,
    ChatMessage,
    EnvironmentDefinition,
    EnvironmentFailure,
    EnvironmentSpec,
    Opening,
    ToolCall,
    Turn,
)
from realhf.api.messages import tool_problems
from realhf.api.option import option
from realhf.base.installation import import_extra
from realhf.base.plugin import load_reference
from realhf.base.text import suggest_names
from realhf.env.containment.programs import (
    LaunchOrder,
    Program,
    contain,
    find_program,
    program_environment,
    remove_abandoned_folders,
)
from realhf.env.containment.sandbox import find_bubblewrap
from realhf.env.loader.author import author_code
from realhf.env.loader.single_turn import Verifier, load_questions, read_verifier
from realhf.env.loader.tasks import RowOptions
from realhf.env.loader.threads import Threads
from realhf.env.loader.tool_env import SOLVED, read_question
from realhf.env.loader.validation import (
    BrokenContract,
    copy_json,
    json_problem,
    replace_surrogates,
    require_valid,
    validate_rewards,
)

if TYPE_CHECKING:
    from realhf.env.adapters.mcp_connection import ServerConnection, ToolResult

EXTRA = "mcp"
"""Name of the extra of this package that installs the SDK."""
SANDBOX_MODES = ("auto", "bwrap", "plain")
"""Values of ``env.sandbox``."""
CALLS = "calls"
CALL = "call"
FOLDER = "folder"
PROVIDED = (CALLS, CALL, FOLDER)
"""Arguments of a verifier that are not columns of a row."""
NO_SESSION = "there is no episode: reset comes first"
MAX_KEPT_CHARS = 4 << 20
"""Maximum number of characters of an episode's results that are kept for the verifier."""
_LOG = logging.getLogger(__name__)


@dataclass
class McpOptions(RowOptions):
    """The tools of an MCP server, the tasks of a file, and a function that judges the episode. Each
    episode has a server process, or a session, of its own."""

    needs: ClassVar[str] = "server"

    server: str = option(
        "",
        "The command of a server that speaks over its standard streams, or the http(s):// address "
        "of one.",
    )
    reward: str = option(
        "",
        "This function judges an episode: FILE.py:NAME or module:NAME, called as "
        "reward(completion, **row); it may also take calls, call and folder.",
    )
    prompt_column: str = option("prompt", "This column holds the task, as text or as messages.")
    tools: list[str] = option([], "Only these tools are offered; without it, all of the server's.")
    max_turns: int = option(
        10, "After this many turns the episode ends and is judged.", at_least=1, at_most=10_000
    )
    result_chars: int = option(
        8000, "The policy reads at most this much of a tool's result.", at_least=1
    )
    system_prompt: str = option("", "This text precedes every episode.")
    sandbox: str = option(
        "auto",
        "A server process runs in bubblewrap, which hides the files of this machine. auto: if it "
        "works here; bwrap: or not at all; plain: without it.",
        choices=SANDBOX_MODES,
        on_resume="free",
    )
    network: bool = option(False, "A server process may use the network.")
    files: list[str] = option(
        [],
        "Files and folders that a server process may read in bubblewrap, besides those that its "
        "command names.",
        on_resume="free",
    )
    variables: dict[str, str] = option(
        {},
        "Environment variables of a server process, which inherits none but PATH.",
        on_resume="free",
    )
    memory_mb: int = option(
        2048, "Memory of a process of the server (MiB).", at_least=16, on_resume="free"
    )
    cpu_s: int = option(
        600, "Processor time of a process of the server (s).", at_least=1, on_resume="free"
    )
    token_file: str = option(
        "", "This file holds the bearer token of a server at an address.", on_resume="free"
    )
    servers: int = option(
        8, "At most this many servers run at once in one process.", at_least=1, on_resume="free"
    )
    start_timeout_s: float = option(
        60.0,
        "A server starts and lists its tools within this time (s).",
        above=0,
        at_most=3600,
        on_resume="free",
    )
    timeout_s: float = option(
        60.0,
        "A tool, or the verifier, answers within this time (s).",
        above=0,
        at_most=3600,
        on_resume="free",
    )
    deterministic: bool = option(
        False,
        "The same calls bring the same results, so that a lost episode is resumed by replay.",
    )


@dataclass(frozen=True)
class McpRules:
    """How episodes are played and judged."""

    verifier: Verifier
    """The function that judges an episode."""
    provided: frozenset[str]
    """The arguments of ``PROVIDED`` that the verifier takes."""
    prompt_column: str
    """Column with the task."""
    tools: Sequence[str]
    """Names of the tools that are offered; () for all."""
    max_turns: int
    """Number of turns after which an episode ends."""
    result_chars: int
    """Maximum number of characters of a result that the policy reads."""
    start_timeout_s: float
    """Seconds in which a server starts."""
    timeout_s: float
    """Seconds in which a tool or the verifier answers."""


def build(options: McpOptions) -> EnvironmentSpec:
    """Return the specification. Raises ValueError that names the option, also if the SDK is not
    installed."""
    if not options.server:
        raise ValueError(
            "env.server is missing: the command or the address of an MCP server, such as "
            "env.path='mcp:python server.py'"
        )
    import_extra("mcp.client", EXTRA)
    connect = _address_connector(options) if is_address(options.server) else _connector(options)
    verifier, provided = _read_reward(options)
    rules = McpRules(
        verifier,
        provided,
        options.prompt_column,
        tuple(options.tools),
        options.max_turns,
        options.result_chars,
        options.start_timeout_s,
        options.timeout_s,
    )
    threads = Threads(verifier.function.__name__)
    return EnvironmentSpec(
        EXTRA,
        lambda _: McpEnvironment(connect, rules, threads),
        load_questions(verifier, options),
        system_prompt=options.system_prompt,
        concurrency=options.servers,
        deterministic=options.deterministic,
        max_turns=options.max_turns,
    )


def is_address(server: str) -> bool:
    """Return whether a server is named by its address, not by its command."""
    return server.startswith(("http://", "https://"))


def _read_reward(options: McpOptions) -> tuple[Verifier, frozenset[str]]:
    """Return (the verifier that ``env.reward`` names, the arguments of ``PROVIDED`` that it takes).
    Raises ValueError."""
    if not options.reward:
        raise ValueError(
            "env.reward is missing: the function that judges an episode, such as "
            "env.reward=verifier.py:reward"
        )
    try:
        module, name = load_reference(options.reward)
    except ValueError as error:
        raise ValueError(f"env.reward={error}") from None
    function = getattr(module, name or "reward", None)
    if not callable(function):
        raise ValueError(f"env.reward={options.reward}: it names no function")
    verifier = read_verifier(function)
    provided = frozenset(PROVIDED) & inspect.signature(function).parameters.keys()
    columns = tuple(name for name in verifier.required_columns if name not in provided)
    return verifier._replace(required_columns=columns), provided


Connector = Callable[[float], "ServerConnection"]
"""Function that returns a connection to a new server; its argument is the limit of a call in
seconds."""


def _address_connector(options: McpOptions) -> Connector:
    """Return the connector to a server at an address. Raises ValueError for options of a process,
    and for a file without a token."""
    default = McpOptions()
    for name in ("sandbox", "network", "files", "variables", "memory_mb", "cpu_s"):
        if getattr(options, name) != getattr(default, name):
            raise ValueError(f"env.{name} has no effect: the MCP server is at an address")
    try:
        host = urlsplit(options.server).hostname
    except ValueError:
        host = None
    if not host:
        raise ValueError(f"env.server={options.server}: this is no address")
    token = None
    if options.token_file:
        try:
            token = Path(options.token_file).expanduser().read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"env.token_file={options.token_file}: {error}") from None
        if not token or not token.isascii() or not token.isprintable():
            raise ValueError(f"env.token_file={options.token_file}: the file holds no token")

    def connect(timeout_s: float) -> ServerConnection:
        """Return a connection to a new session at the address."""
        from realhf.env.adapters.mcp_connection import ServerAddress, ServerConnection

        return ServerConnection(ServerAddress(options.server, token), timeout_s)

    return connect


def _connector(options: McpOptions) -> Connector:
    """Return the connector to a process. Raises ValueError for a command that does not exist."""
    if options.token_file:
        raise ValueError("env.token_file has no effect: the MCP server is a process")
    try:
        program = find_program(shlex.split(options.server), options.files)
    except ValueError as error:
        raise ValueError(f"env.server={options.server}: {error}") from None
    order = LaunchOrder(options.memory_mb << 20, options.cpu_s, options.network)
    start = _ProcessStart(program, order, options.sandbox)

    def connect(timeout_s: float) -> ServerConnection:
        """Return a connection to a new process."""
        from realhf.env.adapters.mcp_connection import ServerConnection, ServerProcess

        variables = partial(program_environment, program, options.variables)
        return ServerConnection(ServerProcess(start.words, variables), timeout_s)

    return connect


class _ProcessStart:
    """How processes of a server are started. At the first one, it is tried whether bubblewrap works,
    and folders that killed processes left are removed."""

    def __init__(self, program: Program, order: LaunchOrder, sandbox: str) -> None:
        self._program = program
        self._order = order
        self._sandbox = sandbox
        self._lock = threading.Lock()
        self._is_tried = False
        self._bubblewrap: Path | None = None

    def words(self, folder: Path) -> Sequence[str]:
        """Return the command of a process that may write to ``folder``. May block. Raises
        EnvironmentFailure if bubblewrap is required and does not work."""
        with self._lock:
            if not self._is_tried:
                remove_abandoned_folders()
                self._bubblewrap = None if self._sandbox == "plain" else find_bubblewrap()
                self._is_tried = True
                if self._sandbox == "auto" and self._bubblewrap is None:
                    _LOG.warning(
                        "env.sandbox=auto: bubblewrap (0.7 or later) does not work here, so the MCP "
                        "server can read and change the files that this user can; env.sandbox=bwrap "
                        "refuses that"
                    )
        if self._sandbox == "bwrap" and self._bubblewrap is None:
            raise EnvironmentFailure(
                "internal",
                "env.sandbox=bwrap, but bubblewrap does not work here: install Debian's package "
                "bubblewrap, or set env.sandbox=auto",
            )
        return contain(self._program, self._order, folder, self._bubblewrap)


class McpEnvironment:
    """Environment that plays one episode after another, each on a server of its own."""

    def __init__(self, connect: Connector, rules: McpRules, threads: Threads) -> None:
        self._connect = connect
        self._rules = rules
        self._threads = threads
        self._connection: ServerConnection | None = None
        self._row: Mapping[str, Any] = {}
        self._tools: Mapping[str, Mapping[str, Any]] = {}
        self._calls: list[dict[str, Any]] = []
        self._kept_chars = 0
        self._turns = 0
        self._failures = 0
        self._seed = 0
        self._done = True

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start a server and return the task of a row with the server's tools. Raises
        EnvironmentFailure."""
        await self.close()
        self._row = task
        self._seed = seed
        self._calls = []
        self._kept_chars = 0
        self._turns = 0
        self._failures = 0
        with self._contract():
            if self._rules.prompt_column not in task:
                raise BrokenContract(f"the row has no column {self._rules.prompt_column!r}")
            messages = read_question(task[self._rules.prompt_column], self._rules.prompt_column)
        connection = self._connect(self._rules.timeout_s)
        self._connection = connection
        try:
            tools = await connection.open(self._rules.start_timeout_s)
            self._tools = self._choose_tools(tools)
        except BaseException:
            await self._abandon()
            raise
        self._done = False
        return Opening(messages, [*self._tools.values()])

    async def step(self, message: AssistantMessage) -> Turn:
        """Run the calls of a turn. A turn without one, and the last one that ``max_turns`` allows,
        end the episode, which is then judged. Raises EnvironmentFailure."""
        connection = self._connection
        if self._done or connection is None:
            raise EnvironmentFailure("lost", NO_SESSION)
        self._turns += 1
        try:
            answers = [await self._answer(connection, call) for call in message.tool_calls]
            self._done = not answers or self._turns >= self._rules.max_turns
            metrics = {
                "tool_calls": float(len(self._calls)),
                "tool_failures": float(self._failures),
            }
            if not self._done:
                return Turn(answers, metrics=metrics)
            reward, components = await self._judge(connection, message.content)
        except BaseException:
            self._done = True
            await self._abandon()
            raise
        await self.close()
        metrics["success"] = float(reward >= SOLVED)
        return Turn(answers, True, reward, components, metrics, final=True)

    async def close(self) -> None:
        """End the server."""
        connection = self._connection
        self._connection = None
        self._done = True
        if connection is not None:
            await connection.close()

    async def _abandon(self) -> None:
        """End the server after a failure, also while this call is being cancelled."""
        await asyncio.shield(self.close())

    def _choose_tools(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Return the offered tools by name. Raises EnvironmentFailure for broken tools, and if one
        that the options name does not exist."""
        with self._contract():
            require_valid([*tools], tool_problems([*tools], "the MCP server's tools"))
        by_name = {tool["function"]["name"]: tool for tool in tools}
        if len(by_name) < len(tools):
            raise EnvironmentFailure("internal", "the MCP server lists a tool twice")
        if not by_name:
            raise EnvironmentFailure("internal", "the MCP server has no tools")
        for name in self._rules.tools:
            if name not in by_name:
                raise EnvironmentFailure(
                    "internal",
                    f"env.tools: the MCP server has no tool {name!r}"
                    f"{suggest_names(name, [*by_name])}",
                )
        return {name: by_name[name] for name in self._rules.tools or by_name}

    async def _answer(self, connection: ServerConnection, call: ToolCall) -> ChatMessage:
        """Run a call and return the message that answers it. The policy's mistakes are explained in
        it."""
        text, is_error = await self._call(connection, call)
        self._failures += is_error
        kept = _shorten_result(text, MAX_KEPT_CHARS - self._kept_chars)
        self._kept_chars = min(self._kept_chars + len(text), MAX_KEPT_CHARS)
        self._calls.append(
            {
                "name": call.name,
                "arguments": dict(call.arguments),
                "result": kept,
                "is_error": is_error,
            }
        )
        content = _shorten_result(f"error: {text}" if is_error else text, self._rules.result_chars)
        answer = {
            "role": "tool",
            "name": replace_surrogates(call.name[:60]) or "unknown",
            "content": content,
        }
        return answer | {"tool_call_id": call.id} if call.id else answer

    async def _call(self, connection: ServerConnection, call: ToolCall) -> tuple[str, bool]:
        """Return (result of a call as text, whether the call was wrong)."""
        from realhf.env.adapters.mcp_connection import CallMistake

        if call.problem:
            return call.problem, True
        if call.name not in self._tools:
            return (
                f"there is no tool {call.name[:60]!a}{suggest_names(call.name, [*self._tools])}",
                True,
            )
        if problem := json_problem(call.arguments):
            return f"the arguments are no JSON: {problem}", True
        try:
            result = await connection.call(call.name, call.arguments)
        except CallMistake as mistake:
            return str(mistake), True
        return result_text(result), result.is_error

    async def _judge(
        self, connection: ServerConnection, completion: str
    ) -> tuple[float, dict[str, float]]:
        """Return (reward, its components) of the episode. Raises EnvironmentFailure, also if the
        verifier takes too long."""
        verifier = self._rules.verifier
        arguments = {
            name: value
            for name, value in copy_json(self._row).items()
            if verifier.accepted_columns is None or name in verifier.accepted_columns
        }
        loop = asyncio.get_running_loop()
        failures: list[EnvironmentFailure] = []

        async def call(name: str, arguments: Mapping[str, Any] | None = None) -> str:
            """Call a tool for the verifier. Raises ValueError if the tool reports a mistake."""
            from realhf.env.adapters.mcp_connection import CallMistake

            try:
                result = await connection.call(name, arguments or {})
            except CallMistake as mistake:
                raise ValueError(str(mistake)) from None
            except EnvironmentFailure as failure:
                failures.append(failure)
                raise
            if result.is_error:
                raise ValueError(result_text(result))
            return result_text(result)

        def call_from_thread(name: str, arguments: Mapping[str, Any] | None = None) -> str:
            """Call a tool for a verifier that is not a coroutine function."""
            asked = asyncio.run_coroutine_threadsafe(call(name, arguments), loop)
            return asked.result(self._rules.timeout_s)

        provided = {
            CALLS: [dict(each) for each in self._calls],
            CALL: call if verifier.is_async else call_from_thread,
            FOLDER: connection.endpoint.folder,
        }
        arguments |= {name: provided[name] for name in self._rules.provided}
        judge = partial(verifier.function, completion, **arguments)
        limit_s = self._rules.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                with self._contract():
                    if verifier.is_async:
                        value = await judge()
                    else:
                        value = await self._threads.run(partial(self._judge_in_thread, judge))
                # A verifier that catches every error would make a lost server a reward.
                for failure in failures:
                    raise failure
                with self._contract():
                    return validate_rewards(value, "the reward")
        except TimeoutError:
            raise EnvironmentFailure(
                "timeout",
                f"{verifier.function.__name__} has not judged within env.timeout_s={limit_s:g} s",
            ) from None

    def _judge_in_thread(self, judge: Callable[[], Any]) -> Any:
        """Call the verifier in a worker thread, where its errors cannot be confused with the event
        loop's own."""
        with author_code(self._rules.verifier.function, self._current_call, on_loop=False):
            return judge()

    def _contract(self) -> Any:
        """Return a context manager that converts errors of the verifier and of the row to
        EnvironmentFailure."""
        return author_code(self._rules.verifier.function, self._current_call)

    def _current_call(self) -> tuple[str, int]:
        return "", self._seed


def result_text(result: ToolResult) -> str:
    """Return what a tool's result says, as text: its texts, and what else it has by name."""
    parts = []
    for content in result.content:
        if content.type == "text":
            parts.append(content.text)
        elif content.type == "resource" and hasattr(content.resource, "text"):
            parts.append(content.resource.text)
        else:
            kind = getattr(content, "mime_type", None) or "no type"
            parts.append(f"[{content.type}: {kind}]")
    if not parts and result.structured is not None:
        parts.append(json.dumps(result.structured, ensure_ascii=False))
    return replace_surrogates("\n".join(parts))


def _shorten_result(text: str, limit: int) -> str:
    return (
        text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} more characters)"
    )


DEFINITION = EnvironmentDefinition(McpOptions, build)
