"""Loader of the YAML task templates, and construction of task instances from them.

Strings in a template contain ``{parameter}`` placeholders. A parameter is ``words`` (a drawn name)
or a list of values to choose from; ``{account}`` is always defined. A value that consists of a
single placeholder keeps the type of the parameter. The seed decides names, values and phrasing.

Three things are held out from training: whole templates (``split: heldout``), names
(``instantiate(split="heldout")`` draws only names that training never draws) and one seed in ten. A
held-out name is an unseen *pair*: an adjective and a noun that no training name combines, decided
by a stable hash of the pair. Every single word occurs in training names, so a policy has to copy
names instead of recalling them. Source: docs/reference/environment.md 6.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from realhf.aws.tasks.task import ACCOUNT_ID, TIERS, Task, TaskError, choose_drifts, repairs

HELDOUT_SHARE = 5
"""One in this many word pairs is held out."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """agile bold brave brief bright brisk calm clean clear clever cold cool cozy crisp curly daring deep eager
    early fair fancy fast fierce fine firm fresh gentle giant glad grand happy humble jolly keen kind light
    little lively loud loyal lucky merry mild modest neat noble polite proud quick quiet rapid sharp shy
    silent sleepy smooth sober sturdy swift tidy"""
)
NOUNS = _words(
    """acorn badger bear beaver bison camel canyon cedar cliff comet crane dolphin dune eagle falcon fern finch
    forest fox gecko glacier harbor hawk heron island jaguar koala lagoon lake lemur lynx maple meadow mesa
    moose oak ocean orchid osprey otter owl panda pebble pine planet puffin rabbit raven reef river robin
    salmon seal spruce thistle tiger tulip valley walrus willow"""
)
SUFFIXES = _words(
    """app lab hub core main prod test stage demo pilot shop pay chat feed sync grid vault pulse dash depot"""
)


def is_heldout_pair(adjective: str, noun: str) -> bool:
    """Return whether names with this adjective and noun are reserved for evaluation."""
    return zlib.crc32(f"{adjective} {noun}".encode()) % HELDOUT_SHARE == 0


def draw_name(rng: random.Random, split: str) -> str:
    """Draw a name for a split, ``"train"`` or ``"heldout"``. Both splits use the same suffixes."""
    wanted = split == "heldout"
    while True:
        adjective = rng.choice(ADJECTIVES)
        noun = rng.choice(NOUNS)
        if is_heldout_pair(adjective, noun) is wanted:
            return f"{adjective}-{noun}-{rng.choice(SUFFIXES)}"


def is_name(text: object) -> bool:
    """Return whether a parameter value is a name as ``draw_name`` returns it."""
    parts = str(text).split("-")
    return len(parts) == 3 and parts[0] in ADJECTIVES and parts[1] in NOUNS and parts[2] in SUFFIXES


SPLITS = ("train", "heldout")
TEN = (18, 21, 122, 124, 217, 219, 309, 325, 411, 417)
"""Ids of the templates that are held out from a run with ``split=all_but_ten``: two per tier, from
both of ``SPLITS``. For every service in their solutions, other templates train different operations
of the service."""
ALL_BUT_TEN = "all_but_ten"
THE_TEN = "ten"
TEMPLATE_SPLITS = (*SPLITS, ALL_BUT_TEN, THE_TEN)
"""Splits of the templates: ``train`` and ``heldout`` as declared in the files (one in five is held
out), or ``TEN`` and all others."""
STARTER = "starter"
"""Tag of the templates that the built-in policy can learn."""
_SEED_SHARE = 10
"""One in this many seeds is held out."""
_FOLDERS = {"drift": "expert"}
"""Tiers of files and folders that are named differently from their tier."""
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")
_FILLED_KEYS = (
    *("setup_commands", "success_criteria", "solution", "any_of", "free", "may_change", "verbatim"),
    *("desired_state_spec", "possible_drifts", "assets", "decoys"),
)
"""Keys of a template whose placeholders are filled to make an instance."""


@dataclass(frozen=True)
class Mistake:
    """A typical wrong way to attempt a task, with the commands that recover from it."""

    commands: tuple[str, ...]
    """Commands that do not solve the task."""
    recovery: tuple[str, ...]
    """Commands that repair the damage and solve the task; empty if that is impossible."""


@dataclass(frozen=True)
class Template:
    """One task of the YAML files as written there, with unfilled placeholders.

    Fields that ``Task`` has too are documented in more detail there.
    """

    task_id: int
    """Unique number of the template."""
    name: str
    """Unique short name."""
    tier: str
    """One of ``TIERS``."""
    file: str
    """Path of the YAML file."""
    description: Sequence[str]
    """Phrasings of the request to the agent; an instance draws one."""
    params: Mapping[str, Any]
    """Kinds of values by parameter name: ``words`` for a drawn name, or a list to choose from."""
    solution: Sequence[str]
    """Commands of the reference solution. In a drift task they apply the whole desired state,
    regardless of what has drifted."""
    setup_commands: Sequence[Any] = ()
    """Requests that build the account, as in ``Task.setup``."""
    success_criteria: Mapping[str, Any] = field(default_factory=dict)
    """Success criteria as plain data, as in ``Task.success``."""
    mistakes: Sequence[Mapping[str, Any]] = ()
    """Typical mistakes: mappings with ``commands`` and optionally ``recovery``, see ``Mistake``."""
    split: str = "train"
    """"train", or "heldout" for a template that training never sees."""
    tags: Sequence[str] = ()
    """Topics of the template; "starter" marks templates that the built-in policy can learn."""
    desired_state_spec: str = ""
    """Description of the desired state, for a drift task."""
    possible_drifts: Sequence[Any] = ()
    """Requests that introduce drifts; a reset draws some of them."""
    assets: Mapping[str, str] = field(default_factory=dict)
    """Contents of the files in the session's folder, by file name."""
    decoys: Sequence[Any] = ()
    """Requests that create resources unrelated to the task."""
    any_of: Sequence[Sequence[str]] = ()
    """Alternative solutions that are graded as equally good."""
    free: Sequence[str] = ()
    """Fields whose values the agent may choose."""
    may_change: Sequence[str] = ()
    """Glob patterns for set-up resources that the agent may change."""
    verbatim: Sequence[str] = ()
    """Resource kinds whose policies are compared word for word."""

    @property
    def kind(self) -> str:
        """The tier, or "drift" for a drift task."""
        return "drift" if self.possible_drifts else self.tier


def load_templates(
    tiers: Iterable[str] | None = None, *, tags: Iterable[str] = (), split: str | None = None
) -> list[Template]:
    """Return the matching templates, ordered by id.

    ``tiers``: None for all. ``tags``: templates with any of these tags; if empty, all templates.
    ``split``: one of ``TEMPLATE_SPLITS``, None for all. Raises TaskError for an unknown tier, tag
    or split.
    """
    everything = _all_templates().values()
    wanted = _check_names("tier", TIERS if tiers is None else tiers, TIERS)
    tagged = _check_names(
        "tag", tags, sorted({tag for template in everything for tag in template.tags})
    )
    _check_names("split", [] if split is None else [split], TEMPLATE_SPLITS)
    return [
        template
        for template in everything
        if template.tier in wanted
        and (split is None or split in _splits_of(template))
        and (not tagged or tagged.intersection(template.tags))
    ]


def _splits_of(template: Template) -> tuple[str, str]:
    return template.split, THE_TEN if template.task_id in TEN else ALL_BUT_TEN


def training_tags(
    tiers: Sequence[str], tags: Sequence[str] | None, split: str = "train"
) -> list[str]:
    """Return the tags of the templates to train on.

    If ``tags`` is None, this is STARTER if every tier has templates with that tag in the split,
    otherwise no tag, which means all templates. Raises TaskError for an unknown name, or if a tier
    has no template with any of the tags.
    """
    if tags is None:
        starters = {
            template.tier for template in load_templates(tiers, tags=[STARTER], split=split)
        }
        return [STARTER] if starters >= set(tiers) else []
    matching_tiers = {template.tier for template in load_templates(tiers, tags=tags, split=split)}
    if missing := [tier for tier in tiers if tier not in matching_tiers]:
        raise TaskError(f"the tier {missing[0]!r} has no template with the tags {', '.join(tags)}")
    return list(tags)


def _check_names(kind: str, names: Iterable[str], known: Iterable[str]) -> set[str]:
    """Return ``names`` as a set. Raises TaskError for a name that is not in ``known``."""
    unknown = set(names) - set(known)
    if unknown:
        raise TaskError(f"unknown {kind} {sorted(unknown)[0]!r}; known: {', '.join(known)}")
    return set(names)


def get_template(template_id: int) -> Template:
    """Return the template with this id. Raises TaskError if there is none."""
    try:
        return _all_templates()[template_id]
    except KeyError:
        raise TaskError(f"no task template has the id {template_id}") from None


class TrainingTasks:
    """Source of training instances: the templates with the given tiers and tags in a training
    split.

    ``tiers``: None for all. ``tags``: templates with any of these tags; if empty, all templates.
    Raises TaskError for an unknown tier, tag or split.
    """

    def __init__(
        self, tiers: Iterable[str] | None = None, tags: Iterable[str] = (), split: str = "train"
    ) -> None:
        templates = load_templates(tiers, tags=tags, split=split)
        self.group_of: Mapping[int, str] = {
            template.task_id: template.tier for template in templates
        }
        self.groups: Sequence[str] = TIERS

    def instantiate(self, template_id: int, seed: int) -> Task:
        """Return the instance of a template for ``seed``, with names from the training split."""
        return instantiate(template_id, seed)


def is_heldout_seed(template_id: int, seed: int) -> bool:
    """Return whether this seed of this template is held out from training."""
    return zlib.crc32(f"{template_id}:{seed}".encode()) % _SEED_SHARE == _SEED_SHARE - 1


@cache
def phrasings() -> Mapping[int, Sequence[str]]:
    """Return additional phrasings of the tasks, by template id. Only training and demonstrations
    may use them."""
    text = (
        resources.files("realhf.aws.tasks").joinpath("phrasings.yaml").read_text(encoding="utf-8")
    )
    return yaml.load(text, Loader=yaml.CSafeLoader)


def instantiate(
    template_id: int, seed: int, split: str = "train", *, rephrased: bool = False
) -> Task:
    """Return the instance of a template for ``seed`` in ``split``. Equal arguments give equal
    tasks.

    In the split "train", a held-out seed is replaced by the next seed that is not held out;
    ``Task.seed`` is then the replacement. ``rephrased``: in the split "train", the description may
    also be one of ``phrasings``; everything else stays the same. Raises TaskError for an unknown id
    or split.
    """
    if split not in SPLITS:
        raise TaskError(f"split is {split!r}; known: {', '.join(SPLITS)}")
    template = get_template(template_id)
    while split == "train" and is_heldout_seed(template_id, seed):
        seed += 1
    rng = random.Random(f"{template_id}:{seed}:{split}")
    params = {
        key: draw_name(rng, split) if kind == "words" else rng.choice(kind)
        for key, kind in template.params.items()
    }
    filled = {key: fill(getattr(template, key), params) for key in _FILLED_KEYS}
    additional = phrasings().get(template_id, ()) if rephrased and split == "train" else ()
    descriptions = [*template.description, *additional]
    task = Task.from_json(
        filled
        | {
            "task_id": template_id,
            "template": template.name,
            "difficulty": template.tier,
            "seed": seed,
        }
        | {"description": fill(rng.choice(descriptions), params), "params": params}
    )
    solution = repairs(choose_drifts(task.possible_drifts, seed))
    return replace(task, solution=tuple(solution)) if solution else task


def with_drifts(task: Task, drifts: Iterable[int]) -> Task:
    """Return the task with the solution for the given drifts, instead of those that its seed draws.

    ``drifts``: indices into ``possible_drifts``.
    """
    solution = repairs([task.possible_drifts[index] for index in drifts])
    return replace(task, solution=tuple(solution)) if solution else task


def whole_state(task: Task) -> list[str]:
    """Return the commands that apply the whole desired state of a drift task. For other tasks,
    return the solution."""
    return fill(get_template(task.task_id).solution, task.params)


def mistakes(task: Task) -> list[Mistake]:
    """Return the typical mistakes in this task. For a mistake without a recovery of its own, the
    recovery is the task's solution."""
    habits = []
    for entry in get_template(task.task_id).mistakes:
        recovery = fill(entry["recovery"], task.params) if "recovery" in entry else task.solution
        habits.append(Mistake(tuple(fill(entry["commands"], task.params)), tuple(recovery)))
    return habits


def fill(value: Any, params: Mapping[str, Any]) -> Any:
    """Return ``value``, any nesting of strings, lists and mappings, with the placeholders filled.

    A string that consists of a single placeholder becomes the parameter's value and keeps its type.
    Braces around anything that is not a parameter are left unchanged.
    """
    if isinstance(value, str):
        if "{" not in value:
            return value
        whole = _PLACEHOLDER.fullmatch(value)
        if whole and whole[1] in params:
            return params[whole[1]]
        return _PLACEHOLDER.sub(lambda match: str(_lookup(match, params)), value)
    if isinstance(value, Mapping):
        return {fill(key, params): fill(item, params) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [fill(item, params) for item in value]
    return value


def _lookup(match: re.Match[str], params: Mapping[str, Any]) -> Any:
    return ACCOUNT_ID if match[1] == "account" else params.get(match[1], match[0])


@cache
def _all_templates() -> dict[int, Template]:
    templates: dict[int, Template] = {}
    for tier, file in _iterate_files():
        _add_templates(templates, tier, file)
    return dict(sorted(templates.items()))


def load_file(path: Path, tier: str) -> list[Template]:
    """Load and return the templates in a user's file. From then on ``load_templates`` returns them
    too.

    Raises TaskError for an invalid file or a task_id that is taken, OSError for an unreadable file.
    """
    (tier,) = _check_names("tier", [tier], TIERS)
    try:
        return _add_templates(_all_templates(), tier, path)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(f"{path}: {type(error).__name__}: {error}") from None


def _add_templates(templates: dict[int, Template], tier: str, file: Traversable) -> list[Template]:
    """Add the templates in a file to ``templates`` and return the added ones. Raises TaskError."""
    added = []
    for entry in yaml.load(file.read_text(), Loader=yaml.CSafeLoader):
        try:
            template = Template(tier=tier, file=str(file), **entry)
        except TypeError as error:  # a key that is unknown or missing
            raise TaskError(f"{file}: task {entry.get('task_id')}: {error}") from None
        if template.task_id in templates:
            raise TaskError(f"{file}: task_id {template.task_id} is taken")
        templates[template.task_id] = template
        added.append(template)
    return added


def _iterate_files() -> Iterator[tuple[str, Traversable]]:
    """Yield (tier, YAML file) for each file ``<tier>.yaml`` and ``<tier>/*.yaml`` next to this
    module."""
    for entry in sorted(
        resources.files("realhf.aws.tasks").iterdir(), key=lambda entry: entry.name
    ):
        name = entry.name.removesuffix(".yaml")
        tier = _FOLDERS.get(name, name)
        if tier in TIERS:
            files = entry.iterdir() if entry.is_dir() else [entry]
            yield from ((tier, file) for file in files if file.name.endswith(".yaml"))


def line_of(template: Template, key: str, index: int | None = None) -> int:
    """Return the line number (from 1) of a key in the template's file.

    ``index``: index of an element in the key's list, whose line is returned instead. If the
    template does not have the key, return the template's own line.
    """
    entry = _nodes(template.file)[template.task_id]
    for name, value in entry.value:
        if name.value == key:
            is_element = (
                index is not None
                and isinstance(value, yaml.SequenceNode)
                and index < len(value.value)
            )
            return (value.value[index] if is_element else name).start_mark.line + 1
    return entry.start_mark.line + 1


@cache
def _nodes(file: str) -> dict[int, yaml.MappingNode]:
    """Return the YAML nodes of a file's templates by task_id. The nodes know their line numbers."""
    root = yaml.compose(Path(file).read_text(), Loader=yaml.CSafeLoader)
    return {
        int(next(v.value for k, v in entry.value if k.value == "task_id")): entry
        for entry in root.value
    }
