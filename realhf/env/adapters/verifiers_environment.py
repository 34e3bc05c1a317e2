"""Environments of the package ``verifiers``: ``env.path=verifiers env.name=NAME``.

The environment's own code decides whose turn it is, what tools do, when an episode ends and what
its reward is; only its model is replaced by the policy. The tasks are those of the environment.

An environment of the package starts services that its episodes share (an interception server, tool
servers). They are started once per event loop, in a separate task, and stopped when the last
instance is closed. Source: verifiers 0.4 (``verifiers.v1``).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from realhf.api.environment import (
    HELD_OUT,
    SPLITS,
    AssistantMessage,
    EnvironmentDefinition,
    EnvironmentFailure,
    EnvironmentSpec,
    Opening,
    Task,
    TaskSet,
    Turn,
    is_finite,
)
from realhf.api.option import option
from realhf.base.installation import import_extra, install_command
from realhf.env.adapters.policy_endpoint import (
    SECRET_HEADER,
    ModelCall,
    ModelConversation,
    PolicyEndpoint,
    Unplayable,
)
from realhf.env.loader.tasks import Row, RowTaskSet, split_rows

HARNESS = "realhf_policy_harness"
"""Module name under which the package imports the harness."""
_MAX_RESULT_CHARS = 1 << 18
"""Maximum number of characters of a tool's result that the policy reads."""
_CONNECT_S = 60.0
"""Timeout in seconds of connecting to the tool servers."""


def offer_harness(verifiers: ModuleType) -> str:
    """Register the harness as a module that the package can import; return the name of the
    module."""
    if HARNESS not in sys.modules:
        module = ModuleType(HARNESS, "The harness of realhf's policy.")
        module.__dict__.update(
            {"PolicyHarness": _harness_class(verifiers), "__all__": ["PolicyHarness"]}
        )
        sys.modules[HARNESS] = module
    return HARNESS


def _harness_class(verifiers: ModuleType) -> type[Any]:
    """Return the harness class, which can be created only if the package is installed."""

    class PolicyHarness(verifiers.Harness[verifiers.HarnessConfig]):  # type: ignore[name-defined]
        """Harness of the package that lets the policy talk until it answers without a tool call."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            """Run one segment of the conversation; see the package."""
            del trace, runtime
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            messages += _to_chat_messages(prompt)
            from verifiers.v1.runtimes import ProgramResult  # pyright: ignore[reportMissingImports]

            problem = await _talk(
                ctx.model, f"{endpoint}/chat/completions", secret, mcp_urls, messages
            )
            return ProgramResult(exit_code=1 if problem else 0, stdout="", stderr=problem)

    return PolicyHarness


def _to_chat_messages(prompt: Any) -> list[dict[str, Any]]:
    """Return a prompt of the package as messages of the chat API."""
    from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]

    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [message_to_wire(message) for message in prompt or []]


async def _talk(
    model: str, url: str, secret: str, mcp_urls: Mapping[str, str], messages: list[dict[str, Any]]
) -> str:
    """Continue the conversation until the model answers without a tool call. Return "", or the
    reason why a model call failed."""
    import httpx
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # pyright: ignore[reportMissingImports]

    async with AsyncExitStack() as stack:
        tools = []
        dispatch = {}
        servers = {}
        if mcp_urls:
            config = {"mcpServers": {name: {"url": address} for name, address in mcp_urls.items()}}
            async with asyncio.timeout(_CONNECT_S):
                tools, dispatch, servers = await connect_mcp(config, stack, set())
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
        while True:
            body = {"model": model, "messages": messages} | ({"tools": tools} if tools else {})
            answer = await client.post(
                url, headers={"Authorization": f"Bearer {secret}"}, json=body
            )
            if answer.status_code != 200:
                return f"HTTP {answer.status_code}: {answer.text[:2000]}"
            message = answer.json()["choices"][0]["message"]
            messages.append({key: value for key, value in message.items() if value is not None})
            calls = message.get("tool_calls") or []
            if not calls:
                return ""
            for call in calls:
                name = call["function"]["name"]
                arguments = _parse_arguments(call["function"]["arguments"])
                if isinstance(arguments, str):
                    content = f"error: {arguments}"
                elif name in dispatch:
                    content = await call_mcp(servers, dispatch, name, arguments)
                else:
                    content = (
                        f"error: unknown tool {name[:60]!r} (known: "
                        f"{', '.join(dispatch) or 'none'})"
                    )
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": call["id"],
                        "name": name,
                        "content": _shorten(content),
                    }
                )


def _parse_arguments(text: str) -> dict[str, Any] | str:
    """Return the arguments of a call, or a string that says why they are invalid."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        return f"the arguments are not JSON ({error})"
    return arguments if isinstance(arguments, dict) else "the arguments must be an object"


def _shorten(content: Any) -> Any:
    """Return a result shortened to ``_MAX_RESULT_CHARS`` characters."""
    if isinstance(content, str) and len(content) > _MAX_RESULT_CHARS:
        return (
            f"{content[:_MAX_RESULT_CHARS]}... ({len(content) - _MAX_RESULT_CHARS} more characters)"
        )
    return content


_STOP_S = 2.0
"""Timeout in seconds of stopping an environment or an episode."""
_SOLVED = 1e-9
"""Tolerance when a reward is compared with ``success_reward``."""
_log = logging.getLogger(__name__)
_KEY_VARIABLE = "REALHF_POLICY_HAS_NO_KEY"
"""Name of the environment variable from which the package reads the API key; the endpoint does not
need a key."""


class Serving:
    """A running environment of the package and the endpoint that it calls, until ``stop`` is
    called. ``users``: number of instances that use it."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self.endpoint = PolicyEndpoint()
        self.env: Any = None
        self.users = 0
        self._load = load
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._serve())

    async def ready(self) -> None:
        """Wait until the environment is ready to play. Raises EnvironmentFailure if it does not
        start."""
        await asyncio.shield(self._ready)

    async def stop(self) -> None:
        """Stop the environment, within seconds."""
        self._stop.set()
        await asyncio.wait([self._task], timeout=_STOP_S)

    async def _serve(self) -> None:
        """Enter and leave the package's contexts in one task, as they require."""
        try:
            self.env = await asyncio.to_thread(self._load)
            await self.endpoint.start()
            async with self.env.serving():
                if not self._ready.done():
                    self._ready.set_result(None)
                await self._stop.wait()
        except Exception as error:
            if self._ready.done():
                _log.warning("a verifiers environment ended badly: %s", _describe_error(error))
            else:
                self._ready.set_exception(
                    EnvironmentFailure("internal", f"it does not start: {_describe_error(error)}")
                )
        finally:
            await self.endpoint.stop()
            if not self._ready.done():
                self._ready.cancel()


class Stage:
    """Owner of the running environment that all instances on one event loop share. ``load`` returns
    the package's environment, and may block."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._now: Serving | None = None

    async def enter(self) -> Serving:
        """Return the running environment, starting it if necessary; each user must call ``leave``
        later. Raises EnvironmentFailure."""
        if self._now is None:
            self._now = Serving(self._load)
        serving = self._now
        serving.users += 1
        try:
            await serving.ready()
        except BaseException:
            await self.leave(serving)
            raise
        return serving

    async def leave(self, serving: Serving) -> None:
        """End one user's use of the running environment; it is stopped after its last user."""
        serving.users -= 1
        if serving.users == 0:
            if self._now is serving:
                self._now = None
            await serving.stop()


class VerifiersEnvironment:
    """Environment that plays one episode after another on a running environment of the package.

    stage_of: returns the ``Stage`` of the running event loop. task_of: returns the package's task
    for a payload, and may block. context: makes the package's model context from (model name,
    endpoint URL, headers, name of the variable with the API key).
    """

    def __init__(
        self,
        stage_of: Callable[[], Stage],
        task_of: Callable[[Mapping[str, Any]], Any],
        context: Callable[[str, str, Mapping[str, str], str], Any],
        success_reward: float,
    ) -> None:
        self._stage_of = stage_of
        self._task_of = task_of
        self._context = context
        self._success_reward = success_reward
        self._stage: Stage | None = None
        self._serving: Serving | None = None
        self._run: asyncio.Task[Any] | None = None
        self._conversation = ModelConversation()
        self._call: ModelCall | None = None
        self._ended: Turn | None = None

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode of the package's task that the payload names; the seed has no effect.
        Raises EnvironmentFailure."""
        del seed
        await self._abandon()
        if self._serving is None:
            self._stage = self._stage_of()
            self._serving = await self._stage.enter()
        package_task = await asyncio.to_thread(self._task_of, task)
        self._conversation = ModelConversation()
        self._ended = None
        self._run = asyncio.create_task(self._play(self._serving, package_task, self._conversation))
        await self._wait_for_call()
        if self._call is None:
            raise EnvironmentFailure(
                "internal", "the episode ended before its first call of the model"
            )
        return Opening(self._new_messages(self._call), self._call.tools)

    async def step(self, message: AssistantMessage) -> Turn:
        """Answer the waiting model call with the policy's turn, and return the environment's next
        messages. Raises EnvironmentFailure."""
        if self._call is None:
            if self._ended is not None:
                return self._ended
            raise EnvironmentFailure("lost", "there is no episode: reset comes first")
        self._conversation.answer_call(self._call, message)
        self._call = None
        await self._wait_for_call()
        if self._call is not None:
            return Turn(self._new_messages(self._call))
        assert self._run is not None
        self._ended = self._build_final_turn(self._run.result())
        return self._ended

    async def close(self) -> None:
        """End the episode. If this is the last instance, also stop the services that the instances
        share."""
        await self._abandon()
        serving = self._serving
        self._serving = None
        if serving is not None and self._stage is not None:
            await self._stage.leave(serving)

    async def _play(self, serving: Serving, task: Any, conversation: ModelConversation) -> Any:
        """Let the package play an episode; return the package's record of it."""
        name = serving.endpoint.add(conversation)
        try:
            headers = {SECRET_HEADER: serving.endpoint.secret}
            return await serving.env.run_episode(
                task, self._context(name, serving.endpoint.url, headers, _KEY_VARIABLE)
            )
        finally:
            serving.endpoint.remove(name)

    async def _wait_for_call(self) -> None:
        """Wait for the next model call or for the end of the episode. There is no timeout, because
        the caller has a deadline and cancels. Raises EnvironmentFailure if the environment's code
        raised an error."""
        assert self._run is not None
        next_call = asyncio.create_task(self._conversation.calls.get())
        try:
            await asyncio.wait({next_call, self._run}, return_when=asyncio.FIRST_COMPLETED)
            if next_call.done():
                self._call = next_call.result()
            elif not self._run.cancelled() and (error := self._run.exception()) is not None:
                raise EnvironmentFailure(
                    "internal", f"its code raised {_describe_error(error)}"
                ) from error
        finally:
            next_call.cancel()

    async def _abandon(self) -> None:
        """Cancel the episode and forget its state."""
        run = self._run
        self._run = None
        self._call = None
        self._ended = None
        if run is not None and not run.done():
            run.cancel()
            await asyncio.wait([run], timeout=_STOP_S)
        if run is not None and run.done():
            with contextlib.suppress(asyncio.CancelledError, Exception):
                run.result()

    def _new_messages(self, call: ModelCall) -> Any:
        """Return the messages of a call that are new to the policy. Raises EnvironmentFailure."""
        try:
            return self._conversation.new_messages(call)
        except Unplayable as error:
            raise EnvironmentFailure(
                "internal", f"this environment cannot be played in turns: {error}"
            ) from None

    def _build_final_turn(self, episode: Any) -> Turn:
        """Return the turn that ends an episode, with its named rewards and metrics. Raises
        EnvironmentFailure if the package reports that the episode failed."""
        problems = [f"{error.type}: {error.message}" for error in episode.errors]
        problems += [
            f"{trace.last_error.type}: {trace.last_error.message}"
            for trace in episode.traces
            if not trace.ok
        ]
        if not episode.ok:
            raise EnvironmentFailure("internal", "; ".join(problems)[:2000] or "the episode failed")
        if len(episode.traces) != 1:
            raise EnvironmentFailure(
                "internal", f"the episode has {len(episode.traces)} agents, not one"
            )
        trace = episode.traces[0]
        rewards = {
            name: _finite(name, reward.value)
            for name, reward in trace.rewards.items()
            if reward is not None
        }
        metrics = {
            name: _finite(name, value) for name, value in trace.metrics.items() if value is not None
        }
        reward = math.fsum(rewards.values())
        metrics["success"] = float(reward >= self._success_reward - _SOLVED)
        return Turn(
            (),
            True,
            reward,
            rewards,
            metrics,
            {"ended_by": str(trace.stop_condition or "")},
            final=True,
        )


def _finite(name: str, value: Any) -> float:
    """Return ``value`` as a float. Raises EnvironmentFailure if it is not finite in fp32."""
    number = float(value)
    if not is_finite(number):
        raise EnvironmentFailure("internal", f"{name} is {number}, not a finite number in fp32")
    return number


def _describe_error(error: BaseException) -> str:
    """Return a short description of an error."""
    return f"{type(error).__name__}: {error}"[:2000]


EXTRA = "verifiers"
"""Name of the extra of this package that installs verifiers."""
_OLDEST_VERSION = "0.4"
"""Oldest version of verifiers that is supported."""


@dataclass
class VerifiersOptions:
    """An environment of the package ``verifiers``, by the name under which it is installed."""

    needs: ClassVar[str] = "name"

    name: str = option(
        "",
        "The environment (taskset): a package that is installed, or one that ships with verifiers.",
    )
    args: dict[str, Any] = option(
        {}, "The options of the environment's tasks, such as env.args.game=Hangman-v0."
    )
    config: dict[str, Any] = option(
        {}, "Further settings of the environment, by the package's own names."
    )
    most_tasks: int = option(
        1000, "At most this many tasks are read; some environments have endless ones.", at_least=2
    )
    heldout_fraction: float = option(
        0.1,
        "This part of the tasks is held out, decided by a hash of the task.",
        at_least=0,
        at_most=0.9,
    )
    max_turns: int = option(
        10,
        "The environment ends an episode after this many turns and scores it; at most "
        "rollout.max_turns.",
        at_least=1,
    )
    success_reward: float = option(1.0, "An episode with at least this reward is a success.")
    sessions: int = option(
        8,
        "At most this many episodes are played at once by one process.",
        at_least=1,
        on_resume="free",
    )
    deterministic: bool = option(
        False,
        "The same task and turns bring the same answers, so that a lost episode is resumed by "
        "replay.",
    )


def build(options: VerifiersOptions) -> EnvironmentSpec:
    """Return the specification.

    Raises ValueError that names the option for a package that is missing, an environment that is
    not installed, settings that it does not take, and an environment that needs more than one
    model.
    """
    if not options.name:
        raise ValueError(
            "env.name is missing: the name of a verifiers environment, such as env.name=textarena"
        )
    package = _Package(options)
    package.check()
    return EnvironmentSpec(
        f"verifiers {options.name}",
        lambda _: VerifiersEnvironment(
            package.stage, package.task, package.context, options.success_reward
        ),
        package.tasks,
        concurrency=options.sessions,
        deterministic=options.deterministic,
        max_turns=package.max_turns,
    )


class _Package:
    """One environment of the package: its configuration, its tasks, and a ``Stage`` for each event
    loop. An episode ends after ``max_turns`` turns; 0 for no limit."""

    def __init__(self, options: VerifiersOptions) -> None:
        self._options = options
        self._verifiers = import_extra("verifiers.v1", EXTRA)
        self._loaders = import_extra("verifiers.v1.utils.loaders", EXTRA)
        if not hasattr(self._verifiers.Env, "run_episode"):
            raise ValueError(
                f"env.path={EXTRA} needs verifiers {_OLDEST_VERSION} or later: "
                f"{install_command(EXTRA)}"
            )
        self.max_turns = 0
        self._config = self._build_config(
            self._verifiers, self._loaders, offer_harness(self._verifiers)
        )
        self._stages: WeakKeyDictionary[asyncio.AbstractEventLoop, Stage] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._all_tasks: Sequence[Any] | None = None

    def check(self) -> None:
        """Create the environment once. Raises ValueError if that fails."""
        self._load_environment()

    def stage(self) -> Stage:
        """Return the ``Stage`` of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._stages:
            self._stages[loop] = Stage(self._load_environment)
        return self._stages[loop]

    def task(self, payload: Mapping[str, Any]) -> Any:
        """Return the package's task for a payload; may block. Raises an error for an unknown index,
        which the caller converts to EnvironmentFailure."""
        return self._read_tasks()[int(payload["index"])]

    def context(self, model: str, url: str, headers: Mapping[str, str], key: str) -> Any:
        """Return the package's model context, by which it calls the policy."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]

        return ModelContext(
            model=model,
            client=EvalClientConfig(base_url=url, headers=dict(headers), api_key_var=key),
        )

    def tasks(self, split: str) -> TaskSet:
        """Return the tasks of a split; equal tasks are in the same split. Raises ValueError if the
        split is empty."""
        all_tasks = self._read_tasks()
        rows = [
            Row(
                {
                    "index": number,
                    "id": str(task.data.id or task.data.name or number),
                    "key": task.key,
                },
                f"task {number}",
            )
            for number, task in enumerate(all_tasks)
        ]
        part = split_rows(rows, self._options.heldout_fraction, lambda values: values["key"])[split]
        if not part:
            other_split = SPLITS[1 - SPLITS.index(split)]
            raise ValueError(
                f"env.name={self._options.name}: all {len(rows)} tasks are in the split "
                f"{other_split!r}; set "
                f"env.heldout_fraction{' above 0' if split == HELD_OUT else ''}, or env.most_tasks"
            )
        group = self._options.name
        return RowTaskSet(
            Task(f"{values['index']}:{values['id'][:60]}", group, {"index": values["index"]})
            for values, _ in part
        )

    def _read_tasks(self) -> Sequence[Any]:
        """Return the first ``most_tasks`` tasks; they are read once, at the first call. Raises
        ValueError."""
        with self._lock:
            if self._all_tasks is None:
                try:
                    self._all_tasks = [
                        *itertools.islice(
                            iter(self._load_environment().taskset), self._options.most_tasks
                        )
                    ]
                except Exception as error:
                    problem = f"{type(error).__name__}: {_one_line(error)}"
                    raise ValueError(
                        f"env.name={self._options.name}: reading its tasks raised {problem}"
                    ) from error
            return self._all_tasks

    def _load_environment(self) -> Any:
        """Return a new environment of the package. Raises ValueError that names the option."""
        try:
            return self._loaders.load_environment(self._config)
        except Exception as error:
            raise ValueError(
                f"env.name={self._options.name}: the environment cannot be made: "
                f"{type(error).__name__}: {_one_line(error)}"
            ) from error

    def _build_config(self, verifiers: ModuleType, loaders: ModuleType, harness: str) -> Any:
        """Return the environment's configuration, with the policy in its only role. Raises
        ValueError."""
        from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]

        options = self._options
        plain = {**options.config, "taskset": {**options.args, "id": options.name}}
        resolve: Callable[[Any], Any] = loaders.resolve_env_config
        try:
            roles = [*agent_config_fields(resolve(plain))]
            if len(roles) != 1:
                raise ValueError(
                    f"it has the roles {', '.join(roles)}; one with a single model can be played"
                )
            role_config = options.config.get(roles[0], {})
            role = {
                "runtime": {"type": "subprocess"},
                "max_turns": options.max_turns,
                **role_config,
                "harness": {"id": harness},
            }
            self.max_turns = int(role["max_turns"] or 0)
            return resolve({**plain, roles[0]: role})
        except ModuleNotFoundError as error:
            raise ValueError(f"env.name={options.name}: {_one_line(error)}") from None
        except Exception as error:
            raise ValueError(
                f"env.name={options.name}, env.args, env.config: {_one_line(error)}"
            ) from None


def _one_line(error: BaseException) -> str:
    """Return an error's text as one line, shortened."""
    return " ".join(str(error).split())[:600]


DEFINITION = EnvironmentDefinition(VerifiersOptions, build)
