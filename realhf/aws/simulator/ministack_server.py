"""Zygote of the simulators: imports MiniStack once, patches it, and forks one contained server per
slot.

``ForkServer`` runs it as ``python -m`` this module ``<control fd> <network> <root> <layers that may
be missing> <MiB of memory>``. Every simulator identifies itself as ``localhost:4566``, so its
output (queue URLs, endpoints) is the same in every slot. Its real port is that of the listening
socket that it receives, which the owner has bound to 127.0.0.1.

XML answers are repaired. An agent may call a user ``<|x|>`` or put a control character into a name.
AWS escapes the former and refuses the latter; MiniStack's answer would be unreadable for the AWS
CLI and the grader for the rest of the episode. Source: docs/reference/environment.md 5, row 8.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import gzip
import importlib
import importlib.util
import json
import os
import random
import re
import secrets
import select
import socket
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.parsers import expat

import botocore.session
import uvloop
from botocore.exceptions import DataNotFoundError

from realhf.aws.cli.command_table import MINISTACK_MODULES, MINISTACK_SERVICES
from realhf.aws.cli.virtual_folder import remove_folder
from realhf.aws.simulator import corrections
from realhf.aws.simulator.account_state import AccountState, Draws, ModuleSwitches
from realhf.aws.simulator.asgi_http import (
    AsgiApp,
    HttpConnection,
    ParsedRequests,
    owner_app,
    port_app,
)
from realhf.aws.simulator.ministack_process import ENVIRONMENT, OWNER, SIMULATOR_CPU_S, serve_owner
from realhf.aws.simulator.selectors import SelectorGate, read_selector_table
from realhf.env.containment import sandbox
from realhf.env.containment.fork_server import serve_forks
from realhf.env.containment.frames import encode_frame, read_frame
from realhf.env.containment.probe import PROBE, run_probe
from realhf.env.containment.sandbox import ProcessGuard

_TAG = re.compile(r'<(/?)([A-Za-z_][\w.:-]*)(?:\s+[\w.:-]+="[^"<]*")*\s*(/?)>|<\?xml[^>]*\?>')
"""A tag or an XML declaration."""
_AMPERSAND = re.compile(r"&(?!(?:amp|lt|gt|quot|apos|#\d+|#x[0-9a-fA-F]+);)")
"""An ampersand that does not begin an entity."""
_NO_CHARACTER = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""A character that XML does not permit."""


@dataclass
class _XmlPiece:
    """A tag, or the text between two tags. A tag without a counterpart is treated as text."""

    text: str
    """The piece as written."""
    tag: re.Match[str] | None = None
    """The match of ``_TAG``, or None for text."""


def is_well_formed(body: bytes) -> bool:
    """Return whether a body is well-formed XML."""
    try:
        expat.ParserCreate().Parse(body, True)
    except expat.ExpatError:
        return False
    return True


def repair_xml(body: bytes) -> bytes:
    """Return a body as well-formed XML if possible.

    Everything outside of paired tags is escaped, and characters that XML does not permit are
    replaced by U+FFFD. A body that is well-formed or cannot be repaired is returned unchanged.
    """
    if is_well_formed(body):
        return body
    text = _NO_CHARACTER.sub("\ufffd", body.decode("utf-8", "replace"))
    pieces = _split_tags(text)
    _demote_unpaired_tags(pieces)
    whole = "".join(piece.text if piece.tag else _escape(piece.text) for piece in pieces).encode()
    return whole if is_well_formed(whole) else body


def _split_tags(text: str) -> list[_XmlPiece]:
    """Split a text into tags and the text between them."""
    pieces = []
    end = 0
    for match in _TAG.finditer(text):
        pieces += [_XmlPiece(text[end : match.start()]), _XmlPiece(match[0], match)]
        end = match.end()
    return [*pieces, _XmlPiece(text[end:])]


def _demote_unpaired_tags(pieces: list[_XmlPiece]) -> None:
    """Turn tags without a counterpart into text, in place."""
    opened: list[tuple[str, _XmlPiece]] = []
    depth: Counter[str] = Counter()
    for piece in pieces:
        if piece.tag is None or piece.tag[2] is None or piece.tag[3]:
            continue
        closing = piece.tag[1]
        name = piece.tag[2]
        if not closing:
            opened.append((name, piece))
            depth[name] += 1
        elif not depth[name]:
            piece.tag = None
        else:
            while (inner := opened.pop())[0] != name:
                inner[1].tag = None
                depth[inner[0]] -= 1
            depth[name] -= 1
    for _, piece in opened:
        piece.tag = None


def _escape(text: str) -> str:
    """Return a text with its markup characters escaped. Existing entities are left unchanged."""
    return _AMPERSAND.sub("&amp;", text).replace("<", "&lt;").replace(">", "&gt;")


_EXECUTORS = ("proxy", "docker", "provided", "provided_warm", "warm", "local")
"""Names of MiniStack's Lambda executors."""
_ANSWER_S = 20.0
"""Seconds to wait for the Lambda broker."""


class LambdaGate:
    """Replacement for all of MiniStack's Lambda executors. Without a channel (LAMBDA=stub), the
    code of Lambda functions is ignored."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._stream: Any = None
        self._lock = threading.Lock()

    def install(self) -> None:
        """Replace the executors. Raises RuntimeError if this version of MiniStack has different
        ones."""
        module = importlib.import_module("ministack.services.lambda_svc")
        for executor in _EXECUTORS:
            if not hasattr(module, f"_execute_function_{executor}"):
                raise RuntimeError(
                    f"this version of ministack has no Lambda executor {executor}: not contained"
                )
            setattr(module, f"_execute_function_{executor}", self.execute)

    def attach(self, channel: socket.socket) -> None:
        """From now on, send code to the broker at the other end of ``channel``."""
        self._channel = channel
        self._stream = channel.makefile("rb")

    def execute(self, func: dict[str, Any], event: Any, *_: Any) -> dict[str, Any]:
        """Run a Lambda function and return its result in MiniStack's format: ``body``, ``log``,
        ``error``."""
        if self._channel is None:
            return {"body": {"statusCode": 200, "body": "stub"}, "log": "", "error": False}
        config = func.get("config") or func
        request = {
            "code": base64.b64encode(func.get("code_zip") or b"").decode(),
            "handler": str(config.get("Handler", "")),
            "runtime": str(config.get("Runtime", "")),
            "name": str(config.get("FunctionName", "")),
            "variables": (config.get("Environment") or {}).get("Variables") or {},
            "timeout_s": int(config.get("Timeout") or 3),
            "event": event,
        }
        with self._lock:
            try:
                self._channel.sendall(encode_frame(request))
                if not select.select([self._channel], [], [], _ANSWER_S)[0]:
                    raise TimeoutError(f"the Lambda broker did not answer within {_ANSWER_S:g} s")
                answer = read_frame(self._stream)
            except OSError as error:
                self._channel.close()  # a late answer must not be taken for the answer to the next request
                return _build_failure("Service.Unavailable", str(error))
        return answer or _build_failure("Service.Unavailable", "the Lambda broker ended")


def _build_failure(kind: str, message: str) -> dict[str, Any]:
    """Return the result of a failed invocation."""
    return {"body": {"errorType": kind, "errorMessage": message}, "log": "", "error": True}


_XML_PATH = re.compile(r"/$|/\d{4}-\d\d-\d\d/")
"""Request paths of the services that answer in XML, except S3."""
_LOG_BYTES = 4 << 20
"""Maximum size of a simulator's log, in bytes."""
_MIN_DRAW_LENGTH = 6
"""Minimum length of a generated text that is recorded."""
_OPEN_FILES = 1024
"""Maximum number of open files."""
_FILES = 64
_FOLDERS = 64
_DEPTH = 10
"""Maximum number of files and of folders, and maximum folder depth, that a simulator may write in
its in-memory folder between resets. Few services write files at all."""


class SeededRandomness:
    """The source of all random values in MiniStack (ids, suffixes, secrets): one seeded generator.

    It is seeded at each reset, and records the texts that it generates in ``draws``.
    """

    def __init__(self, draws: Draws) -> None:
        self._random = random.Random(0)
        self._draws = draws
        self._choices = random.choices

    def install(self) -> None:
        """Replace Python's sources of randomness. Call it before MiniStack's modules are imported,
        because they copy the functions."""
        uuid.uuid4 = self._uuid4
        os.urandom = self._bytes
        random._urandom = self._bytes  # type: ignore[attr-defined]
        random.choices = self._record_choices
        secrets.choice = self._choice

    def seed(self, seed: int) -> None:
        """Seed the generator and Python's ``random``."""
        self._random.seed(seed)
        random.seed(seed)

    def _bytes(self, size: int, /) -> bytes:
        drawn = self._random.randbytes(size)
        if size >= _MIN_DRAW_LENGTH:
            safe = base64.urlsafe_b64encode(drawn).rstrip(b"=").decode()
            self._draws.add(drawn.hex(), safe, base64.b64encode(drawn).decode())
        return drawn

    def _uuid4(self) -> uuid.UUID:
        drawn = uuid.UUID(int=self._random.getrandbits(128), version=4)
        self._draws.add(
            str(drawn), drawn.hex, drawn.hex.upper(), base64.b64encode(str(drawn).encode()).decode()
        )
        return drawn

    def _choice(self, population: Any) -> Any:
        letter = self._random.choice(population)
        if isinstance(letter, str):
            self._draws.add_letter(letter)
        return letter

    def _record_choices(
        self, population: Any, weights: Any = None, *, cum_weights: Any = None, k: int = 1
    ) -> list[Any]:
        choices = self._choices(population, weights, cum_weights=cum_weights, k=k)
        if k >= _MIN_DRAW_LENGTH and isinstance(choices[0], str):
            self._draws.add("".join(choices))
        return choices


class _PinnedLoop(uvloop.Loop):
    """Event loop that refuses outgoing connections. uvloop makes them without raising audit events,
    so the audit hook cannot stop them."""

    async def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise sandbox.Denied("egress: not allowed here")

    create_connection = _refuse
    create_unix_connection = _refuse
    create_datagram_endpoint = _refuse
    sock_connect = _refuse
    subprocess_exec = _refuse
    subprocess_shell = _refuse


def _import_modules() -> list[threading.Thread]:
    """Import MiniStack's modules. Return the threads that they would start at import, not yet
    started.

    A running thread would not survive the fork.
    """
    deferred: list[threading.Thread] = []
    original = threading.Thread.start
    threading.Thread.start = lambda thread: deferred.append(thread)  # type: ignore[method-assign]
    try:
        app = importlib.import_module("ministack.app")
        for name in MINISTACK_MODULES:
            importlib.import_module(f"ministack.services.{name}")
        app._reset_all_state()  # the first reset imports more modules, 80 ms that every fork would spend
        _remember_missing("docker")
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]
    return deferred


def _remember_missing(package: str) -> None:
    """If a package is not installed, let every import of it fail at once.

    Six services try to import it at each reset, and Python searches its whole path for it each
    time.
    """
    if importlib.util.find_spec(package) is None:
        sys.modules[package] = None  # type: ignore[assignment]


def _start_after_fork(thread: threading.Thread) -> None:
    """Start a thread that was created before the fork.

    From Python 3.13 on, a fork marks the handles of all other threads as done, even of threads that
    never ran. So the thread gets a new handle. The ``Thread`` object itself stays the same, because
    its creator calls ``is_alive`` on it.
    """
    if hasattr(thread, "_handle"):
        thread._handle = type(thread._handle)()  # type: ignore[attr-defined]
    thread.start()


def _build_account_state(draws: Draws) -> AccountState:
    """Return an ``AccountState`` that counts the deletions in MiniStack's stores from now on."""
    state = AccountState(draws)
    responses = importlib.import_module("ministack.core.responses")
    state.watch(responses.AccountScopedDict)
    state.watch(responses.AccountRegionScopedDict)
    return state


def _preload_service_metadata(services: Sequence[str]) -> None:
    """Read the metadata in the services' botocore models before the fork.

    MiniStack looks up a service's protocol in botocore's full model. That would cost tens of
    megabytes and 0.1 s per service in every simulator.
    """
    responses = importlib.import_module("ministack.core.responses")
    original = responses._service_model.__wrapped__
    loader = botocore.session.get_session().get_component("data_loader")
    metadata_models: dict[str, Any] = {}

    def service_model(service: str) -> Any:
        if service not in metadata_models:
            model = original(service)
            metadata_models[service] = (
                None if model is None else SimpleNamespace(metadata=dict(model.metadata))
            )
        return metadata_models[service]

    responses._service_model = service_model  # type: ignore[attr-defined]
    for service in services:
        metadata = _metadata(loader, responses._BOTOCORE_NAME.get(service, service))
        if metadata is None:
            service_model(service)
        else:
            metadata_models[service] = SimpleNamespace(metadata=metadata)


def _metadata(loader: Any, service: str) -> dict[str, Any] | None:
    """Return ``metadata`` from botocore's model of a service, or None if the file has another
    format.

    The rest of the file, which is nearly all of it, is not parsed.
    """
    with contextlib.suppress(DataNotFoundError, OSError, ValueError):
        version = loader.determine_latest_version(service, "service-2")
        for root in loader.search_paths:
            path = Path(root, service, version, "service-2.json.gz")
            if path.exists():
                text = gzip.decompress(path.read_bytes()).decode()
                start = re.compile(r'"metadata"\s*:\s*').search(text)
                return json.JSONDecoder().raw_decode(text, start.end())[0] if start else None
    return None


def _preload_service_names() -> None:
    """Load the names of all AWS services once, before the fork.

    Otherwise a request to a service that MiniStack lacks makes it read the names from all of
    botocore's models (400 MB, 5 s), again after each reset.
    """
    router = importlib.import_module("ministack.core.router")
    names = frozenset(botocore.session.get_session().get_available_services())
    router._KNOWN_AWS_SERVICE_NAMES = names  # type: ignore[attr-defined]


def _repair_answers(app: AsgiApp) -> AsgiApp:
    """Return ``app`` with repaired XML answers, so that names chosen by an agent cannot make them
    unreadable.

    S3 is excluded, because it returns objects with any content. The HTTP server sets the content
    length.
    """

    async def repairing(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not _XML_PATH.match(scope["path"]):
            await app(scope, receive, send)
            return
        body = bytearray()

        async def collect(message: dict[str, Any]) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            body.extend(message.get("body", b""))
            if not message.get("more_body"):
                await send(
                    {
                        **message,
                        "body": repair_xml(bytes(body)) if body.startswith(b"<") else bytes(body),
                    }
                )

        await app(scope, receive, collect)

    return repairing


async def _serve(
    app: AsgiApp,
    agent_app: AsgiApp,
    seed: Callable[[int], None],
    state: AccountState,
    listener: socket.socket,
    owner: socket.socket,
) -> None:
    """Serve the port and the owner's connections until the application ends."""
    loop = asyncio.get_running_loop()
    startup: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    started: asyncio.Event = asyncio.Event()
    startup.put_nowait({"type": "lifespan.startup"})

    async def lifespan_send(message: dict[str, Any]) -> None:
        started.set()

    lifespan = loop.create_task(app({"type": "lifespan"}, startup.get, lifespan_send))  # type: ignore[arg-type]
    await started.wait()
    parsed = ParsedRequests()
    switches = ModuleSwitches()
    outer = port_app(agent_app, parsed)
    inner = owner_app(app, seed, switches, parsed, state)
    serve_owner(
        loop,
        owner,
        {
            OWNER: lambda: HttpConnection(inner, loop, parsed, "owner"),
            ENVIRONMENT: lambda: HttpConnection(outer, loop, parsed, "environment"),
        },
    )
    server = await loop.create_server(
        lambda: HttpConnection(outer, loop, parsed, "port"), sock=listener
    )
    async with server:
        await lifespan


def main() -> None:
    """Import everything, then fork contained simulators until the owner closes the control
    channel."""
    control = socket.socket(fileno=int(sys.argv[1]))
    mode = sys.argv[2]
    root = sys.argv[3]
    may_lack = frozenset(sys.argv[4].split(","))
    memory_bytes = int(sys.argv[5]) << 20
    guard = ProcessGuard(_LOG_BYTES, _OPEN_FILES, memory_bytes, SIMULATOR_CPU_S, may_lack)
    draws = Draws()
    randomness = SeededRandomness(draws)
    randomness.install()
    gc.disable()  # imports create no garbage worth collecting
    deferred = _import_modules()
    app_module = importlib.import_module("ministack.app")
    gate = LambdaGate()
    gate.install()
    app = _repair_answers(app_module.app)
    state = _build_account_state(draws)
    agent_app = SelectorGate(app, read_selector_table())
    _preload_service_metadata(MINISTACK_SERVICES)
    _preload_service_names()
    corrections.install()
    isolated = sandbox.apply_network_mode(mode)
    gc.freeze()
    gc.enable()

    def child(request: dict[str, Any], fds: list[int]) -> None:
        if PROBE in request:
            run_probe(guard, request[PROBE], fds)
            return
        listener = socket.socket(fileno=fds[0])
        log = fds[1]
        owner = socket.socket(fileno=fds[2])
        sandbox.redirect_standard_streams(log)
        os.close(log)
        if len(fds) > 3:
            gate.attach(socket.socket(fileno=fds[3]))
        remove_folder(Path(request["before"]))
        os.environ["TMPDIR"] = request["folder"]
        os.makedirs(request["folder"], exist_ok=True)
        os.chdir(request["folder"])
        writes = sandbox.WriteBudget(_FILES, _FOLDERS, _DEPTH)
        guard.apply(request["folder"], writes=writes)

        def seed(number: int) -> None:
            """Seed a new account and reset the process's write budget."""
            writes.files = _FILES
            writes.folders = _FOLDERS
            randomness.seed(number)

        seed(0)
        for thread in deferred:
            _start_after_fork(thread)
        with asyncio.Runner(loop_factory=_PinnedLoop) as runner:
            runner.run(_serve(app, agent_app, seed, state, listener, owner))

    serve_forks(control, {"ready": True, "isolated": isolated}, child)
    remove_folder(Path(root))  # the owner does it, unless it was killed


if __name__ == "__main__":
    main()
