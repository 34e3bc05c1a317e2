"""Plain commands of an operation: the same parameters and the same output without the CLI's events.

The CLI parses an operation's options, loads and converts their values and calls the operation by
events, of which the plain case needs none. For each operation a ``CommandPlan`` knows its options and
the handlers of these events. It takes commands of exact options with plain values, and leaves all
others (wrong options, documents, the operation's own paging options) to the CLI's own method, which
then begins from the start: until the call, nothing is changed. ``botocore`` means the CLI's own copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import awscli  # noqa: F401  (must be first: makes the name botocore refer to the CLI's own copy)
from awscli import argprocess, arguments, clidriver, paramfile
from awscli.customizations import (
    awslambda,
    dynamodb,
    overridesslcommonname,
    paginate,
    putmetricdata,
    toplevelbool,
)
from awscli.customizations.ec2 import runinstances, secgroupsimplify
from awscli.customizations.ec2.addcount import CountArgument
from awscli.customizations.ec2.paginate import EC2PageSizeInjector
from awscli.utils import is_document_type, resolve_v2_debug_mode

from realhf.aws.cli.handler_lists import KnownEvent
from realhf.aws.cli.word_parser import WordParser

Scoped = Sequence[tuple[str, Any]]
"""Handlers that the CLI registers when it builds an operation's options, as (event, handler)."""


class _PlanOption(NamedTuple):
    """An option of an operation that may have a value."""

    argument: Any
    """The CLI's description."""
    name: str
    """Its name among the parsed values."""
    parameter: str
    """The parameter that takes the value as it stands; "" if it must be loaded and converted."""
    is_idle: bool
    """Whether the option does nothing if it is not given."""


class CommandPlan:
    """What a command of one operation goes through.

    ``parser``: of the operation's options. ``own``: handlers that do nothing for a command without a
    document of parameters.
    """

    def __init__(
        self, operation: Any, parser: Any, scoped: Scoped, client: Any, own: Sequence[Any]
    ) -> None:
        self._operation = operation
        self._client = client
        self._own = tuple(own)
        self._words = WordParser.of(parser)
        emitter = operation._session.get_component("event_emitter")
        place = f"{operation._parent_name}.{operation._name}"

        def event(kind: str) -> KnownEvent:
            return KnownEvent(emitter, f"{kind}.{place}", self._is_idle)

        self._before = event("before-building-argument-table-parser")
        self._parsed = event("operation-args-parsed")
        self._calling = event("calling-command")
        names = [
            emitter._alias_event_name(f"{kind}.{end}")
            for kind in ("operation-args-parsed", "calling-command")
            for end in (place, f"{operation._parent_name}.*")
        ]
        self._tokens: set[str] = set()
        self._checks: list[Any] = []
        self.is_plain = type(operation) is clidriver.ServiceOperation and (
            type(operation._operation_caller) is clidriver.CLIOperationCaller
            and all(self._take_scoped(name, handler, names) for name, handler in scoped)
            and all(type(item) in _KNOWN_ARGUMENTS for item in operation.arg_table.values())
        )
        """Whether commands can be run by this plan."""
        self._options = self._describe_options(emitter)
        self._paging = [
            item.py_name
            for item in operation.arg_table.values()
            if isinstance(item, paginate.PageArgument)
        ]
        model = operation._operation_model
        python_name = clidriver.xform_name(model.name)
        self._api_name = model.name
        self._service = model.service_model.service_name
        self._method = getattr(client, python_name)
        self._python_name = python_name
        self._has_pages = client.can_paginate(python_name)

    def _is_idle(self, handler: Any) -> bool:
        """Return whether a handler does nothing for a plain command."""
        return handler in self._own or handler is overridesslcommonname.update_endpoint_url

    def _take_scoped(self, event: str, handler: Any, names: Sequence[str]) -> bool:
        """Return whether a scoped handler is known, and remember what it does. ``names``: those of
        the operation's events."""
        if type(handler) is not partial or event not in names:
            return False
        if handler.func is paginate.check_should_enable_pagination and handler.args:
            self._tokens |= {token.replace("-", "_") for token in handler.args[0]}
            return True
        if handler.func is toplevelbool.validate_boolean_mutex_groups:
            self._checks.append(handler)
            return True
        # does something with a document only
        return handler.func is paginate.check_should_enable_pagination_call_parameters

    def _describe_options(self, emitter: Any) -> list[_PlanOption]:
        """Return what is known about the options, in their order."""
        model = self._operation._operation_model
        service = model.service_model
        load_event = (
            f"load-cli-arg.{service.endpoint_prefix}."
            f"{clidriver.xform_name(self._operation._name, '-')}"
        )
        convert_event = (
            f"process-cli-arg.{service.service_name}.{clidriver.xform_name(model.name, '-')}"
        )
        converts_shorthand_only = all(
            type(handler) is argprocess.ParamShorthandParser
            for handler in _handlers_of(emitter, convert_event)
        )
        options = []
        for argument in self._operation.arg_table.values():
            loads_files_only = all(
                type(handler) is paramfile.URIArgumentHandler
                for handler in _handlers_of(emitter, f"{load_event}.{argument.name}")
            )
            kind = type(argument)
            is_text = (
                kind is arguments.CLIArgument
                and loads_files_only
                and converts_shorthand_only
                and argument.argument_model.type_name == "string"
                and not argument.argument_model.serialization.get("jsonvalue")
                and not is_document_type(argument.argument_model)
                and not argprocess._supports_shorthand_syntax(argument.argument_model)
            )
            parameter = argument._serialized_name if is_text else ""
            is_idle = kind.add_to_params in _IDLE_WITHOUT_VALUE and loads_files_only
            options.append(_PlanOption(argument, argument.py_name, parameter, is_idle))
        return options

    def read(self, words: Sequence[str], global_options: Any) -> dict[str, Any] | None:
        """Return the parameters of a call, or None if these words are not plain."""
        if (
            not global_options.paginate
            or not global_options.endpoint_url
            or resolve_v2_debug_mode(global_options)
            or self._before.handlers
            or self._parsed.handlers
        ):
            return None
        values = self._words.read(words)
        if values is None or any(values.get(name) is not None for name in self._paging):
            return None
        if any(values.get(name, "") is not None for name in self._tokens):
            return None
        try:
            return self._build_parameters(values, global_options)
        except Exception:  # whatever it is, the CLI's own method raises it in its own way
            return None

    def _build_parameters(
        self, values: Mapping[str, Any], global_options: Any
    ) -> dict[str, Any] | None:
        """Return the parameters of a call, or None if a handler is unknown. Raises what is wrong
        with them."""
        namespace = None
        if self._checks:
            namespace = argparse.Namespace(**values)
            for check in self._checks:
                check(parsed_args=namespace)
        parameters: dict[str, Any] = {}
        for argument, name, parameter, is_idle in self._options:
            if name not in values:
                continue
            value = values[name]
            if value is None and is_idle:
                continue
            if parameter and type(value) is str and not value.startswith(_FILE_PREFIXES):
                parameters[parameter] = value
            else:
                value = self._operation._unpack_arg(argument, value, global_options)
                argument.add_to_params(parameters, value)
        for handler in self._calling.handlers:
            if getattr(handler, "__func__", None) not in _KNOWN_CALLING:
                return None
        return parameters

    def invoke(self, parameters: dict[str, Any], global_options: Any) -> int:
        """Call the operation and write its answer; return the exit code."""
        operation = self._operation
        method = self._method
        client = self._client
        if self._calling.handlers:
            self._calling.emit(
                call_parameters=parameters, parsed_args=None, parsed_globals=global_options
            )
            client = operation._session.create_client(  # with the handlers registered just now
                self._service,
                region_name=global_options.region,
                endpoint_url=global_options.endpoint_url,
                verify=global_options.verify_ssl,
            )
            method = getattr(client, self._python_name)
        if self._has_pages:
            answer = client.get_paginator(self._python_name).paginate(**parameters)
        else:
            answer = method(**parameters)
        operation._operation_caller._display_response(self._api_name, answer, global_options)
        return 0


def _handlers_of(emitter: Any, event: str) -> Sequence[Any]:
    """Return all handlers of an event."""
    return KnownEvent(emitter, event, lambda handler: False).handlers


_KNOWN_ARGUMENTS = frozenset(
    {
        arguments.CLIArgument,
        arguments.ListArgument,
        arguments.BooleanArgument,
        paginate.PageArgument,
        toplevelbool.PositiveBooleanArgument,
        toplevelbool.NegativeBooleanParameter,
        putmetricdata.PutMetricArgument,
        awslambda.ZipFileArgument,
        awslambda.ReplacedZipFileArgument,
        CountArgument,
        runinstances.SecondaryPrivateIpAddressesArgument,
        runinstances.SecondaryPrivateIpAddressCountArgument,
        runinstances.AssociatePublicIpAddressArgument,
        runinstances.NoAssociatePublicIpAddressArgument,
        secgroupsimplify.ProtocolArgument,
        secgroupsimplify.PortArgument,
        secgroupsimplify.CidrArgument,
        secgroupsimplify.SourceGroupArgument,
        secgroupsimplify.GroupOwnerArgument,
    }
)
"""Kinds of arguments that change nothing but the parameters. Others may register handlers of the
client's events, which a plan would not call."""
_IDLE_WITHOUT_VALUE = (
    arguments.CLIArgument.add_to_params,
    arguments.BooleanArgument.add_to_params,
    paginate.PageArgument.add_to_params,
)
"""Methods of arguments that do nothing without a value."""
_KNOWN_CALLING = (
    dynamodb.DynamoDBPaginatorFix._maybe_register_pagination_fix,
    EC2PageSizeInjector.inject,
)
"""Handlers before a call that read nothing but its parameters and whether it has pages, and that
answer None."""
_FILE_PREFIXES = tuple({*paramfile.LOCAL_PREFIX_MAP, *paramfile.REMOTE_PREFIX_MAP})
"""Beginnings of values that are read from files or URLs."""


def install(has_document: Callable[[], bool]) -> None:
    """Run commands by plans if there are any. ``has_document``: whether the present command has a
    document of parameters."""
    run_generally = clidriver.ServiceOperation.__call__

    def run(operation: Any, args: Sequence[str], parsed_globals: Any) -> Any:
        plan = operation.__dict__.get("_plan")
        if plan is not None and plan.is_plain and not has_document():
            parameters = plan.read(args, parsed_globals)
            if parameters is not None:
                return plan.invoke(parameters, parsed_globals)
        return run_generally(operation, args, parsed_globals)

    clidriver.ServiceOperation.__call__ = run  # type: ignore[method-assign]
