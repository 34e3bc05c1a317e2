"""Zygote of the CLI workers with timers: each reply of a worker tells its CPU time by stage.

``command_costs.py`` starts it in place of ``realhf.aws.cli.zygote``.
"""

from __future__ import annotations

import os
import time
from typing import Any

import awscli  # noqa: F401  (must be first: makes the name botocore refer to the CLI's own copy)
from awscli import argparser, clidriver, formatter
from botocore import client, endpoint, parsers
from stage_timers import StageTimers

from realhf.aws.cli import pinned_http, plain_calls, plain_commands, warm_cli, worker, zygote

TIMERS = StageTimers()


def install() -> None:
    """Time the stages of a command in this process and its forks, after everything was loaded."""
    for parser in ("MainArgParser", "ServiceArgParser", "ArgTableArgParser"):
        TIMERS.time(getattr(argparser, parser), "parse_known_args", "CLI: parse words")
    TIMERS.time(clidriver.ServiceOperation, "_build_call_parameters", "CLI: parse words")
    TIMERS.time(plain_commands.CommandPlan, "read", "CLI: parse words")
    TIMERS.time(client.BaseClient, "_make_api_call", "botocore: call")
    TIMERS.time(plain_calls.CallPlan, "_build_request", "botocore: serialise and sign")
    TIMERS.time(plain_calls.CallPlan, "_header_fields", "botocore: serialise and sign")
    TIMERS.time(client.BaseClient, "_convert_to_request_dict", "botocore: serialise and sign")
    TIMERS.time(client.BaseClient, "_emit_api_params", "botocore: serialise and sign")
    TIMERS.time(client.BaseClient, "_resolve_endpoint_ruleset", "botocore: serialise and sign")
    TIMERS.time(endpoint.Endpoint, "create_request", "botocore: serialise and sign")
    TIMERS.time(parsers.ResponseParser, "parse", "botocore: parse the answer")
    for name in ("send", "encode", "exchange"):
        TIMERS.time(pinned_http.PinnedConnection, name, "HTTP client and socket")
    for name in ("JSONFormatter", "TextFormatter", "TableFormatter"):
        TIMERS.time(getattr(formatter, name), "_format_response", "CLI: write the output")
    TIMERS.time(worker, "read_frame", "frames, JSON and socket")
    TIMERS.time(worker, "encode_frame", "frames, JSON and socket")
    TIMERS.time(warm_cli.WarmCli, "run", "CLI: driver and events")
    answer = worker.CliWorker._answer

    def answer_with_costs(self: Any, *arguments: Any) -> dict[str, Any]:
        reply = answer(self, *arguments)
        return {**reply, "costs": [os.getpid(), time.thread_time_ns(), TIMERS.calls, TIMERS.ns]}

    worker.CliWorker._answer = answer_with_costs  # type: ignore[method-assign]


if __name__ == "__main__":
    preload = warm_cli.WarmCli.preload

    def preload_and_install(self: Any, operations: Any) -> None:
        """Install the timers once the driver has installed what is its own."""
        preload(self, operations)
        install()

    warm_cli.WarmCli.preload = preload_and_install  # type: ignore[method-assign]
    zygote.main()
