"""OpenEnv servers as environments, by their address: ``env.path=openenv env.url=http://host:port``.

The server's pages describe the action (``/schema``), and whether rewards are levels and whether
requests are numbered (``/metadata``). Episodes are played over its WebSocket, with one session per
instance. Source: OpenEnv 0.10, docs/reference/environment.md 2.1.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from ssl import SSLContext
from typing import Any, ClassVar, NamedTuple

from realhf.api.environment import Environment, EnvironmentDefinition, EnvironmentSpec
from realhf.api.option import option
from realhf.base import process_clock
from realhf.base.loop_thread import LoopThread
from realhf.base.tls import context_trusting
from realhf.env.adapters.openenv_action import build_form
from realhf.env.adapters.openenv_episode import (
    MessagesEnvironment,
    OpenEnvEnvironment,
    OpenEnvRules,
    ServedTaskSet,
    speaks_messages,
)
from realhf.env.loader.tasks import (
    Row,
    RowOptions,
    SeedTaskSet,
    extract_row_options,
    load_task_sets,
)
from realhf.env.loader.validation import format_value
from realhf.env.openenv_client import OpenEnvClient, fetch_metadata, fetch_page, websocket_url

NAME = "openenv"
"""Name of the environment in the specification."""
_PAUSE_S = 0.2
"""Seconds between two attempts to reach a server."""
_STOP_S = 1.0
"""Seconds to wait for the end of the thread that requested the servers' pages."""


@dataclass
class OpenEnvOptions(RowOptions):
    """Any OpenEnv server, by its address. Every seed is a task, or every row of ``data``, whose
    columns are what the server's reset is given."""

    needs: ClassVar[str] = "url"

    url: Any = option(
        "",
        "The server's address, http(s):// or ws(s)://; several, as a list, are used in turn.",
        on_resume="free",
    )
    sessions: int | None = option(
        None,
        "Each server serves this many sessions at once to one process; without it what its "
        "metadata say, or 1, as "
        "stock servers do.",
        at_least=1,
        on_resume="free",
    )
    token_file: str = option(
        "", "This file holds the bearer token of the server.", on_resume="free"
    )
    ca_file: str = option(
        "",
        "An https server is checked by the certificates in this file; without it as this machine "
        "does.",
        on_resume="free",
    )
    action: str = option(
        "auto",
        "text: the policy's text fills one field of the action; tool: a tool takes all fields; "
        "auto: text where the "
        "action has one field, and that is text.",
        choices=("auto", "text", "tool"),
    )
    action_field: str = option("", "The policy's text fills this field of the action.")
    observation: str = option(
        "",
        "The policy reads this field of an observation; where it is not there, or not named, all "
        "of it as JSON.",
    )
    observation_chars: int = option(
        4000, "The policy reads at most this much of an observation.", at_least=1
    )
    system_prompt: str = option("", "This text precedes every episode.")
    reward: str = option(
        "auto",
        "sum: the rewards of an episode are summed; last: the last one counts; auto: last where "
        "the server's metadata "
        "say that rewards are levels.",
        choices=("auto", "sum", "last"),
    )
    success_reward: float = option(
        1.0, "An episode that ends with at least this reward is a success."
    )
    error: str = option(
        "fail",
        "What an error that the server reports of a step means. fail: the environment failed; "
        "tell: the policy reads "
        "it, for servers that raise when an action is wrong.",
        choices=("fail", "tell"),
    )
    deterministic: bool | None = option(
        None,
        "The same seed and actions bring the same answers, so that a lost episode is resumed by "
        "replay; without it "
        "what the server's metadata say, or not.",
    )
    connect_timeout_s: float = option(
        10.0,
        "A server opens a session within this time (s).",
        above=0,
        at_most=600,
        on_resume="free",
    )
    timeout_s: float = option(
        300.0,
        "A server answers a reset or a step within this time (s).",
        above=0,
        at_most=3600,
        on_resume="free",
    )


class ServerDescription(NamedTuple):
    """What a server says about itself."""

    url: str
    """Address of the server."""
    action: Any
    """JSON schema of the server's action."""
    metadata: Mapping[str, Any]
    """Content of the server's page ``/metadata``."""

    @property
    def sessions(self) -> int:
        """Maximum number of concurrent sessions."""
        sessions = self.metadata.get("max_concurrent_envs")
        return sessions if type(sessions) is int and sessions > 0 else 1


def build(options: OpenEnvOptions) -> EnvironmentSpec:
    """Return the specification for the servers at ``env.url``; all of them must answer.

    Raises ValueError naming the option for an address without a server, servers that serve
    different environments, and options that do not fit the server's action.
    """
    urls = parse_urls(options.url)
    token = _token(options.token_file)
    rows = extract_row_options(options)
    tls = _tls(options.ca_file)
    # A separate thread, because the caller may be on an event loop.
    loop_thread = LoopThread("openenv description", instead="an event loop")
    try:
        servers = loop_thread.call(_describe_servers(urls, token, options.connect_timeout_s, tls))
    finally:
        loop_thread.stop(_STOP_S)
    messages = speaks_messages(servers[0].action, servers[0].metadata)
    player = (
        _build_message_player(options) if messages else _build_action_player(servers[0], options)
    )
    turns = itertools.count()

    def client(server: ServerDescription) -> OpenEnvClient:
        """Return a new client of a server."""
        return OpenEnvClient(
            server.url,
            connect_timeout_s=options.connect_timeout_s,
            message_timeout_s=options.timeout_s,
            token=token,
            tls=tls,
            correlate=server.metadata.get("correlation") is True,
        )

    def make(_: str) -> Environment:
        """Return an environment; successive environments try another server first."""
        first = next(turns) % len(servers)
        return player([partial(client, server) for server in (*servers[first:], *servers[:first])])

    deterministic = options.deterministic
    if deterministic is None:
        deterministic = all(server.metadata.get("deterministic") is True for server in servers)
    return EnvironmentSpec(
        NAME,
        make,
        load_task_sets(rows, Path.cwd(), seeded=True, check=_check_row)
        if rows.data
        else partial(ServedTaskSet if messages else SeedTaskSet, NAME),
        system_prompt=options.system_prompt,
        concurrency=sum(options.sessions or server.sessions for server in servers),
        deterministic=deterministic,
    )


Clients = Sequence[Callable[[], OpenEnvClient]]
"""Functions that each return a client of one server, in the order in which they are tried."""


def _build_action_player(
    server: ServerDescription, options: OpenEnvOptions
) -> Callable[[Clients], Environment]:
    """Return the function that makes the environment for a server with its own action schema.
    Raises ValueError for options that do not fit the action."""
    try:
        form = build_form(server.action, options.action, options.action_field)
    except ValueError as error:
        raise ValueError(f"env.url={server.url}: {error}") from None
    level = options.reward == "last" or (
        options.reward == "auto" and server.metadata.get("reward_mode") == "level"
    )
    rules = OpenEnvRules(
        options.observation, options.observation_chars, level, options.success_reward, options.error
    )
    return lambda clients: OpenEnvEnvironment(clients, form, rules)


def _build_message_player(options: OpenEnvOptions) -> Callable[[Clients], Environment]:
    """Return the factory of environments whose server takes chat messages.

    Raises ValueError for an option that has no effect, because such a server decides it itself.
    """
    option_names = (
        "action",
        "action_field",
        "observation",
        "observation_chars",
        "reward",
        "success_reward",
        "error",
    )
    default = OpenEnvOptions()
    if ineffective := [
        name for name in option_names if getattr(options, name) != getattr(default, name)
    ]:
        raise ValueError(
            f"env.{ineffective[0]} has no effect: the server at env.url serves messages"
        )
    return MessagesEnvironment


def parse_urls(value: Any) -> list[str]:
    """Return the addresses in ``env.url``, which is a string or a list of strings, each with
    addresses separated by commas or spaces. Raises ValueError that names the option."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise ValueError(
            f"env.url must be an address or a list of addresses, not {format_value(value)}"
        )
    urls = [url for part in parts for url in _strip_list_syntax(part).replace(",", " ").split()]
    if not urls:
        raise ValueError(
            "env.url is missing: the address of an OpenEnv server, such as "
            "env.url=http://127.0.0.1:8100"
        )
    for url in urls:
        try:
            websocket_url(url)
        except ValueError as error:
            raise ValueError(f"env.url={url}: {error}") from None
    if len({*urls}) < len(urls):
        raise ValueError(
            f"env.url names a server twice: {', '.join(urls)}; env.sessions is how many sessions "
            f"each has"
        )
    return urls


def _strip_list_syntax(text: str) -> str:
    """Remove list syntax from a list that was given as a string, such as ``["http://a",
    "http://b"]``; return its items, separated as before."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1].replace('"', " ").replace("'", " ")
    return text


def _token(file: str) -> str | None:
    """Return the token in a file; None without a file. Raises ValueError that names the option."""
    if not file:
        return None
    try:
        token = Path(file).expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"env.token_file={file}: {error}") from None
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError(f"env.token_file={file}: the file has no token")
    return token


def _tls(file: str) -> SSLContext | None:
    """Return a TLS context that trusts the certificates in a file; None without a file. Raises
    ValueError that names the option."""
    try:
        return context_trusting(file) if file else None
    except ValueError as error:
        raise ValueError(f"env.ca_file: {error}") from None


def _check_row(row: Row) -> None:
    """Raise ValueError for a row with a column whose name the task set uses itself."""
    if "seed" in row.values:
        raise ValueError(f"{row.where}: the column 'seed' is set by the task set; leave it out")


async def _describe_servers(
    urls: Sequence[str], token: str | None, limit_s: float, tls: SSLContext | None
) -> list[ServerDescription]:
    """Return the descriptions of all servers, waiting ``limit_s`` seconds at most for each page.
    Raises ValueError, also if their actions differ."""
    servers = list(
        await asyncio.gather(*(_describe_server(url, token, limit_s, tls) for url in urls))
    )
    for server in servers[1:]:
        if _canonical_json(server.action) != _canonical_json(servers[0].action):
            raise ValueError(
                f"env.url: {server.url} and {servers[0].url} serve different environments, their "
                f"actions differ"
            )
    return servers


async def _describe_server(
    url: str, token: str | None, limit_s: float, tls: SSLContext | None
) -> ServerDescription:
    """Return the description of a server, retrying until ``limit_s`` seconds have passed. Raises
    ValueError."""
    end = process_clock.now() + limit_s
    while True:
        try:
            schema = await fetch_page(
                url, "schema", token, max(end - process_clock.now(), _PAUSE_S), tls
            )
            break
        except OSError as error:
            if process_clock.now() + _PAUSE_S > end:
                raise ValueError(
                    f"env.url={url}: no OpenEnv server answers there within "
                    f"env.connect_timeout_s={limit_s:g} s: "
                    f"{error}"
                ) from None
        except ValueError as error:
            raise ValueError(
                f"env.url={url}: this is no OpenEnv server: its page /schema: {error}"
            ) from None
        await asyncio.sleep(_PAUSE_S)
    if not isinstance(schema, Mapping) or "action" not in schema:
        raise ValueError(
            f"env.url={url}: this is no OpenEnv server: its page /schema names no action"
        )
    return ServerDescription(url, schema["action"], await fetch_metadata(url, token, limit_s, tls))


def _canonical_json(schema: Any) -> str:
    """Return a schema as a string that is equal for equal schemas."""
    return json.dumps(schema, sort_keys=True)


DEFINITION = EnvironmentDefinition(OpenEnvOptions, build)
