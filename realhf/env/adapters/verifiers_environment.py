"""Plays environments of the package ``verifiers``: ``env.path=verifiers env.name=NAME``.

The environment's own code decides who speaks, what tools do, when an episode ends and what it is worth; only its model
is replaced by the policy. Its tasks are the tasks. Source: verifiers 0.4 (``verifiers.v1``).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from realhf.api.config.option import option
from realhf.api.environment import HELD_OUT, SPLITS, EnvironmentDefinition, EnvironmentSpec, Task, TaskSet
from realhf.base.extras import install_command
from realhf.env.adapters.extras import needed
from realhf.env.adapters.verifiers_episode import Stage, VerifiersEnvironment
from realhf.env.adapters.verifiers_harness import offer_harness
from realhf.env.doors.tasks import Row, RowTaskSet, split_rows

EXTRA = "verifiers"
_OLDEST = "0.4"


@dataclass
class VerifiersOptions:
    """An environment of the package ``verifiers``, by the name under which it is installed."""

    needs: ClassVar[str] = "name"

    name: str = option("", "The environment (taskset): a package that is installed, or one that ships with verifiers.")
    args: dict[str, Any] = option({}, "The options of the environment's tasks, such as env.args.game=Hangman-v0.")
    config: dict[str, Any] = option({}, "Further settings of the environment, by the package's own names.")
    most_tasks: int = option(1000, "At most this many tasks are read; some environments have endless ones.", at_least=2)
    heldout_fraction: float = option(
        0.1, "This part of the tasks is held out, decided by a hash of the task.", at_least=0, at_most=0.9
    )
    max_turns: int = option(
        10,
        "The environment ends an episode after this many turns and scores it; keep it below rollout.max_turns.",
        at_least=1,
    )
    success_reward: float = option(1.0, "An episode with at least this reward is a success.")
    sessions: int = option(
        8, "At most this many episodes are played at once by one process.", at_least=1, on_resume="free"
    )
    deterministic: bool = option(
        False, "The same task and turns bring the same answers, so that a lost episode is resumed by replay."
    )


def build(options: VerifiersOptions) -> EnvironmentSpec:
    """Return the specification. Raises ValueError that names the option for a package that is missing, an environment
    that is not installed, settings that it does not take, and an environment that needs more than one model."""
    if not options.name:
        raise ValueError("env.name is missing: the name of a verifiers environment, such as env.name=textarena")
    package = _Package(options)
    package.check()
    return EnvironmentSpec(
        f"verifiers {options.name}",
        lambda _: VerifiersEnvironment(package.stage, package.task, package.context, options.success_reward),
        package.tasks,
        concurrency=options.sessions,
        deterministic=options.deterministic,
    )


class _Package:
    """The environment as the package holds it: its configuration, its tasks, and a stage for each event loop."""

    def __init__(self, options: VerifiersOptions) -> None:
        self._options = options
        self._verifiers = needed("verifiers.v1", EXTRA)
        self._loaders = needed("verifiers.v1.utils.loaders", EXTRA)
        if not hasattr(self._verifiers.Env, "run_episode"):
            raise ValueError(f"env.path={EXTRA} needs verifiers {_OLDEST} or later: {install_command(EXTRA)}")
        self._config = self._configured(self._verifiers, self._loaders, offer_harness(self._verifiers))
        self._stages: WeakKeyDictionary[asyncio.AbstractEventLoop, Stage] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._found: Sequence[Any] | None = None

    def check(self) -> None:
        """Make the environment once. Raises ValueError when that is not possible."""
        self._loaded()

    def stage(self) -> Stage:
        """What the instances of the running event loop share."""
        loop = asyncio.get_running_loop()
        if loop not in self._stages:
            self._stages[loop] = Stage(self._loaded)
        return self._stages[loop]

    def task(self, payload: Mapping[str, Any]) -> Any:
        """The package's task of a payload. Raises EnvironmentFailure through its caller for one that is not there."""
        return self._tasks()[int(payload["index"])]

    def context(self, model: str, url: str, headers: Mapping[str, str], key: str) -> Any:
        """How the package calls the policy."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]

        return ModelContext(model=model, client=EvalClientConfig(base_url=url, headers=dict(headers), api_key_var=key))

    def tasks(self, split: str) -> TaskSet:
        """The tasks of a split; equal ones are on one side. Raises ValueError when there are none."""
        found = self._tasks()
        rows = [
            Row(
                {"index": number, "id": str(task.data.id or task.data.name or number), "key": task.key},
                f"task {number}",
            )
            for number, task in enumerate(found)
        ]
        part = split_rows(rows, self._options.heldout_fraction, lambda values: values["key"])[split]
        if not part:
            other = SPLITS[1 - SPLITS.index(split)]
            raise ValueError(
                f"env.name={self._options.name}: all {len(rows)} tasks are in the split {other!r}; set "
                f"env.heldout_fraction{' above 0' if split == HELD_OUT else ''}, or env.most_tasks"
            )
        group = self._options.name
        return RowTaskSet(
            Task(f"{values['index']}:{values['id'][:60]}", group, {"index": values["index"]}) for values, _ in part
        )

    def _tasks(self) -> Sequence[Any]:
        """The first tasks; read once, by whoever needs them first."""
        with self._lock:
            if self._found is None:
                try:
                    self._found = [*itertools.islice(iter(self._loaded().taskset), self._options.most_tasks)]
                except Exception as error:
                    raised = f"{type(error).__name__}: {_line(error)}"
                    raise ValueError(f"env.name={self._options.name}: reading its tasks raised {raised}") from error
            return self._found

    def _loaded(self) -> Any:
        try:
            return self._loaders.load_environment(self._config)
        except Exception as error:
            raise ValueError(
                f"env.name={self._options.name}: the environment cannot be made: {type(error).__name__}: {_line(error)}"
            ) from error

    def _configured(self, verifiers: ModuleType, loaders: ModuleType, harness: str) -> Any:
        """The environment's configuration with the policy on its only seat."""
        from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]

        options = self._options
        plain = {**options.config, "taskset": {**options.args, "id": options.name}}
        resolve: Callable[[Any], Any] = loaders.resolve_env_config
        try:
            roles = [*agent_config_fields(resolve(plain))]
            if len(roles) != 1:
                raise ValueError(f"it has the roles {', '.join(roles)}; one with a single model can be played")
            own = options.config.get(roles[0], {})
            seat = {
                "runtime": {"type": "subprocess"},
                "max_turns": options.max_turns,
                **own,
                "harness": {"id": harness},
            }
            return resolve({**plain, roles[0]: seat})
        except ModuleNotFoundError as error:
            raise ValueError(f"env.name={options.name}: {_line(error)}") from None
        except Exception as error:
            raise ValueError(f"env.name={options.name}, env.args, env.config: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]


DEFINITION = EnvironmentDefinition(VerifiersOptions, build)
