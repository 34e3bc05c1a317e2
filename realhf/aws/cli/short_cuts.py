"""Short cuts through the AWS CLI and botocore: the same results with half of their CPU time.

Much of a command's time goes into work whose result is known before: parsers that look for options
nobody wrote, events without handlers, endpoints that are always the same. Each short cut replaces
one function. It takes the plain case, and gives anything else to the function that it replaces, so
errors and rare cases are the original's own.

Two larger ones have modules of their own: ``plain_commands`` and, below it, ``plain_calls``. All of
this holds for a process in which no plugin is loaded and in which configuration, environment and
endpoint never change, as in a worker. ``botocore`` means the CLI's own copy.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import awscli  # noqa: F401  (must be first: makes the name botocore refer to the CLI's own copy)
import botocore.context
from awscli import argparser, arguments, clidriver, formatter, paramfile
from awscli.utils import json_encoder
from botocore import parsers
from botocore.awsrequest import AWSPreparedRequest, AWSRequest, HeadersDict, _HeaderKey
from botocore.client import BaseClient
from botocore.endpoint import Endpoint
from botocore.regions import EndpointRulesetResolver

from realhf.aws.cli import plain_calls, plain_commands
from realhf.aws.cli.handler_lists import keep_handler_lists, rename_events_quickly
from realhf.aws.cli.word_parser import WordParser, is_left_over

_KEPT_NAMES = 512
"""Number of names of headers that are kept in both spellings."""
_KEPT_NAME_CHARS = 64
"""Maximum length of such a name."""
_PIECE_CHARS = 64 << 10
"""Number of characters of an answer that are written at once, or a few more."""


def install(session: Any, has_document: Callable[[], bool]) -> None:
    """Install all short cuts in this process. ``session``: the CLI's only session, of which no
    client was made yet. ``has_document``: whether the present command has a document of
    parameters."""
    emitter = session.get_component("event_emitter")
    keep_handler_lists(getattr(emitter, "_emitter", emitter))
    rename_events_quickly()
    _keep_configuration(session)
    _parse_plain_words()
    _skip_absent_arguments()
    _keep_endpoints()
    _keep_paginators()
    _copy_headers_quickly()
    _write_output_at_once()
    _share_context()
    plain_calls.install()
    plain_commands.install(has_document)
    logging.Logger.debug = lambda self, msg, *args, **kwargs: None  # type: ignore[method-assign]


def prepare(
    operation: Any,
    parser: Any,
    scoped: Sequence[tuple[str, Any]],
    client: Any,
    for_documents: Sequence[Callable[..., None]],
) -> None:
    """Make the plans of an operation, so that workers need not.

    ``parser``: of its options. ``scoped``: handlers of events that came with them. ``client``: the
    one that calls it. ``for_documents``: handlers that do nothing for a command without a document.
    """
    operation._plan = plain_commands.CommandPlan(operation, parser, scoped, client, for_documents)
    plain_calls.find_plan(client, operation._operation_model.name)


def _share_context() -> None:
    """Use one context for all calls of a thread that has one. A context collects features for the
    user agent, which is constant here, and was copied twice for each call."""
    start = botocore.context.start_as_current_context
    get_context = botocore.context.get_context
    unchanged = nullcontext()

    def start_as_current_context(ctx: Any = None) -> Any:
        return unchanged if ctx is None and get_context() is not None else start(ctx)

    botocore.context.start_as_current_context = start_as_current_context
    botocore.context.set_context(botocore.context.ClientContext())


def _keep_configuration(session: Any) -> None:
    """Look up each setting once."""
    look_up = session.get_config_variable
    read_scope = session.get_scoped_config
    values: dict[str, Any] = {}
    scope: list[Any] = []

    def get_config_variable(logical_name: str, methods: Any = None) -> Any:
        if methods is not None:
            return look_up(logical_name, methods)
        if logical_name not in values:
            values[logical_name] = look_up(logical_name)
        return values[logical_name]

    def get_scoped_config() -> Any:
        if not scope:
            scope.append(read_scope())
        return scope[0]

    session.get_config_variable = get_config_variable
    session.get_scoped_config = get_scoped_config


def _parse_plain_words() -> None:
    """Parse plain words without ``argparse``: SERVICE OPERATION and exact options with values."""
    parse_main = argparser.MainArgParser.parse_known_args
    parse_service = argparser.ServiceArgParser.parse_known_args
    parse_operation = argparser.ArgTableArgParser.parse_known_args

    def parse_globals(parser: Any, args: Sequence[str], namespace: Any = None) -> Any:
        # The first two words are the endpoint's option, which the driver puts there.
        options = parser._option_string_actions
        is_plain = (
            namespace is None
            and len(args) > 2
            and args[0] == "--endpoint-url"
            and not args[1].startswith("-")
            and not args[2].startswith("-")
            and args[2] in parser._actions[-1].command_table
            and all(is_left_over(word, options) for word in args[3:])
        )
        if not is_plain:
            return parse_main(parser, args, namespace)
        known = parser.__dict__.setdefault("_globals_by_endpoint", {})
        if args[1] not in known:
            known[args[1]] = vars(parse_main(parser, [*args[:3]], None)[0])
        return argparse.Namespace(**{**known[args[1]], "command": args[2]}), [*args[3:]]

    def parse_name(parser: Any, args: Sequence[str], namespace: Any = None) -> Any:
        is_plain = (
            namespace is None
            and len(args) > 0
            and not args[0].startswith("-")
            and args[0] in parser._actions[-1].command_table
            and all(is_left_over(word, ()) for word in args[1:])
        )
        if not is_plain:
            return parse_service(parser, args, namespace)
        return argparse.Namespace(operation=args[0]), [*args[1:]]

    def parse_options(parser: Any, args: Sequence[str], namespace: Any = None) -> Any:
        values = WordParser.of(parser).read(args) if namespace is None else None
        if values is None:
            return parse_operation(parser, args, namespace)
        return argparse.Namespace(**values), []

    parsers_of_cli: Any = argparser
    parsers_of_cli.MainArgParser.parse_known_args = parse_globals
    parsers_of_cli.ServiceArgParser.parse_known_args = parse_name
    parsers_of_cli.ArgTableArgParser.parse_known_args = parse_options


def _skip_absent_arguments() -> None:
    """Do not ask the handlers of an option that was not given what its value is, if the only one
    reads files."""
    idle: dict[int, tuple[Any, dict[int, tuple[Any, bool]]]] = {}

    def is_idle(operation: Any, argument: Any) -> bool:
        service = operation._operation_model.service_model.endpoint_prefix
        emitter = operation._session.get_component("event_emitter")
        emitter = getattr(emitter, "_emitter", emitter)
        name = clidriver.xform_name(operation._name, "-")
        event = f"load-cli-arg.{service}.{name}.{argument.name}"
        return type(argument).add_to_params is arguments.CLIArgument.add_to_params and all(
            type(handler) is paramfile.URIArgumentHandler
            for handler in emitter._handlers.prefix_search(event)
        )

    def build_call_parameters(
        operation: Any, args: Any, arg_table: Mapping[str, Any], parsed_globals: Any
    ) -> dict[str, Any]:
        parsed = vars(args)
        parameters: dict[str, Any] = {}
        # By the argument and not by its place: without pagination the CLI replaces some of them in
        # the same table.
        known = idle.setdefault(id(operation), (operation, {}))[1]
        for argument in arg_table.values():
            name = argument.py_name
            if name not in parsed:
                continue
            value = parsed[name]
            if value is None:
                if id(argument) not in known:
                    known[id(argument)] = (argument, is_idle(operation, argument))
                if known[id(argument)][1]:
                    continue
            value = operation._unpack_arg(argument, value, parsed_globals)
            argument.add_to_params(parameters, value)
        return parameters

    clidriver.ServiceOperation._build_call_parameters = build_call_parameters  # type: ignore[method-assign]


def _keep_endpoints() -> None:
    """Resolve the endpoint of an operation once, unless its parameters are part of it."""
    construct = EndpointRulesetResolver.construct_endpoint

    def construct_endpoint(
        resolver: Any, operation_model: Any, call_args: Any, request_context: Any
    ) -> Any:
        known = resolver.__dict__.setdefault("_endpoints", {})
        endpoint = known.get(operation_model.name)
        if endpoint is None:
            endpoint = construct(resolver, operation_model, call_args, request_context)
            service = resolver._service_model.service_id.hyphenize()
            event = f"before-endpoint-resolution.{service}"
            emitter = getattr(resolver._event_emitter, "_emitter", resolver._event_emitter)
            if (
                not operation_model.context_parameters
                and not operation_model.operation_context_parameters
                and not emitter._handlers.prefix_search(event)
            ):
                known[operation_model.name] = endpoint
        return endpoint._replace(headers=dict(endpoint.headers))

    EndpointRulesetResolver.construct_endpoint = construct_endpoint  # type: ignore[method-assign]


def _keep_paginators() -> None:
    """Build the paginator of an operation once for each client."""
    build = BaseClient.get_paginator

    def get_paginator(client: Any, operation_name: str) -> Any:
        known = client.__dict__.setdefault("_paginators", {})
        paginator = known.get(operation_name)
        if paginator is None:
            paginator = known[operation_name] = build(client, operation_name)
        return paginator

    BaseClient.get_paginator = get_paginator  # type: ignore[method-assign]


def _copy_headers_quickly() -> None:
    """Copy headers without the general methods of mappings."""
    initialize = HeadersDict.__init__
    prepare = Endpoint.prepare_request
    lower = parsers.lowercase_dict

    key = lru_cache(_KEPT_NAMES)(_HeaderKey)

    def init(headers: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) == 1 and not kwargs and type(args[0]) in (dict, list):
            pairs = args[0].items() if type(args[0]) is dict else args[0]
            headers._dict = {
                key(name) if len(name) <= _KEPT_NAME_CHARS else _HeaderKey(name): value
                for name, value in pairs
            }
        else:
            initialize(headers, *args, **kwargs)

    def prepare_request(endpoint: Any, request: AWSRequest) -> AWSPreparedRequest:
        preparer = request._request_preparer
        if type(preparer) is not AWSRequest._REQUEST_PREPARER_CLS:
            return prepare(endpoint, request)
        headers = HeadersDict(
            [
                (name, value.encode("utf-8") if isinstance(value, str) else value)
                for name, value in request.headers.items()
            ]
        )
        body = preparer._prepare_body(request)
        if (
            "Transfer-Encoding" not in headers
            and "Content-Length" not in headers
            and request.method not in ("GET", "HEAD", "OPTIONS")
        ):
            length = preparer._determine_content_length(body)
            if length is None:
                return prepare(endpoint, request)
            headers["Content-Length"] = str(length)
        return AWSPreparedRequest(
            request.method, preparer._prepare_url(request), headers, body, request.stream_output
        )

    HeadersDict.__init__ = init  # type: ignore[method-assign]
    HeadersDict.__contains__ = lambda headers, name: _HeaderKey(name) in headers._dict  # type: ignore[method-assign]
    HeadersDict.items = lambda headers: [  # type: ignore[method-assign,assignment]
        (str(name), value) for name, value in headers._dict.items()
    ]

    def lowercase_dict(original: Mapping[str, Any]) -> dict[str, Any]:
        if type(original) is HeadersDict:
            return {name._lower: value for name, value in original._dict.items()}
        return lower(original)

    Endpoint.prepare_request = prepare_request  # type: ignore[method-assign]
    parsers.lowercase_dict = lowercase_dict


def _write_output_at_once() -> None:
    """Write an answer in JSON in few large pieces instead of one for each of its values. The pieces
    are made one by one, because ``--query`` can make a huge answer out of a small one."""
    encoder = json.JSONEncoder(indent=4, default=json_encoder, ensure_ascii=False)

    def format_at_once(self: Any, command_name: str, response: Any, stream: io.TextIOBase) -> None:
        if response == {}:
            return
        parts: list[str] = []
        size = 0
        try:
            for part in encoder.iterencode(response):
                parts.append(part)
                size += len(part)
                if size >= _PIECE_CHARS:
                    piece = "".join(parts)
                    parts = []
                    size = 0
                    stream.write(piece)
        finally:  # after a fault, the original has written what comes before it
            stream.write("".join(parts))
        stream.write("\n")

    formatter.JSONFormatter._format_response = format_at_once
