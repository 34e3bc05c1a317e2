"""Mixtures: several environments that a run plays as one (``env.mix``).

A mixture is an environment like any other. Its task set holds the tasks of all its environments,
and an instance plays each task in the environment that the task belongs to. So the programs that
play episodes need no knowledge of mixtures; only the source of the training tasks
(``realhf.env.mixture_source``) does, because it draws by shares.

The reference of a mixture is the list of its environments' references: ``[sql,mine.py:Mine]``.
Each environment has a *name* in the mixture, by which options, groups of tasks and metrics refer to
it: ``sql`` and ``Mine``. ``[easy=countdown,hard=countdown]`` gives the names itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import partial
from keyword import iskeyword
from typing import Any

from realhf.api.environment import (
    AssistantMessage,
    Demonstration,
    DemonstrationRequest,
    Environment,
    EnvironmentDefinition,
    EnvironmentFailure,
    EnvironmentPart,
    EnvironmentService,
    EnvironmentSpec,
    Opening,
    Task,
    TaskLimits,
    TaskRemark,
    TaskSet,
    Turn,
)
from realhf.api.option import option, section
from realhf.env.loader.reference import absolute_environment, name_environment
from realhf.env.loader.tasks import ONE_GROUP

_OVERALL = "overall"
"""Name under which metrics and evaluations report all environments together."""
ENVIRONMENT_KEY = "environment"
"""Key of the environment's name in the payload of a mixture's task."""
TASK_KEY = "task"
"""Key of the environment's own payload in the payload of a mixture's task."""


def mixture_reference(members: Sequence[str]) -> str:
    """Return the reference of the mixture of these environments, with absolute file paths. Each is
    a reference, or ``NAME=REFERENCE``."""
    parts = [_split_member(text.strip()) for text in members]
    texts = [(name, absolute_environment(reference)) for name, reference in parts]
    return "[{}]".format(",".join(f"{name}={text}" if name else text for name, text in texts))


def split_mixture(reference: str) -> tuple[str, ...]:
    """Return the environments of a mixture as ``mixture_reference`` takes them; () for any other
    reference."""
    if not (reference.startswith("[") and reference.endswith("]")):
        return ()
    return tuple(text.strip() for text in reference[1:-1].split(",") if text.strip())


def name_members(members: Sequence[str]) -> dict[str, str]:
    """Return the references of a mixture's environments by their names.

    ``members``: see ``mixture_reference``. An environment of one's own that is given no name has
    the last part of its reference: ``Mine`` for ``mine.py:Mine``, ``mine`` for ``mine.py``,
    ``tasks`` for ``harbor:tasks``. Raises ValueError for fewer than two environments, for a
    repeated name, and for a name that cannot be part of an option's name.
    """
    named: dict[str, str] = {}
    for text in members:
        name, reference = _split_member(text)
        name = name or name_environment(reference)
        if not name.isidentifier() or iskeyword(name) or name == _OVERALL:
            raise ValueError(
                f"{reference}: {name!r} cannot be its name in the mixture, where options and "
                f"metrics refer to it; give it one of letters, digits and '_': NAME={reference}"
            )
        if name in named:
            raise ValueError(
                f"two environments are called {name!r}; env.weights sets shares, and "
                f"NAME={reference} gives one of them another name"
            )
        named[name] = reference
    if len(named) < 2:
        raise ValueError("a mixture needs at least two environments; env=NAME chooses a single one")
    return named


def _split_member(text: str) -> tuple[str, str]:
    """Return (name, reference) of ``NAME=REFERENCE``; the name is "" if there is none."""
    name, equals, reference = text.partition("=")
    return (
        (name.strip(), reference.strip()) if equals and name.strip().isidentifier() else ("", text)
    )


@dataclass
class PartLimits:
    """Limits of the episodes of one environment of a mixture."""

    max_turns: int | None = option(
        None,
        "Maximum number of turns per episode of this environment; null means rollout.max_turns, "
        "which is the upper bound.",
        at_least=1,
    )
    max_total_tokens: int | None = option(
        None,
        "Maximum number of tokens per episode of this environment, prompt included; null means "
        "rollout.max_total_tokens, which is the upper bound.",
        at_least=1,
    )
    max_new_tokens: int | None = option(
        None,
        "Maximum number of tokens per turn of this environment; null means gen.max_new_tokens, "
        "which is the upper bound.",
        at_least=1,
    )


_MIX = (
    "Environments that the run plays together: registered names, or FILE.py:Name for your own. "
    "NAME=... gives one another name in the mixture."
)


@dataclass
class MixtureOptions:
    """A mixture of environments (env.mix), its shares and limits. The own options of each
    environment stand under env.of.NAME."""

    mix: list[str] = option(
        [],
        "Environments that the run plays: registered names, or FILE.py:Name for your own.",
    )
    weights: list[float] = option(
        [],
        "Weights of the environments of env.mix, in their order: the share of a weight in the sum "
        "is the share of the groups of rollouts. Empty means equal shares.",
        above=0,
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield an error for a number of weights other than that of the environments, and for a
        list of environments that was set where it can no longer choose them."""
        if self.weights and len(self.weights) != len(self.mix):
            yield (
                f"{name}.weights={[*self.weights]}: give one weight for each of the "
                f"{len(self.mix)} environments of {name}.mix={[*self.mix]}"
            )
        chosen = getattr(self, "path", "")
        if chosen and mixture_reference(self.mix) != chosen:
            yield (
                f"{name}.mix={[*self.mix]}: set it in the experiment's file or on the command "
                f"line; no other choice (model=, scheduler=) can make this one"
            )


def define_mixture(
    members: Sequence[str], definitions: Mapping[str, EnvironmentDefinition]
) -> EnvironmentDefinition:
    """Return the definition of a mixture. Its options are ``MixtureOptions`` with two more
    sections: ``limits`` (``PartLimits`` by name) and ``of`` (each environment's options by name).

    Args:
        members: The environments, as ``mixture_reference`` takes them.
        definitions: Their definitions by name, in the same order.
    """
    limits = _make_section(
        "Limits of the episodes by environment.", dict.fromkeys(definitions, PartLimits)
    )
    own = _make_section(
        "Options of the environments by name.",
        {name: definition.options for name, definition in definitions.items()},
    )
    kind = make_dataclass(
        MixtureOptions.__name__,
        [
            ("mix", list[str], option([*members], _MIX)),
            ("limits", limits, section(limits)),
            ("of", own, section(own)),
        ],
        bases=(MixtureOptions,),
    )
    kind.__module__ = __name__
    kind.__doc__ = MixtureOptions.__doc__
    return EnvironmentDefinition(kind, partial(_build_mixture, definitions))


def _make_section(about: str, kinds: Mapping[str, type[Any]]) -> type[Any]:
    """Return a dataclass with a section of each kind, by name."""
    kind = make_dataclass("Parts", [(name, each, section(each)) for name, each in kinds.items()])
    kind.__module__ = __name__
    kind.__doc__ = about
    return kind


def _build_mixture(
    definitions: Mapping[str, EnvironmentDefinition], options: Any
) -> EnvironmentSpec:
    """Return the specification of a mixture. Raises ValueError for invalid options, and if several
    environments need a server of their own."""
    for problem in MixtureOptions(options.mix, options.weights).problems("env"):
        raise ValueError(problem)
    weights = [*options.weights] or [1.0] * len(definitions)
    parts = {}
    names = {name: OptionNames.of(name, each.options) for name, each in definitions.items()}
    for (name, definition), weight in zip(definitions.items(), weights, strict=True):
        try:
            spec = definition.build(getattr(options.of, name))
        except ValueError as error:
            raise ValueError(names[name].rename(str(error), required=True)) from error
        limits = getattr(options.limits, name)
        parts[name] = EnvironmentPart(
            spec,
            weight / sum(weights),
            TaskLimits(
                limits.max_turns or 0, limits.max_total_tokens or 0, limits.max_new_tokens or 0
            ),
        )
    return mix_environments(parts, names)


@dataclass(frozen=True)
class OptionNames:
    """The names that the options of one environment have in the mixture."""

    name: str
    """The environment's name in the mixture."""
    pattern: re.Pattern[str] | None = None
    """What stands before each of its options in a text of its own; None if it has no options."""

    @classmethod
    def of(cls, name: str, options: type[Any]) -> OptionNames:
        """Return the names of the options in a dataclass."""
        own = "|".join(each.name for each in fields(options))
        return cls(name, re.compile(rf"(?<![\w./])env\.(?=(?:{own})\b)") if own else None)

    def rename(self, text: str, *, required: bool = False) -> str:
        """Return a text of the environment with the names that its options have in the mixture.
        One that names no option begins with the environment's section if that is ``required``."""
        renamed = self.pattern.sub(f"env.of.{self.name}.", text) if self.pattern else text
        return f"env.of.{self.name}: {text}" if required and renamed == text else renamed

    @contextmanager
    def renamed(self) -> Iterator[None]:
        """Context manager that renames the options in the environment's errors."""
        try:
            yield
        except (EnvironmentFailure, ValueError) as error:
            if len(error.args) == 1 and isinstance(error.args[0], str):
                error.args = (self.rename(error.args[0]),)
            raise


def mix_environments(
    parts: Mapping[str, EnvironmentPart], names: Mapping[str, OptionNames] | None = None
) -> EnvironmentSpec:
    """Return the specification of the mixture of these environments. Raises ValueError if several
    of them need a server that the launcher starts.

    Args:
        parts: The environments by their names in the mixture.
        names: Names of their options in the mixture; None if they have no options.
    """
    names = names or {name: OptionNames(name) for name in parts}
    specs = {name: part.spec for name, part in parts.items()}
    served = [name for name, spec in specs.items() if spec.launch is not None]
    if len(served) > 1:
        raise ValueError(
            f"env.mix: {' and '.join(served)} each need a server of their own, and a run starts "
            f"one; mix one of them, or name a server that runs already"
        )
    bounded = [spec.concurrency for spec in specs.values() if spec.concurrency is not None]
    tools = {str(tool): tool for spec in specs.values() for tool in spec.tools}
    return EnvironmentSpec(
        "+".join(specs),
        partial(_make_instance, specs, names),
        partial(MixtureTasks, parts, names),
        concurrency=min(bounded, default=None),
        demonstrate=partial(_demonstrate, parts, names)
        if all(spec.demonstrate is not None for spec in specs.values())
        else None,
        deterministic=all(spec.deterministic for spec in specs.values()),
        launch=_rename_section(specs[served[0]].launch, served[0]) if served else None,
        tools=tuple(tools.values()),
        parts=parts,
        examine=partial(_examine, specs, names)
        if any(spec.examine is not None for spec in specs.values())
        else None,
    )


def _rename_section(service: EnvironmentService | None, name: str) -> EnvironmentService | None:
    """Return a service whose options stand under the name of its environment in the mixture."""
    return service and replace(service, section=f"env.of.{name}")


async def _examine(
    specs: Mapping[str, EnvironmentSpec], names: Mapping[str, OptionNames], task: Task
) -> Sequence[TaskRemark]:
    """Let the task's own environment examine it, if it examines tasks."""
    own = names[task.environment]
    examine = specs[task.environment].examine
    if examine is None:
        return []
    with own.renamed():
        remarks = await examine(_unlabel_task(task))
    return [replace(remark, text=own.rename(remark.text)) for remark in remarks]


def _demonstrate(
    parts: Mapping[str, EnvironmentPart],
    names: Mapping[str, OptionNames],
    request: DemonstrationRequest,
) -> Iterator[Demonstration]:
    """Yield the scripted episodes of all environments, each of which has a scripted solver."""
    for name, part in parts.items():
        assert part.spec.demonstrate is not None
        with names[name].renamed():
            for each in part.spec.demonstrate(request):
                yield replace(each, task=_label_task(each.task, name, part.limits))


def _make_instance(
    specs: Mapping[str, EnvironmentSpec], names: Mapping[str, OptionNames], address: str
) -> MixedEnvironment:
    """Return an instance of a mixture. ``address`` is that of its only environment with a
    server."""
    return MixedEnvironment(
        {
            name: partial(spec.make, address if spec.launch is not None else "")
            for name, spec in specs.items()
        },
        {name: spec.system_prompt for name, spec in specs.items()},
        names,
    )


class MixedEnvironment:
    """Environment that plays each task in the environment that the task belongs to.

    An instance of an environment is made for its first task and then kept, so that later tasks
    need no new session.

    Args:
        makers: Functions that return a new instance, by the environments' names.
        system_prompts: System messages that precede the episodes, by the same names; "" for none.
        option_names: Names of the environments' options in the mixture, by the same names.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Environment]],
        system_prompts: Mapping[str, str],
        option_names: Mapping[str, OptionNames],
    ) -> None:
        self._makers = makers
        self._system_prompts = system_prompts
        self._option_names = option_names
        self._instances: dict[str, Environment] = {}
        self._playing = ""

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode. ``task`` is the payload of a mixture's task. The opening begins with
        the environment's system message, if it has one."""
        name = task[ENVIRONMENT_KEY]
        with self._option_names[name].renamed():
            if name not in self._instances:
                self._instances[name] = self._makers[name]()
            self._playing = name
            opening = await self._instances[name].reset(task[TASK_KEY], seed=seed)
        if not (prompt := self._system_prompts[name]):
            return opening
        return replace(opening, messages=[{"role": "system", "content": prompt}, *opening.messages])

    async def step(self, message: AssistantMessage) -> Turn:
        """Pass the message to the environment of the current episode."""
        if not self._playing:
            raise EnvironmentFailure("lost", "no episode was started")
        with self._option_names[self._playing].renamed():
            return await self._instances[self._playing].step(message)

    async def close(self) -> None:
        """Close all instances. Raises the first of their errors."""
        closing = [self._close(name, each) for name, each in self._instances.items()]
        self._instances = {}
        self._playing = ""
        results = await asyncio.gather(*closing, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _close(self, name: str, instance: Environment) -> None:
        with self._option_names[name].renamed():
            await instance.close()


def own_payload(task: Task) -> Mapping[str, Any]:
    """Return the payload that the task's own environment gets, also for a task of a mixture."""
    return task.payload[TASK_KEY] if task.environment else task.payload


def _label_task(task: Task, name: str, limits: TaskLimits, groups: Sequence[str] = ()) -> Task:
    """Return a task of the environment ``name`` as a task of the mixture. Its id, template and
    group begin with the environment's name, so that they are unique in the mixture. ``groups``: all
    groups of the environment, if known."""
    return replace(
        task,
        id=f"{name}/{task.id}",
        group=_label_group(name, task.group, groups),
        payload={ENVIRONMENT_KEY: name, TASK_KEY: dict(task.payload)},
        template=f"{name}/{task.template}" if task.template else "",
        environment=name,
        limits=limits,
    )


def _unlabel_task(task: Task) -> Task:
    """Return a task of the mixture as the task of its environment. Its group keeps the name that it
    has in the mixture."""
    prefix = f"{task.environment}/"
    return replace(
        task,
        id=task.id.removeprefix(prefix),
        payload=own_payload(task),
        template=task.template.removeprefix(prefix),
        environment="",
    )


def _label_group(name: str, group: str, groups: Sequence[str]) -> str:
    """Return the name of a group in the mixture. The only group of an environment is called after
    it unless it has a name of its own. ``groups``: all groups of the environment, if known.

    Reports show the environment as a whole under its name, so one group of several has another.
    """
    if len(groups) <= 1 and group in ("", ONE_GROUP, name):
        return name
    return f"{name}/{group or ONE_GROUP}"


class PartTasks:
    """Task set of one environment of a mixture. The ids of the templates are those of the
    environment; the names of groups and the tasks are those of the mixture (``_label_task``)."""

    def __init__(self, part: EnvironmentPart, split: str, options: OptionNames) -> None:
        name = options.name
        self._name = name
        self._limits = part.limits
        self._options = options
        with self._options.renamed():
            self._tasks: TaskSet = part.spec.tasks(split)
        groups = self._tasks.groups
        self.group_of: Mapping[str, str] = {
            template: _label_group(name, group, groups)
            for template, group in self._tasks.group_of.items()
        }
        self.groups: Sequence[str] = tuple(
            dict.fromkeys(_label_group(name, group, groups) for group in groups)
        )

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the task that a template gives for ``seed``."""
        with self._options.renamed():
            task = self._tasks.instantiate(template_id, seed)
        named = replace(task, template=task.template or template_id)
        return _label_task(named, self._name, self._limits, self._tasks.groups)


class MixtureTasks:
    """Task set of a mixture. The id of a template is ``<environment>/<the environment's id>``;
    ``parts`` are the environments' own task sets, by name."""

    def __init__(
        self, parts: Mapping[str, EnvironmentPart], names: Mapping[str, OptionNames], split: str
    ) -> None:
        self.parts = {name: PartTasks(part, split, names[name]) for name, part in parts.items()}
        self.group_of: Mapping[str, str] = {
            f"{name}/{template}": group
            for name, tasks in self.parts.items()
            for template, group in tasks.group_of.items()
        }
        self.groups: Sequence[str] = tuple(
            group for tasks in self.parts.values() for group in tasks.groups
        )

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the task that a template gives for ``seed``. Raises KeyError for an unknown
        template."""
        name, _, template = template_id.partition("/")
        return self.parts[name].instantiate(template, seed)
