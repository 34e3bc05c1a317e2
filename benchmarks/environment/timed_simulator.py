"""Zygote of the simulators with timers, which the owner reads under a path of its own.

``command_costs.py`` starts it in place of ``realhf.aws.simulator.ministack_server``.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from stage_timers import COSTS_PATH, StageTimers

from realhf.aws.simulator import account_state, asgi_http, ministack_server

TIMERS = StageTimers()


def install() -> None:
    """Time the stages of a request in this process and its forks."""
    TIMERS.time(asgi_http.HttpConnection, "data_received", "HTTP server and socket")
    TIMERS.time(asgi_http.HttpConnection, "_answer", "HTTP server and socket")
    TIMERS.time(account_state.AccountState, "report", "snapshot")
    TIMERS.time(account_state.ModuleSwitches, "restore", "reset")
    build_owner_app = ministack_server.owner_app

    def owner_app(app: Any, *arguments: Any) -> Any:
        inner = build_owner_app(app, *arguments)

        async def with_costs(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if scope["path"] == COSTS_PATH:
                text = json.dumps([TIMERS.calls, TIMERS.ns])
                await asgi_http._send(send, 200, text)
            else:
                await inner(scope, receive, send)

        return with_costs

    ministack_server.owner_app = owner_app
    load = ministack_server._import_modules

    def import_modules() -> Any:
        threads = load()
        app = importlib.import_module("ministack.app")
        TIMERS.time(app, "app", "MiniStack")
        TIMERS.time(app, "_reset_all_state", "reset")
        return threads

    ministack_server._import_modules = import_modules


if __name__ == "__main__":
    install()
    ministack_server.main()
