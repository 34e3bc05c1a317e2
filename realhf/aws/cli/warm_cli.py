"""In-process AWS CLI driver that stays loaded between commands and limits what requests may ask
for.

The public program rebuilds parsers and clients for every command; this driver builds them once.
Event handlers that a command registers on shared objects are removed afterwards, so that commands
neither slow the driver down nor affect each other.

Limits apply to every count that a simulator would turn into objects (found by member name in
botocore's models), and to the expansion of YAML documents. Not all counts are visible here, for
example those in templates; the resource limits of the simulator process bound the rest.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import awscli  # (must be first: makes the name botocore refer to the CLI's own copy)
import yaml
from awscli import clidriver, paramfile
from awscli.argparser import ServiceArgParser
from awscli.arguments import CLIArgument
from awscli.customizations import globalargs
from awscli.customizations.cliinputjson import add_cli_input_json
from awscli.customizations.generatecliskeleton import add_generate_skeleton
from awscli.customizations.waiters import WaitCommand
from awscli.help import HelpCommand
from botocore.hooks import HierarchicalEmitter
from botocore.model import OperationModel
from botocore.waiter import SingleWaiterConfig

from realhf.aws.cli import short_cuts
from realhf.aws.cli.pinned_http import ENDPOINT, PinnedConnection, is_internal_path, pin_client
from realhf.aws.cli.policy import (
    BASE64,
    DOCUMENTS,
    RAW,
    REGION,
    OwnOptions,
    Refuse,
    RefusedRequest,
    read_own_options,
    refuse,
)
from realhf.aws.cli.virtual_folder import is_name_in_folder

MAX_COUNT = 100
"""Largest count in a request, unless botocore's model defines a maximum for it."""
MAX_ALIASES = 16
"""Maximum number of aliases in a YAML document. With each alias the expanded document may more than
double."""
_COUNT_MEMBER = re.compile(
    r"(?<!sample)count$|capacity$|capacitybuffer$|instances$|workers$|nodes$|shards$|replicas|partitions$|buckets$|pools$"
    r"|^m(in|ax)size$|^num(ber)?of|^num(cache|node)|concurrency$|concurrentruns$",
    re.IGNORECASE,
)
"""Names of members that are a number of objects to create."""
_ALIAS, _ANCHOR = (re.compile(rf"(?:^|[\s\[{{,:?-]){sign}[^\s\]}},*&]") for sign in (r"\*", "&"))
_NUMBERS = frozenset({"integer", "long", "float", "double"})


def find_excess(model: OperationModel, params: Any) -> str:
    """Return a message about the limit that a request exceeds, or "" if it exceeds none."""
    is_s3 = model.service_model.service_name == "s3"
    for name, shape, value in _iterate_leaves(model.input_shape, params):
        if isinstance(value, (str, bytes)):
            if not is_s3 and has_many_aliases(value):
                return f"a document may have {MAX_ALIASES} aliases (*name)"
        elif shape is not None and shape.type_name in _NUMBERS and _COUNT_MEMBER.search(name):
            limit = shape.metadata.get("max") or MAX_COUNT
            if isinstance(value, (int, float)) and value > limit:
                return f"{name} may be {limit} at most here"
    return ""


def has_many_aliases(document: str | bytes) -> bool:
    """Return whether a document, read as YAML, has more than ``MAX_ALIASES`` aliases."""
    if isinstance(document, bytes) and document.startswith(b"PK\x03\x04"):
        return False  # a zip archive, which no YAML parser accepts
    text = document.decode("utf-8", "replace") if isinstance(document, bytes) else document
    if text.count("*") <= MAX_ALIASES or "&" not in text:
        return False
    n_aliases = 0
    try:
        for token in yaml.scan(text, yaml.CSafeLoader):
            n_aliases += isinstance(token, yaml.AliasToken)
            if n_aliases > MAX_ALIASES:
                return True
    except (yaml.YAMLError, ValueError):  # the simulator's parser may be less strict
        return len(_ALIAS.findall(text)) > MAX_ALIASES and _ANCHOR.search(text) is not None
    return False


def _iterate_leaves(shape: Any, params: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (member name, shape, value) for every scalar in ``params``. Iterative, because agents
    may send deeply nested documents."""
    pending = [("", shape, params)]
    while pending:
        name, shape, value = pending.pop()
        if isinstance(value, dict):
            members = getattr(shape, "members", {})
            other = getattr(shape, "value", None)
            pending += [(str(key), members.get(key, other), item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            pending += [(name, getattr(shape, "member", None), item) for item in value]
        else:
            yield name, shape, value


_URL_MEMBERS = ("TemplateURL", "StackPolicyURL", "StackPolicyDuringUpdateURL")
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
MAX_DEPTH = 100
"""Maximum depth of nested objects and lists in the parameters of a command. Deeper ones would end in
a RecursionError or not, depending on how many functions are being called around them."""
_TOO_DEEP = f"the parameters of a command may have {MAX_DEPTH} levels"
_BRACKETS = re.compile(r"[][{}]")
_DEEP_BLOCK = re.compile(r"(?:[-?:][ \t]+){100}")
_MIN_BASE64_CHARS = 8
_MANY_BASE64_CHARS = 40


def looks_like_base64(text: str) -> bool:
    """Return whether a string was probably meant as base64: it is padded, it decodes to text, or it
    is long and mixes upper case, lower case and digits."""
    if len(text) < _MIN_BASE64_CHARS or len(text) % 4 or not _BASE64.fullmatch(text):
        return False
    try:
        inner = base64.b64decode(text, validate=True).decode()
    except ValueError:
        inner = ""
    mixed = all(any(map(kind, text)) for kind in (str.isupper, str.islower, str.isdigit))
    return text.endswith("=") or _is_text(inner) or (len(text) >= _MANY_BASE64_CHARS and mixed)


def _is_text(text: str) -> bool:
    return bool(text) and all(char.isprintable() or char in "\t\n\r" for char in text)


def _text_blobs(shape: Any, params: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield (container, key or index, member name) for every string where botocore's model expects
    bytes."""
    pending = [("", shape, params)]
    while pending:
        name, shape, value = pending.pop()
        members = getattr(shape, "members", {})
        if isinstance(value, dict):
            inner = [
                (key, str(key), members.get(key, getattr(shape, "value", None))) for key in value
            ]
        elif isinstance(value, list):
            inner = [(index, name, getattr(shape, "member", None)) for index in range(len(value))]
        else:
            continue
        for key, label, kind in inner:
            if isinstance(value[key], str):
                if kind is not None and kind.type_name == "blob":
                    yield value, key, label
            else:
                pending.append((label, kind, value[key]))


class _TextLoader(yaml.CSafeLoader):
    """YAML loader that keeps timestamps as strings, because botocore parses them itself."""


_TextLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def _is_deep(text: str) -> bool:
    """Return whether a YAML document may be nested too deeply. The YAML parser goes through all
    levels for every token, so deep documents are slow."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest > MAX_DEPTH or _DEEP_BLOCK.search(text) is not None


def is_too_deep(params: Any) -> bool:
    """Return whether parameters are nested deeper than ``MAX_DEPTH``. Iterative, and each object
    counts once on a level, because an object of a YAML document may be in several others, or in
    itself."""
    inner = [params]
    for _ in range(MAX_DEPTH + 1):
        containers = {id(item): item for item in inner if isinstance(item, (dict, list, tuple))}
        if not containers:
            return False
        inner = []
        for container in containers.values():
            inner += container.values() if isinstance(container, dict) else container
    return True


def read_document(own: OwnOptions) -> Mapping[str, Any]:
    """Return the parameters in the document that a command names, or {} if it names none. Raises
    RefusedRequest if the document is not an object, is nested too deeply, or is a file outside the
    working folder."""
    if not own.document_option:
        return {}
    text = own.document
    in_json = own.document_option == DOCUMENTS[0]
    if text.lower().startswith(("file:", "fileb:")):
        name = text.partition("://")[2]
        if not is_name_in_folder(name):
            refuse("local-file", "only plain names inside the working folder can be read")
        try:
            with open(name, encoding="utf-8") as file:
                text = file.read()
        except (OSError, ValueError):
            refuse("local-file", f"{name} cannot be read as text")
    if not in_json and has_many_aliases(text):
        refuse("too-many", f"a document may have {MAX_ALIASES} aliases (*name)")
    if not in_json and _is_deep(text):
        refuse("malformed", _TOO_DEEP)
    try:
        document = json.loads(text) if in_json else yaml.load(text, _TextLoader)
    except RecursionError:
        refuse("malformed", _TOO_DEEP)
    except (ValueError, yaml.YAMLError):
        document = None
    if is_too_deep(document):
        refuse("malformed", _TOO_DEEP)
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        form = "JSON" if in_json else "YAML"
        refuse(
            "malformed", f"{own.document_option} is an object in {form}, inline or in file://NAME"
        )
    return document


_MAX_PARAM_CHARS = 65536
_WAIT_DELAY_S = 0.25
"""Maximum delay between two requests of a waiter, in seconds."""
_WAIT_ATTEMPTS = 8
"""Maximum number of requests of a waiter. Together with the delay this limits a waiter to two
seconds. Waiting longer is useless, because a simulator's state does not progress by itself."""
_CLIENT_EVENTS = (
    "after-call", "before-call", "before-parameter-build", "provide-client-params", "request-created", "before-send",
    "response-received", "needs-retry", "choose-signer", "before-sign",
)  # fmt: skip
"""Events whose handlers a new client copies from its session."""


class UndoLog:
    """Record of the event handlers that are registered while a command runs, on any emitter, so
    that they can be removed afterwards."""

    def __init__(self) -> None:
        self._entries: list[tuple[HierarchicalEmitter, str, Any, Any]] = []
        self._recording = False
        original = HierarchicalEmitter._register_section

        def register_section(
            emitter: HierarchicalEmitter,
            event_name: str,
            handler: Any,
            unique_id: Any,
            uses_count: Any,
            section: Any,
        ) -> None:
            if self._recording:
                self._entries.append((emitter, event_name, handler, unique_id))
            original(emitter, event_name, handler, unique_id, uses_count, section)

        HierarchicalEmitter._register_section = register_section  # type: ignore[method-assign]
        # botocore inspects the signature of every handler to help plugin authors; there are no
        # plugins here.
        HierarchicalEmitter._verify_accept_kwargs = lambda emitter, func: None  # type: ignore[method-assign]

    def begin(self) -> None:
        """Start recording handlers."""
        self._recording = True

    def client_handlers(self, session_emitter: HierarchicalEmitter) -> list[tuple[str, Any]]:
        """Return the handlers that this command registered on the session and that a newly created
        client would copy."""
        return [
            (name, handler)
            for emitter, name, handler, _ in self._entries
            if emitter is session_emitter and name.startswith(_CLIENT_EVENTS)
        ]

    def take(self, action: Callable[[], Any]) -> tuple[Any, list[tuple[str, Any]]]:
        """Run ``action`` and return (its result, the handlers that it registered). The handlers are
        removed again at once."""
        outer = self._entries
        was_recording = self._recording
        self._entries = []
        self._recording = True
        result = action()
        handlers = [(event_name, handler) for _, event_name, handler, _ in self._entries]
        self.undo()
        self._entries = outer
        self._recording = was_recording
        return result, handlers

    def undo(self) -> None:
        """Stop recording and remove every handler registered since ``begin``."""
        self._recording = False
        for emitter, event_name, handler, unique_id in reversed(self._entries):
            emitter.unregister(event_name, handler, unique_id)
        self._entries.clear()


class RequestLog:
    """Record of the requests that botocore sent during a command. There is one entry for each
    request that was answered or failed."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def attach(self, session: Any) -> None:
        """Start recording the requests of a botocore session."""
        session.register("provide-client-params", self._on_params)
        session.register("before-call", self._answer_dry_run)
        session.register("after-call", self._on_answer)
        session.register("after-call-error", self._on_failure)

    def _on_params(
        self, params: Mapping[str, Any], model: Any, context: dict[str, Any], **_: Any
    ) -> None:
        context["realhf_sent"] = {
            "service": model.service_model.service_name,
            "operation": model.name,
            "params": json_able(params),
        }

    @staticmethod
    def _answer_dry_run(context: dict[str, Any], **_: Any) -> tuple[Any, dict[str, Any]] | None:
        """Answer a dry run as AWS does; the simulator would execute it."""
        if not context["realhf_sent"]["params"].get("DryRun"):
            return None
        error = {
            "Code": "DryRunOperation",
            "Message": "Request would have succeeded, but DryRun flag is set.",
        }
        return SimpleNamespace(status_code=412), {
            "Error": error,
            "ResponseMetadata": {"HTTPStatusCode": 412},
        }

    def _on_answer(
        self, http_response: Any, parsed: Any, context: dict[str, Any], **_: Any
    ) -> None:
        error = parsed.get("Error", {}) if isinstance(parsed, dict) else {}
        self._add(context, http_response.status_code, str(error.get("Code", "")))

    def _on_failure(self, exception: BaseException, context: dict[str, Any], **_: Any) -> None:
        if not isinstance(exception, RefusedRequest):
            self._add(context, 0, type(exception).__name__)

    def _add(self, context: dict[str, Any], status: int, error_code: str) -> None:
        if context["realhf_sent"]["params"].get("DryRun"):
            return  # a dry run changes nothing and must not be graded
        self.entries.append({**context["realhf_sent"], "status": status, "error_code": error_code})


def json_able(value: Any) -> Any:
    """Return ``value`` in a form that JSON can represent: streams become a marker, long strings are
    cut."""
    if isinstance(value, Mapping):
        return {str(key): json_able(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_able(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return bytes(value[:_MAX_PARAM_CHARS]).decode("utf-8", "replace")
    if isinstance(value, str):
        return value[:_MAX_PARAM_CHARS]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    return "<stream>"


class _WarmDriver(clidriver.CLIDriver):
    """CLI driver with cached parsers and without the features that depend on the user's machine
    (aliases, log handlers)."""

    def __init__(self, session: Any, refuse: Refuse) -> None:
        super().__init__(session)
        self._refuse = refuse
        self._parser: Any = None

    def _create_parser(self, command_table: Any) -> Any:
        if self._parser is None:
            self._parser = super()._create_parser(command_table)
        return self._parser

    def _add_aliases(self, command_table: Any, parser: Any) -> None:
        pass

    def _handle_top_level_args(self, args: Any, remaining: Any) -> None:
        if (
            args.profile
            or args.debug
            or not args.sign_request
            or args.endpoint_url != ENDPOINT
            or args.ca_bundle
        ):
            self._refuse("global-option", "this option is not available here")
        if args.region not in (None, REGION):
            self._refuse("region", f"only {REGION} is available here")
        # The program's other handlers of this event set options that are fixed here: signing,
        # timeouts, certificates.
        globalargs.resolve_types(args)
        args.verify_ssl = None

    def announce_session(self) -> None:
        """Emit the session event once; the public program emits it for every command. Handlers for
        values and formats register themselves on this event."""
        parsed, _ = self._create_parser(self._get_command_table()).parse_known_args(["sts"])
        super()._emit_session_event(parsed)

    def _emit_session_event(self, parsed_args: Any) -> None:
        pass


class WarmCli:
    """In-process equivalent of the ``aws`` program: ``run(argv)`` executes one command. Not
    thread-safe."""

    def __init__(self, account: str, on_refusal: Callable[[RefusedRequest], None]) -> None:
        self.account = account
        self.connection = PinnedConnection(self._refuse)
        self._on_refusal = on_refusal
        self._clients: dict[tuple[Any, ...], Any] = {}
        self._document: Mapping[str, Any] = {}
        self._blobs = ""
        self._relaxed_arguments: list[Any] = []
        # (argument table, its items before the command)
        self._used_tables: list[tuple[dict[str, Any], list[tuple[str, Any]]]] = []
        self._undo = UndoLog()
        self._log = RequestLog()
        _restrict_param_files(self._refuse)
        _disable_help(self._refuse)
        _bound_waiters()
        _bound_depth(self._refuse)
        original = clidriver.create_clidriver()
        self._session = original.session
        short_cuts.install(self._session, lambda: bool(self._document))
        self._create_client = self._session.create_client
        self._session.create_client = self._get_client  # pyright: ignore[reportAttributeAccessIssue]
        # registered before all others, which may be recursive
        self._session.register("provide-client-params", self._check_depth)
        # registered before the log, so that the log has the parameters as they are sent
        self._session.register("provide-client-params", self._decode_blobs)
        self._log.attach(self._session)
        self._session.register("provide-client-params", self._check_bounds)
        self._session.register("before-building-argument-table-parser", self._relax_required)
        self._session.register("calling-command", self._fill_from_document)
        self._driver = _WarmDriver(self._session, self._refuse)
        self._session.unregister("building-argument-table", add_cli_input_json)
        self._session.unregister("building-argument-table", add_generate_skeleton)
        self._cache_parsers()
        self._driver.announce_session()
        logging.disable(logging.CRITICAL)

    def preload(self, operations: Mapping[str, frozenset[str]]) -> None:
        """Build the argument tables and clients of the allowed services before worker processes are
        forked."""
        table = self._driver._get_command_table()
        for_documents = (self._relax_required, self._fill_from_document)
        for service, names in operations.items():
            command = table[service]
            if service == "s3":
                continue
            client = self._get_client(
                command._service_name, region_name=REGION, endpoint_url=ENDPOINT, verify=None
            )
            subcommands = command._get_command_table()
            for name in names:
                operation = subcommands[name]
                build = partial(operation._create_operation_parser, operation.arg_table)
                parser, scoped = self._undo.take(build)
                short_cuts.prepare(operation, parser, scoped, client, for_documents)
        self._used_tables.clear()

    def run(
        self, argv: list[str], stdout: io.TextIOBase, stderr: io.TextIOBase
    ) -> tuple[int, list[dict[str, Any]]]:
        """Run a command and return (exit code, requests sent). Its output goes to ``stdout`` and
        ``stderr``."""
        self._log.entries = []
        saved = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = stdout, stderr  # type: ignore[assignment]
        self._undo.begin()
        try:
            argv, own = read_own_options(argv)
            self._document = read_document(own)
            self._blobs = own.blobs
            code = self._driver.main(["--endpoint-url", ENDPOINT, *argv])
        except RefusedRequest as refusal:
            self._on_refusal(refusal)
            code = 252
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 2
        finally:
            sys.stdout, sys.stderr = saved
            self._undo.undo()
            for argument in self._relaxed_arguments:
                argument.required = True
            self._relaxed_arguments = []
            self._restore_tables()
            self._document = {}
        return code or 0, self._log.entries

    def _restore_tables(self) -> None:
        """Restore the argument tables that the command used. Without pagination, the CLI replaces
        its own options in them by those of the operation that have the same names."""
        for table, items in self._used_tables:
            if [*table.items()] != items:
                table.clear()
                table.update(items)
        self._used_tables.clear()

    def _relax_required(self, argument_table: Mapping[str, Any], **_: Any) -> None:
        """Make all options optional if the command has a document with parameters."""
        if self._document:
            self._relaxed_arguments = [
                argument for argument in argument_table.values() if argument.required
            ]
            for argument in self._relaxed_arguments:
                argument.required = False

    def _fill_from_document(self, call_parameters: dict[str, Any], **_: Any) -> None:
        """Add the document's parameters, except those that the command line sets."""
        for name, value in self._document.items():
            call_parameters.setdefault(name, value)

    def _decode_blobs(self, params: Mapping[str, Any], model: Any, **_: Any) -> None:
        """Decode the strings given for binary members, as ``--cli-binary-format`` demands. Without
        that option, refuse strings that look like base64: version 1 of the CLI takes them
        literally, version 2 decodes them."""
        for holder, key, name in _text_blobs(model.input_shape, params):
            if self._blobs == BASE64:
                try:
                    holder[key] = base64.b64decode(holder[key], validate=True)
                except ValueError:
                    self._refuse("malformed", f"{name} is not base64, as --cli-binary-format says")
            elif not self._blobs and looks_like_base64(holder[key]):
                version = f"aws-cli {awscli.__version__} takes texts for bytes literally"
                say = f"say --cli-binary-format {BASE64} or {RAW}, or give fileb://NAME"
                self._refuse("malformed", f"{name} looks like base64, and {version}; {say}")

    def _check_depth(self, params: Mapping[str, Any], **_: Any) -> None:
        """Refuse parameters that are nested too deeply."""
        if is_too_deep(params):
            self._refuse("malformed", _TOO_DEEP)

    def _check_bounds(self, params: Mapping[str, Any], model: Any, **_: Any) -> None:
        """Check the parameters of a request against limits and for URLs and internal paths. The
        policy cannot do that, because they may come from a document in a file."""
        reason = find_excess(model, params)
        if reason:
            self._refuse("too-many", reason)
        if any(
            str(params.get(name, "")).lower().startswith(("http://", "https://"))
            for name in _URL_MEMBERS
        ):
            self._refuse("url-value", "no document is fetched from a URL here")
        source = params.get("CopySource", "")
        if isinstance(source, Mapping):  # in a document; botocore converts it to text later
            source = f"{source.get('Bucket', '')}/{source.get('Key', '')}"
        if model.service_model.service_name == "s3" and is_internal_path(f"/{source}"):
            self._refuse("internal-path", "this name is not part of AWS")

    def _refuse(self, rule: str, message: str) -> NoReturn:
        refusal = RefusedRequest(rule, message)
        self._on_refusal(refusal)
        raise refusal

    def _get_client(self, service_name: str, **kwargs: Any) -> Any:
        if kwargs.get("endpoint_url") not in (None, ENDPOINT):
            self._refuse("endpoint", "requests leave only for this session's endpoint")
        kwargs.update(endpoint_url=ENDPOINT, region_name=REGION, verify=None)
        config = kwargs.get("config")
        key = (
            service_name,
            None if config is None else repr(sorted(vars(config).items(), key=str)),
        )
        client = self._clients.get(key)
        if client is None:
            recording = self._undo._recording
            self._undo._recording = False
            client = self._create_client(service_name, **kwargs)
            self._clients[key] = pin_client(client, self.account, self.connection)
            self._undo._recording = recording
            return client
        emitter = self._session.get_component("event_emitter")
        for name, handler in self._undo.client_handlers(getattr(emitter, "_emitter", emitter)):
            client.meta.events.register(name, handler)
        return client

    def _cache_parsers(self) -> None:
        service_parsers: dict[int, Any] = {}
        scoped: dict[int, list[tuple[str, Any]]] = {}
        build_table = clidriver.ServiceOperation._create_argument_table

        def argument_table(operation: clidriver.ServiceOperation) -> Any:
            # Building the table of one operation may register handlers for events of all
            # operations. The public program builds only one table; here they are kept apart and
            # registered on use.
            table, scoped[id(operation)] = self._undo.take(lambda: build_table(operation))
            return table

        operation_parsers: dict[int, tuple[tuple[Any, ...], Any]] = {}

        def service_parser(command: clidriver.ServiceCommand) -> Any:
            parser = service_parsers.get(id(command))
            if parser is None:
                table = command._get_command_table()
                table["help"] = command.create_help_command()
                parser = service_parsers[id(command)] = ServiceArgParser(table, command._name)
            return parser

        def operation_parser(
            operation: clidriver.ServiceOperation, arg_table: dict[str, Any]
        ) -> Any:
            self._used_tables.append((arg_table, [*arg_table.items()]))
            for event_name, handler in scoped.get(id(operation), ()):
                operation._session.register(event_name, handler)
            shape = tuple((id(argument), argument.required) for argument in arg_table.values())
            known = operation_parsers.get(id(operation))
            if known is not None and known[0] == shape:
                return known[1]
            parser = clidriver.ArgTableArgParser(arg_table)
            parser.add_argument("help", nargs="?")
            operation_parsers[id(operation)] = (shape, parser)
            return parser

        clidriver.ServiceOperation._create_argument_table = argument_table  # type: ignore[method-assign]
        clidriver.ServiceCommand._create_parser = service_parser  # type: ignore[method-assign]
        clidriver.ServiceOperation._create_operation_parser = operation_parser  # type: ignore[method-assign]
        clidriver.ServiceOperation._add_help = lambda operation, parser: None  # type: ignore[method-assign]


def _disable_help(refuse: Refuse) -> None:
    """Refuse help pages, because they would start a pager."""

    def no_help(self: HelpCommand, args: Any, parsed_globals: Any) -> None:
        refuse("operation", "help pages are not available here")

    HelpCommand.__call__ = no_help


def _bound_waiters() -> None:
    """Make waiters poll often and give up early. Also build each waiter command only once, because
    parsers are cached by the identity of their commands."""
    original = SingleWaiterConfig.__init__
    build = WaitCommand._build_subcommand_table
    tables: dict[int, tuple[WaitCommand, Any]] = {}

    def bounded(config: SingleWaiterConfig, definition: Any) -> None:
        original(config, definition)
        config.delay = min(config.delay, _WAIT_DELAY_S)
        config.max_attempts = min(config.max_attempts, _WAIT_ATTEMPTS)

    def table(command: WaitCommand) -> Any:
        if id(command) not in tables:
            tables[id(command)] = command, build(command)
        return tables[id(command)][1]

    SingleWaiterConfig.__init__ = bounded  # type: ignore[method-assign]
    WaitCommand._build_subcommand_table = table  # type: ignore[method-assign]


def _bound_depth(refuse: Refuse) -> None:
    """Refuse values of options that are nested too deeply for their parsers."""
    unpack = CLIArgument._unpack_argument

    def unpack_argument(argument: CLIArgument, value: Any) -> Any:
        try:
            return unpack(argument, value)
        except RecursionError:
            refuse("malformed", _TOO_DEEP)

    CLIArgument._unpack_argument = unpack_argument  # type: ignore[method-assign]


def _restrict_param_files(refuse: Refuse) -> None:
    """Restrict ``file://`` to the virtual folder, and disable parameters from URLs."""

    def read(prefix: str, path: str, mode: str) -> Any:
        name = path[len(prefix) :]
        if not is_name_in_folder(name):
            refuse("local-file", "only plain names inside the working folder can be read")
        try:
            with open(name, mode) as file:
                return file.read()
        except OSError as error:
            raise paramfile.ResourceLoadingError(
                f"Unable to load paramfile {path}: {error}"
            ) from error

    for prefix, mode in (("file://", "r"), ("fileb://", "rb")):
        paramfile.LOCAL_PREFIX_MAP[prefix] = (read, {"mode": mode})
    paramfile.REMOTE_PREFIX_MAP.clear()
