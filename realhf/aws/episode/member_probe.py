"""Probing of request members: finds out which members of a request a simulator stores. A request is
sent with different values of a member, each time in the same world, and the resulting accounts are
compared. The result for a member is its *fate*, see ``grading.sent_settings``.

The worlds come from the tasks: an operation is probed where a set-up, a solution or a play sends
it. Such a place is called a *site*; the request that is sent there is the one that is varied.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import yaml
from botocore import xform_name

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.executor import SimulatorLost
from realhf.aws.cli.state_client import StateCallError
from realhf.aws.episode.world import SetupError, build_world
from realhf.aws.grading.member_notes import Notes, operation_model
from realhf.aws.grading.sent_settings import (
    ANY,
    DEFAULT,
    ELEMENT,
    KEPT,
    NAMES,
    NOT_KEPT,
    NOT_PROBED,
    STEERS,
    TEXT,
    MemberPath,
    format_path,
    leaves,
    service_of,
)
from realhf.aws.grading.snapshot import Snapshot, state_digest, take_snapshot
from realhf.aws.grading.stack_templates import parse_template
from realhf.aws.grading.tracker import identifying_parameter, is_read
from realhf.aws.real_aws.describe_walker import operation_models
from realhf.aws.simulator.slot import Slot
from realhf.aws.tasks.captures import CaptureError, fill_setup, resolve
from realhf.aws.tasks.loader import Template, fill, instantiate, mistakes
from realhf.aws.tasks.task import SetupCommand, Task, TaskError
from realhf.base import process_clock

STACK = "cloudformation:CreateStack"
_STACK_S = 5.0
"""Seconds within which a stack must have been created."""
DEEPEST = 9
"""Maximum length of a path that is probed."""
MAX_VALUES = 6
"""Maximum number of values of a member that are tried until two are accepted."""
_EQUAL_ACCOUNTS = 4
"""Number of accepted values that must leave the same account before a member counts as not stored.
Two would not be enough, because they may mean the same."""
_REQUESTS_PER_SIMULATOR = 25
"""Number of requests after which the simulator is replaced."""
_MAX_SITES = 5
"""Maximum number of sites at which one operation is probed. Each must send members that the
previous ones do not."""
_MAX_FAILED_SITES = 8
"""Number of failed sites after which an operation counts as impossible to probe."""
_MAX_ATTEMPTS = 2
"""Number of attempts to send a request, each after a failure on a new simulator, before it counts
as refused."""
_NAMING = re.compile(r"(name|id|identifier|arn|url|bucket|key|keyid)$", re.IGNORECASE)
"""Name endings of members that contain names."""
_DOCUMENTS = frozenset({"policy", "resourcepolicy", "template"})
"""Members whose name ends an operation's name, as in PutBucketPolicy, although they do not name a
resource."""
_MAKES = re.compile(r"(Create|Register|Run|Allocate|Request)")
"""Prefixes of operations that create a resource."""
_SERVICES = {"s3api": "s3"}
"""botocore names of the services that have a different name in the CLI."""
_ID = re.compile(r"(?<=-)[0-9a-f]{8,17}$")
"""The generated part of an id."""


@dataclass(frozen=True)
class Site:
    """A place in a task where a request is sent.

    A resource declared in a stack's template is treated as a request, too: its operation is its
    type, and its parameters are its properties.
    """

    task: Task
    """Task whose set-up brings the account into the state in which the request is sent."""
    operation: str
    """Operation as "service:Operation", or a CloudFormation type."""
    params: Mapping[str, Any]
    """Parameters of the request."""
    stack: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the CreateStack request that declares the resource; {} for an ordinary
    request."""
    name: str = ""
    """Logical name of the resource in that stack's template."""

    def request(self, params: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Return (operation, parameters) of the request to send, in which ``params`` replace the
        site's own parameters."""
        if not self.stack:
            return self.operation, params
        template = parse_template(self.stack)
        template["Resources"][self.name]["Properties"] = params
        return STACK, {**self.stack, "TemplateBody": json.dumps(template, default=str)}


@dataclass
class Corpus:
    """Sites by operation, and the values that members have at them."""

    sites: dict[str, list[Site]] = field(default_factory=dict)
    """Sites by operation."""
    values: dict[str, list[Any]] = field(default_factory=dict)
    """Values by member name, up to 20 for each."""

    def add(self, site: Site) -> None:
        """Add a site. If it creates a stack, also add a site for each declared resource."""
        if site.operation == STACK:
            for name, declared in parse_template(site.params).get("Resources", {}).items():
                if isinstance(declared, dict) and isinstance(declared.get("Properties"), dict):
                    self.add(
                        Site(
                            site.task,
                            str(declared.get("Type")),
                            declared["Properties"],
                            site.params,
                            name,
                        )
                    )
        self.sites.setdefault(site.operation, []).append(site)
        for path, _ in leaves(site.params):
            name = next(step for step in reversed(path) if step != ELEMENT)
            known = self.values.setdefault(name, [])
            value = _at(site.params, path)
            if value not in known and len(known) < 20:
                known.append(value)


def _at(value: Any, path: MemberPath) -> Any:
    for step in path:
        if step == ELEMENT:
            value = value[0] if value else None
        else:
            value = value.get(step) if isinstance(value, Mapping) else None
    return value


def collect(
    slot: Slot, templates: Sequence[Template], plays: Mapping[int, Sequence[Mapping[str, Any]]]
) -> Corpus:
    """Play the templates' set-ups, drifts, solutions and listed mistakes, and ``plays`` (from
    ``written_plays``). Return the sites at which writes were sent."""
    corpus = Corpus()
    for template in templates:
        slot.respawn()
        task = instantiate(template.task_id, 0)
        drifts = [*task.possible_drifts]
        base = replace(
            task,
            setup=(*task.setup, *task.decoys, *drifts),
            decoys=(),
            possible_drifts=(),
            success={},
        )
        base = replace(
            base,
            description="",
            desired_state_spec="",
            solution=(),
            any_of=(),
            free=(),
            may_change=(),
        )
        _record_setup(slot, base, corpus)
        scripts = [task.solution, *task.any_of, fill(list(template.solution), task.params)]
        scripts += [[*one.commands, *one.recovery] for one in mistakes(task)]
        scripts += [_script(entry, task) for entry in plays.get(task.task_id, ())]
        for script in {tuple(script): None for script in scripts if script}:
            _record(slot, base, script, corpus)
    return corpus


def _record_setup(slot: Slot, base: Task, corpus: Corpus) -> None:
    try:
        world = build_world(slot, base, base.seed)
    except (SetupError, TaskError):
        return
    for place, sent in enumerate(world.sent):
        for operation, params in sent:
            if not is_read(operation, params):
                corpus.add(Site(replace(base, setup=base.setup[:place]), operation, params))


def _record(slot: Slot, base: Task, script: Sequence[str], corpus: Corpus) -> None:
    """Play a script, and add a site for the first write of each successful command."""
    try:
        world = build_world(slot, base, base.seed)
        lines = fill_setup(list(script), world.answers)
    except (SetupError, TaskError, CaptureError):
        return
    outputs: list[str] = []
    done = base
    for line in lines:
        line = resolve(line, outputs)
        result = slot.own_executor.run(line)
        outputs.append(result.stdout)
        writes = [one for one in result.requests if one.ok]
        writes = [
            one for one in writes if not is_read(f"{one.service}:{one.operation}", one.params)
        ]
        if writes and result.success:
            corpus.add(Site(done, f"{writes[0].service}:{writes[0].operation}", writes[0].params))
        if writes:
            done = replace(
                done, setup=(*done.setup, SetupCommand(command=line, ignore_failure=True))
            )


def written_plays(files: Iterable[Path]) -> dict[int, list[Mapping[str, Any]]]:
    """Return the plays in YAML files, by task id. A play has either ``commands``, or the text to
    ``change`` in the solution's commands."""
    entries: dict[int, list[Mapping[str, Any]]] = {}
    for file in files:
        for task_id, kinds in (
            yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader) or {}
        ).items():
            entries.setdefault(int(task_id), []).extend(
                entry for listed in kinds.values() for entry in listed
            )
    return entries


def _script(entry: Mapping[str, Any], task: Task) -> list[str]:
    """Return a play's commands."""
    if "commands" in entry:
        return fill(list(entry["commands"]), task.params)
    text = "\n".join(task.solution)
    for old, new in entry.get("change", {}).items():
        text = text.replace(fill(old, task.params), fill(new, task.params))
    return text.split("\n")


def served_writes() -> list[str]:
    """Return the write operations that agents may use, as "service:Operation"."""
    operations = []
    for service, commands in sorted(ALLOWED.items()):
        for name in (
            sorted(operation_models(_SERVICES.get(service, service))) if service != "s3" else ()
        ):
            if xform_name(name, "-") in commands and not is_read(f":{name}"):
                operations.append(f"{_SERVICES.get(service, service)}:{name}")
    return operations


class ProbeError(RuntimeError):
    """An operation cannot be probed. The message states the reason."""


class Prober:
    """Prober of the members of one operation, at a site, on a slot.

    The constructor raises ProbeError if the original request is not accepted, or does not leave the
    same account when it is sent twice.
    """

    def __init__(self, slot: Slot, site: Site, corpus: Corpus, notes: Notes) -> None:
        self._slot = slot
        self.site = site
        self._corpus = corpus
        self._notes = notes
        self.shape = (
            type_shape(site.operation, site.params) if site.stack else input_shape(site.operation)
        )
        self.about = about_of(site.operation, self.shape, site.params)
        self._digests: dict[str, str | None] = {}
        self.sent = 0
        """Number of requests sent."""
        first = self._digest_after(site.params)
        if first is None or self._send(site.params) != first:
            raise ProbeError(
                "the same request does not leave the same account twice"
                if first
                else "is not accepted"
            )

    def members(self) -> dict[MemberPath, str]:
        """Return the fate of each member, by path. If all members of a structure have the same
        fate, it is listed once, for the structure."""
        fates: dict[MemberPath, str] = {}
        for name, member in self.shape.members.items():
            if name in self.about:
                fates[name,] = NAMES
            else:
                fates |= self.fates(self.site.params, (name,), member, ())
        return fates

    def fates(
        self, params: Mapping[str, Any], path: MemberPath, shape: Any, above: tuple[str, ...] = ()
    ) -> dict[MemberPath, str]:
        """Return the fates of the members at and below ``path``, by path. If they are all the same,
        they are merged into one.

        ``params``: parameters in which the members are varied. ``shape``: botocore's shape at
        ``path``. ``above``: names of the shapes around it.
        """
        known = self._fate_from_notes(path, shape)
        if known:
            return {path: known}
        inner = _inner(shape, _at(params, path))
        if not inner:
            return {path: self._fate(params, path, shape)}
        if shape.name in above or len(path) >= DEEPEST:
            return {path: f"{NOT_PROBED}: deeper than anybody writes"}
        if _at(params, path) is None:
            filled = [
                _replace_at(params, self.shape, path, self._full_value(path, shape, number, ()))
                for number in range(2)
            ]
            digests = [self._digest_after(one) for one in (params, *filled)]
            if digests[0] is not None and digests.count(digests[0]) == len(digests):
                return {path: NOT_KEPT}
            params = next(
                (
                    one
                    for one, digest in zip(filled, digests[1:], strict=True)
                    if digest is not None
                ),
                params,
            )
        found: dict[MemberPath, str] = {}
        for step, member in inner.items():
            found |= self.fates(params, (*path, step), member, (*above, shape.name))
        fates = set(found.values())
        return {path: fates.pop()} if len(fates) == 1 and DEFAULT not in fates else found

    def _fate_from_notes(self, path: MemberPath, shape: Any) -> str:
        """Return a member's fate according to the notes, or "" if they have none."""
        operation = self.site.operation
        text = format_path(path)
        if self._notes.steers(operation, text) or shape.metadata.get("idempotencyToken"):
            return STEERS
        if self._notes.is_text(operation, text):
            return TEXT
        return ""

    def _fate(self, params: Mapping[str, Any], path: MemberPath, shape: Any) -> str:
        digests: list[str] = []
        for value in self._values(path, shape, _at(params, path)):
            digest = self._digest_after(_replace_at(params, self.shape, path, value))
            if digest is not None:
                digests.append(digest)
            if len(set(digests)) == 2 or len(digests) == _EQUAL_ACCOUNTS:
                break
        place = self.site.operation, format_path(path)
        meant = self._notes.defaults.get(place)
        is_name = (
            shape.type_name == "string"
            and not _choices(shape)
            and _NAMING.search(path[-1]) is not None
        )
        if len(digests) == 1 and not is_name and (meant is None or _at(params, path) != meant):
            # Compare with the request without the member. Not done for names, because leaving out
            # the name of the only resource changes nothing, and not if the default was sent.
            without = self._digest_after(_remove_at(params, path))
            # A request that changes a resource leaves a missing member unchanged, and its present
            # value may be the one that was sent. So an equal account proves nothing then.
            makes = self.site.stack or _MAKES.match(self.site.operation.rpartition(":")[2])
            if without is not None and (without != digests[0] or makes):
                digests.append(without)
        if len(digests) < 2:
            return f"{NOT_PROBED}: fewer than two values are accepted"
        if len(set(digests)) > 1:
            return KEPT
        return DEFAULT if place in self._notes.defaults else NOT_KEPT

    def _full_value(self, path: MemberPath, shape: Any, number: int, above: tuple[str, ...]) -> Any:
        if shape.type_name == "structure":
            if shape.name in above or len(path) >= DEEPEST:
                return {}
            return {
                name: self._full_value((*path, name), member, number, (*above, shape.name))
                for name, member in shape.members.items()
            }
        if shape.type_name == "list":
            return [self._full_value((*path, ELEMENT), shape.member, number, above)]
        if shape.type_name == "map":
            key = (_choices(shape.key) or ["other"])[0]
            return {key: self._full_value((*path, key), shape.value, number, above)}
        values = self._values(path, shape, None)
        return values[number % len(values)]

    def _values(self, path: MemberPath, shape: Any, sent: Any) -> list[Any]:
        """Return the values to try for a member, beginning with the one that was sent."""
        name = next(step for step in reversed(path) if step != ELEMENT)
        values = [] if sent is None else [sent]
        values += _examples(name, shape, self._corpus.values.get(name, []), sent)
        values = [*{json.dumps(value, default=repr): value for value in values}.values()]
        return values[: max(MAX_VALUES, len(_choices(shape)))]

    def _digest_after(self, params: Mapping[str, Any]) -> str | None:
        """Return a digest of the account after the request with these parameters, or None if it is
        not accepted. Cached."""
        key = json.dumps(params, sort_keys=True, default=repr)
        if key not in self._digests:
            self._digests[key] = self._send(params)
        return self._digests[key]

    def _send(self, params: Mapping[str, Any]) -> str | None:
        self.sent += 1
        if self.sent % _REQUESTS_PER_SIMULATOR == 0:
            self._slot.respawn()  # threads of functions and pollers outlive a reset
        for _ in range(_MAX_ATTEMPTS):
            try:
                return self._send_once(params)
            except (SetupError, ConnectionError, SimulatorLost):
                self._slot.respawn()
        return None

    def _send_once(self, params: Mapping[str, Any]) -> str | None:
        operation, whole = self.site.request(params)
        service, _, name = operation.partition(":")
        build_world(self._slot, self.site.task, self.site.task.seed)
        before = take_snapshot(self._slot)
        try:
            model = operation_model(operation)
            self._slot.state.call(service, name, _as_shape(whole, model.input_shape))
            if self.site.stack and not self._is_complete(str(whole["StackName"])):
                return None
        except StateCallError:
            return None
        after = take_snapshot(self._slot)
        return state_digest(
            *(map(_drop_stacks, (before, after)) if self.site.stack else (before, after))
        )

    def _is_complete(self, stack: str) -> bool:
        """Return whether a stack was created successfully within ``_STACK_S``. Raises
        StateCallError."""
        deadline = process_clock.now() + _STACK_S
        while True:
            (found,) = self._slot.state.call(
                "cloudformation", "DescribeStacks", {"StackName": stack}
            )["Stacks"]
            if not found["StackStatus"].endswith("IN_PROGRESS") or process_clock.now() > deadline:
                return found["StackStatus"] == "CREATE_COMPLETE"
            time.sleep(0.01)


def _drop_stacks(account: Snapshot) -> Snapshot:
    """Return an account without its stacks. They contain their templates, so they would always
    differ."""
    return Snapshot(
        {
            key: attributes
            for key, attributes in account.resources.items()
            if key[0] != "cloudformation"
        }
    )


def input_shape(operation: str) -> Any:
    """Return the shape of an operation's parameters in botocore's model."""
    model = operation_model(operation)
    return (
        model.input_shape
        if model is not None and model.input_shape is not None
        else _plain_shape({})
    )


def type_shape(kind: str, properties: Mapping[str, Any]) -> Any:
    """Return a shape for the properties of a CloudFormation resource type.

    Its members are those of the operation that creates such a resource, which have the same names,
    and any other properties in ``properties``.
    """
    service = service_of(kind)
    noun = kind.rpartition("::")[2]
    models = (
        operation_model(f"{service}:{verb}{noun}") for verb in ("Create", "Put", "Request", "")
    )
    model = next((model for model in models if model is not None), None)
    known = (
        _capitalize_members(model.input_shape, 0).members
        if model is not None and model.input_shape is not None
        else {}
    )
    others = {name: _plain_shape(value) for name, value in properties.items() if name not in known}
    return SimpleNamespace(
        type_name="structure",
        name=kind,
        members={**known, **others},
        required_members=(),
        metadata={},
    )


def _capitalize_members(shape: Any, depth: int) -> Any:
    """Return a shape with member names capitalized as in CloudFormation."""
    kind = shape.type_name
    if kind == "list":
        return SimpleNamespace(
            type_name=kind,
            name=shape.name,
            metadata={},
            member=_capitalize_members(shape.member, depth + 1),
        )
    if kind != "structure":
        return shape
    inner = shape.members.items() if depth < DEEPEST else ()
    members = {
        f"{name[:1].upper()}{name[1:]}": _capitalize_members(member, depth + 1)
        for name, member in inner
    }
    required = [f"{name[:1].upper()}{name[1:]}" for name in shape.required_members]
    return SimpleNamespace(
        type_name=kind, name=shape.name, metadata={}, members=members, required_members=required
    )


def _plain_shape(value: Any) -> Any:
    """Return a shape that fits a value."""
    found = SimpleNamespace(name=repr(value)[:200], metadata={}, type_name="string")
    if isinstance(value, Mapping):
        found.type_name = "structure"
        found.required_members = ()
        found.members = {str(name): _plain_shape(item) for name, item in value.items()}
        if len(value) == 1 and next(iter(found.members)).startswith(("Ref", "Fn::")):
            found.type_name = "string"
    elif isinstance(value, list):
        found.type_name = "list"
        found.member = _plain_shape(value[0] if value else "")
    elif isinstance(value, bool):
        found.type_name = "boolean"
    elif isinstance(value, int):
        found.type_name = "integer"
    return found


def about_of(operation: str, shape: Any, params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the members that name a request's subject, recognized by the ends of their names or by
    the operation's name, such as ``service`` in UpdateService."""
    own, _ = identifying_parameter(service_of(operation), params)
    name = operation.rpartition(":")[2]
    of_stack = operation.startswith("AWS::")
    makes = of_stack or _MAKES.match(name)
    noun = _MAKES.sub("", name, count=1).lower() if makes else name.lower()
    required = []
    optional = []
    for member, inner in shape.members.items():
        is_name = _NAMING.search(member) or name.lower().endswith(member.lower())
        if (
            inner.type_name != "string"
            or _choices(inner)
            or not is_name
            or member.lower() in _DOCUMENTS
        ):
            continue
        named = _NAMING.sub("", member).lower()
        if not of_stack and member not in shape.required_members:
            optional += [member] if named and named in noun else []
        elif not makes or named in noun or (member.endswith("Id") and not of_stack):
            required.append(member)
    own_ones = [own] if own in shape.members else []
    return tuple(dict.fromkeys([*own_ones, *(required or optional)]))


def _inner(shape: Any, sent: Any) -> dict[str, Any]:
    """Return the shapes directly below a shape, by path step: a structure's members, a list's
    element or a map's values. {} for a leaf.

    ``sent``: the value that was sent, whose keys are used for a map.
    """
    if shape.type_name == "structure":
        return dict(shape.members)
    if shape.type_name == "list":
        return {ELEMENT: shape.member}
    if shape.type_name == "map":
        known = _choices(shape.key) or [*(sent if isinstance(sent, Mapping) else ()), ANY]
        return {key: shape.value for key in known}
    return {}


def _choices(shape: Any) -> list[str]:
    return list(getattr(shape, "enum", ()))


def _examples(name: str, shape: Any, seen: Sequence[Any], sent: Any) -> list[Any]:
    """Return possible values for a leaf of this shape.

    ``seen``: values that members with this name have elsewhere. ``sent``: the value that was sent,
    or None.
    """
    kind = shape.type_name
    if kind == "boolean":
        return [True, False]
    if kind in ("integer", "long", "float", "double"):
        low = shape.metadata.get("min", 1)
        high = shape.metadata.get("max", max(1000, low))
        near = [sent + 1, sent - 1] if isinstance(sent, int | float) else []
        numbers = [*near, *seen, 1, 2, 30, 60, 7, low, high]
        return [
            number
            for number in numbers
            if isinstance(number, int | float) and low <= number <= high
        ]
    if kind == "timestamp":
        return ["2031-01-01T00:00:00Z", "2032-01-01T00:00:00Z"]
    if kind == "blob":
        return [b"one", b"two"]
    if _choices(shape):
        return _choices(shape)
    return [value for value in seen if isinstance(value, str)][:3] + _text_examples(
        name.lower(), sent
    )


def _text_examples(name: str, sent: Any) -> list[str]:
    changed = []
    if isinstance(sent, str):
        changed = (
            [_ID.sub(lambda match: "0" * len(match[0]), sent)] if _ID.search(sent) else [f"{sent}2"]
        )
        if sent.lstrip("-").isdecimal():
            changed = [str(int(sent) + 1)]
    if name.endswith("arn"):
        return [
            *changed,
            "arn:aws:iam::000000000000:role/other",
            "arn:aws:iam::000000000000:role/another",
        ]
    if "cidr" in name:
        return [*changed, "10.7.0.0/24", "10.8.0.0/24"]
    return [*changed, "other", "another", "1", "2"]


def _replace_at(
    params: Mapping[str, Any], shape: Any, path: MemberPath, value: Any
) -> dict[str, Any]:
    """Return parameters with ``value`` at a path. Missing structures on the way are created with
    their required members."""
    return _set_at(params, shape, path, value)


def _set_at(current: Any, shape: Any, path: MemberPath, value: Any) -> Any:
    if not path:
        return value
    step = path[0]
    rest = path[1:]
    if shape.type_name == "list":
        items = list(current) if isinstance(current, list) else []
        first = items[0] if items else None
        return [_set_at(first, shape.member, rest, value), *items[1:]]
    if shape.type_name == "map":
        known = dict(current) if isinstance(current, Mapping) else {}
        key = "other" if step == ANY else step
        return {**known, key: _set_at(known.get(key), shape.value, rest, value)}
    known = dict(current) if isinstance(current, Mapping) else _minimal_value(shape)
    return {**known, step: _set_at(known.get(step), shape.members[step], rest, value)}


def _minimal_value(shape: Any, depth: int = 0) -> Any:
    """Return the smallest valid value of a shape."""
    if depth > DEEPEST:
        return {}
    if shape.type_name == "structure":
        return {
            name: _minimal_value(shape.members[name], depth + 1) for name in shape.required_members
        }
    if shape.type_name == "list":
        return [_minimal_value(shape.member, depth + 1)] if shape.metadata.get("min") else []
    if shape.type_name == "map":
        return {}
    return _examples(shape.name, shape, (), None)[0]


def _remove_at(params: Any, path: MemberPath) -> Any:
    """Return parameters without the value at a path."""
    step = path[0]
    rest = path[1:]
    if step == ELEMENT:
        items = list(params) if isinstance(params, list) else []
        return [_remove_at(items[0], rest), *items[1:]] if items and rest else items[1:]
    if not isinstance(params, Mapping) or step not in params:
        return params
    if not rest:
        return {name: item for name, item in params.items() if name != step}
    return {**params, step: _remove_at(params[step], rest)}


def _as_shape(value: Any, shape: Any) -> Any:
    """Return recorded parameters with botocore's types: binary members become bytes."""
    kind = getattr(shape, "type_name", "")
    if kind == "structure" and isinstance(value, Mapping):
        return {name: _as_shape(item, shape.members.get(name)) for name, item in value.items()}
    if kind == "list" and isinstance(value, list):
        return [_as_shape(item, shape.member) for item in value]
    if kind == "map" and isinstance(value, Mapping):
        return {name: _as_shape(item, shape.value) for name, item in value.items()}
    return value.encode() if kind == "blob" and isinstance(value, str) else value


def rank_sites(sites: Sequence[Site]) -> list[Site]:
    """Return the sites, sorted by the number of members that they send, largest first."""
    return sorted(sites, key=lambda site: -len(_sent_paths(site)))


def _sent_paths(site: Site) -> set[MemberPath]:
    return {path for path, _ in leaves(site.params)}


def versions() -> dict[str, str]:
    """Return the versions of the packages for which a table is valid, by package."""
    return {name: metadata.version(name) for name in ("ministack", "botocore")}


def merge_tables(tables: Sequence[tuple[Site, Mapping[MemberPath, str]]]) -> dict[str, str]:
    """Merge the fates that were found at several sites of an operation, and return them by path as
    text.

    For each member, sites that send it and could probe it have priority. Among equal ones, "not
    kept" wins over "kept". "Kept" wins over "not probed".
    """
    found: dict[MemberPath, tuple[int, str]] = {}
    for site, table in tables:
        for path, fate in table.items():
            weight = (
                0
                if fate.startswith(NOT_PROBED)
                else 1 + (path[0] in site.params) + _is_sent(site, path)
            )
            known, old = found.get(path, (-1, ""))
            if weight > known or (weight == known and old == KEPT):
                found[path] = weight, fate
    return {format_path(path): fate for path, (_, fate) in sorted(found.items())}


def _is_sent(site: Site, path: MemberPath) -> bool:
    return _at(site.params, path) is not None


_EMPTY = Task(
    task_id=0, template="empty", tier="warmup", seed=0, description="", setup=(), success={}
)
_NOT_SENT = "no set-up, solution or play of a task sends it"


def _synthetic_sites(operation: str) -> list[Site]:
    """Return a site for an operation that no task sends: the smallest request, in an empty account.
    There is none if the operation does not create anything."""
    if not _MAKES.match(operation.partition(":")[2]):
        return []
    return [Site(_EMPTY, operation, _minimal_value(input_shape(operation)))]


def probe(slot: Slot, operation: str, corpus: Corpus, notes: Notes) -> dict[str, Any]:
    """Return an operation's entry in the table."""
    shape = input_shape(operation)
    about = list(about_of(operation, shape, dict.fromkeys(shape.members, "")))
    if operation in notes.uses:
        return {NOT_PROBED: "it only uses a resource", "about": about}
    known = corpus.sites.get(operation, ())
    probers: list[Prober] = []
    covered: set[MemberPath] = set()
    problem = _NOT_SENT
    failed = 0
    for site in rank_sites(known) or _synthetic_sites(operation):
        if probers and _sent_paths(site) <= covered:
            continue
        try:
            probers.append(Prober(slot, site, corpus, notes))
            covered |= _sent_paths(site)
        except ProbeError as error:
            problem = str(error) if known else _NOT_SENT
            failed += 1
        if len(probers) == _MAX_SITES or failed == _MAX_FAILED_SITES:
            break
    if not probers:
        return {NOT_PROBED: problem, "about": about}
    tables = [(prober.site, prober.members()) for prober in probers]
    return {
        "about": list(probers[0].about),
        "members": merge_tables(tables),
        "tasks": sorted({prober.site.task.task_id for prober in probers} - {0}),
    }


def make_table(
    slots: Sequence[Slot],
    corpus: Corpus,
    notes: Notes,
    operations: Sequence[str],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Return the table for these operations and those in the corpus. ``report`` is called with one
    progress line per operation."""
    waiting: SimpleQueue[Slot] = SimpleQueue()
    for slot in slots:
        waiting.put(slot)

    def probe_operation(operation: str) -> tuple[str, dict[str, Any]]:
        slot = waiting.get()
        try:
            slot.respawn()
            began = time.monotonic()
            entry = probe(slot, operation, corpus, notes)
            report(
                f"{operation}: {len(entry.get('members', ()))} members, "
                f"{time.monotonic() - began:.1f} s"
            )
            return operation, entry
        finally:
            waiting.put(slot)

    with ThreadPoolExecutor(len(slots)) as threads:
        entries = dict(threads.map(probe_operation, sorted({*operations, *corpus.sites})))
    return {"versions": versions(), "operations": entries}
