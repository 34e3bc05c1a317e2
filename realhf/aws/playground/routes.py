"""Routes of the playground below ``/web``, and the task list of its picker."""

from __future__ import annotations

import asyncio
import json
import mimetypes
import re
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from realhf.aws.episode.episode import LEVELS
from realhf.aws.episode.player import EpisodePlayer, check_action, check_reset
from realhf.aws.grading.reward import HINT_FACTOR
from realhf.aws.messages import HINT_COMMAND
from realhf.aws.playground.playground import Playground, PlaygroundSession, no_episode
from realhf.aws.server_config import AwsServerConfig, simulator_pool
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import fill, load_templates
from realhf.aws.tasks.task import TIERS
from realhf.env.server import wire
from realhf.web.bodies import read_body
from realhf.web.browser_auth import MAX_BODY_BYTES, BrowserAuth, Handler
from realhf.web.refusal import Refusal

BLANK = "…"
_RUN_TIME = re.compile(r"\$\{setup[^}]*\}")
"""Placeholders whose values are known only after the set-up."""


def catalog() -> list[dict[str, Any]]:
    """Return the tasks for the playground's picker, easiest first.

    Each has ``task_id``, ``tier``, ``description`` (with an ellipsis for values that depend on the
    seed or the set-up) and ``held_out``. Template names are left out, because they would reveal the
    solution.
    """
    tasks = []
    for template in load_templates():
        blank = _RUN_TIME.sub(
            BLANK, fill(template.description[0], dict.fromkeys(template.params, BLANK))
        )
        tasks.append(
            {
                "task_id": template.task_id,
                "tier": template.tier,
                "description": blank,
                "held_out": template.split == "heldout",
            }
        )
    return sorted(tasks, key=lambda task: (TIERS.index(task["tier"]), task["task_id"]))


_MAX_SEED = (1 << 53) - 1
"""Largest integer that a browser represents exactly."""


def mount(app: FastAPI, config: AwsServerConfig) -> Playground:
    """Add the playground to an application and return it. Its simulator starts with the first
    episode; call ``close`` on the playground when the server ends."""

    def make_pool() -> MiniStackPool:
        return simulator_pool(config, 1, config.web_ministack_port)

    def make_player(slot: Any) -> EpisodePlayer:
        return EpisodePlayer(
            slot, config.max_steps, reward_mode=config.reward_mode, chaos=config.enable_chaos
        )

    session = PlaygroundSession(make_pool, make_player, summed=config.reward_mode == "potential")
    playground = Playground(session)
    auth = BrowserAuth(config.token, path="/web", cookie="realhf_playground")
    handlers = _Handlers(playground, auth, config)
    for method, path, handler, open_to_all in handlers.table():
        endpoint = auth.guard(_with_wire_errors(handler), open_to_all=open_to_all)
        app.router.routes.append(
            Route(f"/web{path}", endpoint, methods=[method], include_in_schema=False)
        )
    return playground


def _with_wire_errors(handler: Handler) -> Handler:
    """Return a handler that runs ``handler`` and converts its WireError to a Refusal."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except wire.WireError as error:
            status = 422 if error.code == wire.VALIDATION_ERROR else 500
            raise Refusal(status, error.message, code=error.code) from None

    return handle


class _Handlers:
    def __init__(self, playground: Playground, auth: BrowserAuth, config: AwsServerConfig) -> None:
        self._playground = playground
        self._auth = auth
        self._config = config

    def table(self) -> list[tuple[str, str, Handler, bool]]:
        """Return the routes as (method, path below /web, handler, whether it works without a
        login)."""
        page = resources.files("realhf.aws.playground").joinpath("static")
        rows: list[tuple[str, str, Handler, bool]] = [
            ("GET", "", _static(page.joinpath("index.html")), True),
            ("GET", "/session", self.session, True),
            ("POST", "/login", self.login, True),
            ("GET", "/tasks", self.tasks, False),
            ("GET", "/state", self.state, False),
            ("GET", "/log", self.log, False),
            ("POST", "/reset", self.reset, False),
            ("POST", "/step", self.step, False),
            ("POST", "/leave", self.leave, False),
            ("POST", "/away", self.away, False),
        ]
        if self._config.web_solutions:
            rows.append(("GET", "/solution", self.solution, False))
        look = resources.files("realhf.base").joinpath("look")
        files = [*page.iterdir(), *look.iterdir()]
        return rows + [("GET", f"/{file.name}", _static(file), True) for file in files]

    async def session(self, request: Request) -> Response:
        """Return the page's settings, and set a cookie in a new browser.

        If the visitor must log in first, the response says only that.
        """
        known = self._auth.visitor(request)
        if known is None and self._auth.needs_login:
            return JSONResponse({"login": True})
        visitor = known or self._auth.new_visitor()
        response = JSONResponse(
            {
                "login": False,
                "csrf": self._auth.csrf_token(visitor),
                "tiers": TIERS,
                "solutions": self._config.web_solutions,
                "chaos": self._config.enable_chaos,
                "hint": {"command": HINT_COMMAND, "levels": LEVELS, "factor": HINT_FACTOR},
                "max_command_bytes": self._config.max_command_bytes,
            }
        )
        if known is None:
            self._auth.set_cookie(visitor, request, response)
        return response

    async def login(self, request: Request) -> Response:
        """Log in a visitor with the server's token."""
        token = (await _body(request)).get("token")
        if (
            not isinstance(token, str)
            or not self._auth.needs_login
            or not self._auth.accepts_token(token)
        ):
            raise Refusal(401, "this is not the server's token", code="WRONG_TOKEN")
        response = JSONResponse({})
        self._auth.set_cookie(self._auth.new_visitor(), request, response)
        return response

    async def tasks(self, request: Request) -> Response:
        """Return the tasks that can be played."""
        return JSONResponse(await asyncio.to_thread(catalog))

    async def state(self, request: Request) -> Response:
        """Return the state that the visitor's page displays."""
        return JSONResponse(await self._playground.state(self._visitor(request)))

    async def log(self, request: Request) -> Response:
        """Return the episode as a JSON file for download. Raises Refusal 409 if there is no
        episode."""
        log = (await self._playground.state(self._visitor(request)))["log"]
        if log is None:
            raise no_episode()
        name = f"episode-{log['task']['task_id']}-{log['seed']}.json"
        disposition = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(
            json.dumps(log, indent=1), media_type="application/json", headers=disposition
        )

    async def reset(self, request: Request) -> Response:
        """Start an episode."""
        order = check_reset(await _body(request))
        if order.get("tier") not in (None, *TIERS):
            raise wire.WireError(wire.VALIDATION_ERROR, f"tier is none of {', '.join(TIERS)}")
        if not 0 <= (order.get("seed") or 0) <= _MAX_SEED:
            raise wire.WireError(wire.VALIDATION_ERROR, f"seed is not from 0 to {_MAX_SEED}")
        return JSONResponse({"log": await self._playground.reset(self._visitor(request), order)})

    async def step(self, request: Request) -> Response:
        """Run a command of the visitor."""
        action = check_action(await _body(request), self._config.max_command_bytes)
        return JSONResponse(
            {"step": await self._playground.step(self._visitor(request), action["command"])}
        )

    async def solution(self, request: Request) -> Response:
        """Return the next command of the reference solution."""
        return JSONResponse(await self._playground.solution(self._visitor(request)))

    async def leave(self, request: Request) -> Response:
        """End the visitor's episode and free its slot."""
        await self._playground.leave(self._visitor(request))
        return JSONResponse({})

    async def away(self, request: Request) -> Response:
        """Record that the visitor closed the page."""
        await self._playground.away(self._visitor(request))
        return JSONResponse({})

    def _visitor(self, request: Request) -> str:
        visitor = self._auth.visitor(request)
        assert visitor is not None, "a request passed without a cookie"
        return visitor


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await read_body(request.stream(), max_bytes=MAX_BODY_BYTES))
    except (ValueError, RecursionError):
        raise wire.WireError(wire.VALIDATION_ERROR, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise wire.WireError(wire.VALIDATION_ERROR, "the body is not an object")
    return body


def _static(file: Traversable) -> Handler:
    content = file.read_bytes()
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"

    async def serve(request: Request) -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return serve
