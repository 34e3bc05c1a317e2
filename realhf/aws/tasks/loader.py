"""Loads templates from the YAML files beside this module, and draws instances with names from them.

Held-out names are unseen *pairs*: an adjective and a noun that no training name combines, decided by a stable hash of
the pair. Every word occurs in training names, so a policy must copy, not recall.

A template's texts hold ``{parameter}`` places. A parameter is ``words`` (a drawn name) or a closed list of values;
``{account}`` is always there. A value that is nothing but one place keeps its type. The seed decides name, values and
phrasing. Held out from training are whole templates (``split: heldout``), names (``instantiate(split="heldout")`` draws
none that training sees) and one seed in ten. Source: docs/reference/environment.md 6.
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
"""One pair in this many is held out."""


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
    """Return whether names with this pair are kept for evaluation."""
    return zlib.crc32(f"{adjective} {noun}".encode()) % HELDOUT_SHARE == 0


def draw_name(rng: random.Random, split: str) -> str:
    """Draw a name of the split, ``"train"`` or ``"heldout"``; the suffix is drawn freely in both."""
    wanted = split == "heldout"
    while True:
        adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
        if is_heldout_pair(adjective, noun) is wanted:
            return f"{adjective}-{noun}-{rng.choice(SUFFIXES)}"


def is_name(text: object) -> bool:
    """Return whether a parameter's value is a drawn name."""
    parts = str(text).split("-")
    return len(parts) == 3 and parts[0] in ADJECTIVES and parts[1] in NOUNS and parts[2] in SUFFIXES


SPLITS = ("train", "heldout")
TEN = (18, 21, 122, 124, 217, 219, 309, 325, 411, 417)
"""Templates that a run keeps back which trains on all others: two of each tier, held out in ``SPLITS`` as well. Of
every service in their solutions other templates train another part."""
ALL_BUT_TEN, THE_TEN = "all_but_ten", "ten"
TEMPLATE_SPLITS = (*SPLITS, ALL_BUT_TEN, THE_TEN)
"""How templates are split: as the files say (one in five is held out), or into ``TEN`` and all others."""
STARTER = "starter"
"""Tag of the templates that the built-in policy can learn."""
_SEED_SHARE = 10
"""One seed in this many is held out."""
_FOLDERS = {"drift": "expert"}
"""Files and folders that are not named after their tier."""
_PLACE = re.compile(r"(?<!\$)\{([a-z_]+)\}")
_FILLED = (
    *("setup_commands", "success_criteria", "solution", "any_of", "free", "may_change", "verbatim"),
    *("desired_state_spec", "possible_drifts", "assets", "decoys"),
)
"""Keys of a template that its instances have as well."""


@dataclass(frozen=True)
class Mistake:
    """Describes a wrong habit: commands that do not solve the task, and those that repair it (none: there is no way
    back)."""

    commands: tuple[str, ...]
    recovery: tuple[str, ...]


@dataclass(frozen=True)
class Template:
    """Describes one task of the YAML files as written there, places unfilled. ``description`` holds its phrasings,
    ``solution`` of a drift task applies its whole desired state, without a look at what drifted. ``split`` "heldout":
    never served to training. ``tags``: topics; "starter" marks what the built-in policy learns. ``file``: where it is
    written."""

    task_id: int
    name: str
    tier: str
    file: str
    description: Sequence[str]
    params: Mapping[str, Any]
    solution: Sequence[str]
    setup_commands: Sequence[Any] = ()
    success_criteria: Mapping[str, Any] = field(default_factory=dict)
    mistakes: Sequence[Mapping[str, Any]] = ()
    split: str = "train"
    tags: Sequence[str] = ()
    desired_state_spec: str = ""
    possible_drifts: Sequence[Any] = ()
    assets: Mapping[str, str] = field(default_factory=dict)
    decoys: Sequence[Any] = ()
    any_of: Sequence[Sequence[str]] = ()
    free: Sequence[str] = ()
    may_change: Sequence[str] = ()
    verbatim: Sequence[str] = ()

    @property
    def kind(self) -> str:
        """The tier, or "drift"."""
        return "drift" if self.possible_drifts else self.tier


def load_templates(
    tiers: Iterable[str] | None = None, *, tags: Iterable[str] = (), split: str | None = None
) -> list[Template]:
    """Return the templates ordered by id: of these tiers (None: of all), with any of these tags (none: whatever their
    tags), of this one of ``TEMPLATE_SPLITS`` (None: all). Raises TaskError for an unknown tier, tag or split."""
    everything = _all_templates().values()
    wanted = _known("tier", TIERS if tiers is None else tiers, TIERS)
    tagged = _known("tag", tags, sorted({tag for template in everything for tag in template.tags}))
    _known("split", [] if split is None else [split], TEMPLATE_SPLITS)
    return [
        template
        for template in everything
        if template.tier in wanted
        and (split is None or split in _splits_of(template))
        and (not tagged or tagged.intersection(template.tags))
    ]


def _splits_of(template: Template) -> tuple[str, str]:
    return template.split, THE_TEN if template.task_id in TEN else ALL_BUT_TEN


def training_tags(tiers: Sequence[str], tags: Sequence[str] | None, split: str = "train") -> list[str]:
    """Return the tags to train on in these tiers of a split: those given, or for None STARTER where every tier has such
    templates and else none, which takes all. Raises TaskError for an unknown name, and when a tier gives no
    template."""
    if tags is None:
        starters = {template.tier for template in load_templates(tiers, tags=[STARTER], split=split)}
        return [STARTER] if starters >= set(tiers) else []
    given = {template.tier for template in load_templates(tiers, tags=tags, split=split)}
    if missing := [tier for tier in tiers if tier not in given]:
        raise TaskError(f"the tier {missing[0]!r} has no template with the tags {', '.join(tags)}")
    return list(tags)


def _known(kind: str, names: Iterable[str], known: Iterable[str]) -> set[str]:
    unknown = set(names) - set(known)
    if unknown:
        raise TaskError(f"unknown {kind} {sorted(unknown)[0]!r}; known: {', '.join(known)}")
    return set(names)


def get_template(template_id: int) -> Template:
    """Return the template with this id. Raises TaskError for an unknown id."""
    try:
        return _all_templates()[template_id]
    except KeyError:
        raise TaskError(f"no task template has the id {template_id}") from None


class TrainingTasks:
    """Holds the training templates of these ``tiers`` (None: of all) with any of these ``tags`` (none: whatever their
    tags), of a ``split`` that trains. Held-out templates are never in it. Raises TaskError for an unknown tier, tag or
    split."""

    def __init__(self, tiers: Iterable[str] | None = None, tags: Iterable[str] = (), split: str = "train") -> None:
        templates = load_templates(tiers, tags=tags, split=split)
        self.group_of: Mapping[int, str] = {template.task_id: template.tier for template in templates}
        self.groups: Sequence[str] = TIERS

    def instantiate(self, template_id: int, seed: int) -> Task:
        """Return the instance that ``seed`` draws among the names that training may see."""
        return instantiate(template_id, seed)


def is_heldout_seed(template_id: int, seed: int) -> bool:
    """Return whether training never plays this instance of a template."""
    return zlib.crc32(f"{template_id}:{seed}".encode()) % _SEED_SHARE == _SEED_SHARE - 1


@cache
def phrasings() -> Mapping[int, Sequence[str]]:
    """Return further phrasings of templates, by id, which only training and demonstrations may have."""
    text = resources.files("realhf.aws.tasks").joinpath("phrasings.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=yaml.CSafeLoader)


def instantiate(template_id: int, seed: int, split: str = "train", *, rephrased: bool = False) -> Task:
    """Return the instance of a template that ``seed`` draws in ``split``; the same arguments give the same task. In
    training a held-out seed stands for the next one that is not (``Task.seed``). ``rephrased``: its description is
    drawn from ``phrasings`` as well, in training alone; all else is the same."""
    if split not in SPLITS:
        raise TaskError(f"split is {split!r}; known: {', '.join(SPLITS)}")
    template = get_template(template_id)
    while split == "train" and is_heldout_seed(template_id, seed):
        seed += 1
    rng = random.Random(f"{template_id}:{seed}:{split}")
    params = {
        key: draw_name(rng, split) if kind == "words" else rng.choice(kind) for key, kind in template.params.items()
    }
    filled = {key: fill(getattr(template, key), params) for key in _FILLED}
    further = phrasings().get(template_id, ()) if rephrased and split == "train" else ()
    worded = [*template.description, *further]
    task = Task.from_json(
        filled
        | {"task_id": template_id, "template": template.name, "difficulty": template.tier, "seed": seed}
        | {"description": fill(rng.choice(worded), params), "params": params}
    )
    drawn = repairs(choose_drifts(task.possible_drifts, seed))
    return replace(task, solution=tuple(drawn)) if drawn else task


def with_drifts(task: Task, places: Iterable[int]) -> Task:
    """Return the task with the solution for the drifts at these places of ``possible_drifts``, whatever its seed
    draws."""
    found = repairs([task.possible_drifts[place] for place in places])
    return replace(task, solution=tuple(found)) if found else task


def whole_state(task: Task) -> list[str]:
    """Return the commands that apply the whole desired state of a drift task; for other tasks the solution."""
    return fill(get_template(task.task_id).solution, task.params)


def mistakes(task: Task) -> list[Mistake]:
    """Return the wrong habits written for this task; the default way back is the canonical solution."""
    found = []
    for entry in get_template(task.task_id).mistakes:
        recovery = fill(entry["recovery"], task.params) if "recovery" in entry else task.solution
        found.append(Mistake(tuple(fill(entry["commands"], task.params)), tuple(recovery)))
    return found


def fill(value: Any, params: Mapping[str, Any]) -> Any:
    """Return ``value`` with the places of all its strings filled; a string that is one place takes the value's type.
    Braces around anything that is not a parameter stay as they are."""
    if isinstance(value, str):
        if "{" not in value:
            return value
        whole = _PLACE.fullmatch(value)
        if whole and whole[1] in params:
            return params[whole[1]]
        return _PLACE.sub(lambda match: str(_lookup(match, params)), value)
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
    for tier, file in _files():
        _add(templates, tier, file)
    return dict(sorted(templates.items()))


def load_file(path: Path, tier: str) -> list[Template]:
    """Return the templates of a file of one's own, of this tier; from then on they are among the others. Raises
    TaskError for a file that is none, or a number that is taken, OSError for one that cannot be read."""
    (tier,) = _known("tier", [tier], TIERS)
    try:
        return _add(_all_templates(), tier, path)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(f"{path}: {type(error).__name__}: {error}") from None


def _add(templates: dict[int, Template], tier: str, file: Traversable) -> list[Template]:
    found = []
    for entry in yaml.load(file.read_text(), Loader=yaml.CSafeLoader):
        try:
            template = Template(tier=tier, file=str(file), **entry)
        except TypeError as error:  # a key that is unknown or missing
            raise TaskError(f"{file}: task {entry.get('task_id')}: {error}") from None
        if template.task_id in templates:
            raise TaskError(f"{file}: task_id {template.task_id} is taken")
        templates[template.task_id] = template
        found.append(template)
    return found


def _files() -> Iterator[tuple[str, Traversable]]:
    """Yield (tier, YAML file) of ``<tier>.yaml`` and ``<tier>/*.yaml`` beside this module."""
    for entry in sorted(resources.files("realhf.aws.tasks").iterdir(), key=lambda entry: entry.name):
        name = entry.name.removesuffix(".yaml")
        tier = _FOLDERS.get(name, name)
        if tier in TIERS:
            files = entry.iterdir() if entry.is_dir() else [entry]
            yield from ((tier, file) for file in files if file.name.endswith(".yaml"))


def line_of(template: Template, key: str, place: int | None = None) -> int:
    """Return the line, from 1, of the template's file where a key of it stands, or the element at a place of its list;
    that of the template where it has no such key."""
    entry = _nodes(template.file)[template.task_id]
    for name, value in entry.value:
        if name.value == key:
            listed = place is not None and isinstance(value, yaml.SequenceNode) and place < len(value.value)
            return (value.value[place] if listed else name).start_mark.line + 1
    return entry.start_mark.line + 1


@cache
def _nodes(file: str) -> dict[int, yaml.MappingNode]:
    """Return the entries of a file as YAML has them, with their lines, by task_id."""
    root = yaml.compose(Path(file).read_text(), Loader=yaml.CSafeLoader)
    return {int(next(v.value for k, v in entry.value if k.value == "task_id")): entry for entry in root.value}
