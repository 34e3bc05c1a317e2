"""An option says at its field what it means, what it is by default and which values it takes.

    @dataclass
    class MarginOptions:
        '''What the section as a whole is about.'''

        margin: float = option(0.5, "Advantages are cut at this distance from 0.", above=0, at_most=10)

    @dataclass
    class Config(ExperimentConfig):
        algorithm: MarginOptions = section(MarginOptions)

Help, the reference of options and refusals are made from the fields, whoever declares them. A section whose options
depend on each other has a method ``problems(self, name)``, see ``Checked``. Whether a run that goes on may have another
value than before stands at the field, too: ``on_resume``.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from realhf.base.plugin import split_reference

C = TypeVar("C")

OnResume = Literal["free", "warns", "refuses"]
"""What a run that goes on after a checkpoint does about an option that is not what it was. ``free``: nothing, it is
about how the run is carried out; ``warns``: it takes the new value from there on and says so; ``refuses``: it would be
another experiment. An option says ``refuses`` unless it says something else."""

MAX_SEED = 2**63 - 1
"""No random generator of the libraries takes a larger seed as a signed number."""
REFERENCE = "FILE.py:NAME"
_KEY = "option"
_IDLE = "idle"
_ON_RESUME = "on_resume"


@dataclass(frozen=True)
class Option:
    """What a field says about itself beside its default. ``about``: one sentence; ``registry``: the values are the
    names of a registry in ``realhf.registry``; ``reference``: one of one's own may be named as well, as
    ``FILE.py:NAME``; ``retired``: values that are refused now, and what to take instead;
    ``idle``: why the option may have been set and read by nobody;
    ``on_resume``: None for what its section says."""

    about: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    registry: str = ""
    reference: bool = False
    retired: Mapping[str, str] = field(default_factory=dict)
    idle: str = ""
    on_resume: OnResume | None = None

    def bound(self) -> str:
        """``at least 1``, ``between 0 and 1``, ...; empty if every number will do."""
        low, high = self.at_least, self.at_most
        if low is not None and high is not None:
            return f"between {_number(low)} and {_number(high)}"
        found = []
        if low is not None:
            found.append(f"at least {_number(low)}")
        if self.above is not None:
            found.append("positive" if self.above == 0 else f"above {_number(self.above)}")
        if high is not None:
            found.append(f"at most {_number(high)}")
        return " and ".join(found)

    def holds(self, value: float) -> bool:
        """Whether a number lies within the bounds; an infinite one within none, and not-a-number never."""
        low = self.at_least is None or value >= self.at_least
        high = self.at_most is None or value <= self.at_most
        finite = not self.bound() or abs(value) != math.inf
        return low and (self.above is None or value > self.above) and high and finite


class Found(NamedTuple):
    """An option of a configuration under its dotted name."""

    name: str
    option: Option
    value: Any


@runtime_checkable
class Checked(Protocol):
    """A section with checks across its options."""

    def problems(self, name: str) -> Iterable[str]:
        """What is wrong with the options together, a line each; ``name`` is the section's own. Asked only when each of
        its options is right by itself."""
        ...


def option(
    default: Any,
    about: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: Sequence[str] = (),
    registry: str = "",
    reference: bool = False,
    retired: Mapping[str, str] = {},
    idle: str = "",
    on_resume: OnResume | None = None,
) -> Any:
    """A dataclass field. A list or mapping is copied for every instance; bounds and choices hold for each item of a
    list, and None is always allowed where the type allows it."""
    about_it = Option(about, at_least, above, at_most, tuple(choices), registry, reference, retired, idle, on_resume)
    metadata = {_KEY: about_it}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type[Any], *, idle: str = "", on_resume: OnResume | None = None, **changed: Any) -> Any:
    """A dataclass field that holds a section. ``changed``: defaults that differ from those of ``kind``; ``idle`` and
    ``on_resume``: of every option in it that has none of its own."""
    return field(default_factory=lambda: kind(**changed), metadata={_IDLE: idle, _ON_RESUME: on_resume})


def with_path(options: type[Any], path: str, about: str) -> type[Any]:
    """Return the options of a part that was chosen, and the option ``path`` that names the part. ``options`` itself
    where it has a ``path``."""
    if any(every.name == "path" for every in fields(options)):
        return options
    return _derived(options, "path", str, option(path, about))


def with_section(config: type[C], name: str, kind: type[Any]) -> type[C]:
    """Return ``config`` with a section more, or with another one under the same name."""
    before = next((every.metadata for every in fields(config) if every.name == name), {})  # type: ignore[arg-type]
    on_resume = before[_KEY].on_resume if _KEY in before else before.get(_ON_RESUME)
    return _derived(config, name, kind, section(kind, on_resume=on_resume))


def _derived(base: type[Any], name: str, kind: type[Any], default: Any) -> type[Any]:
    found = make_dataclass(base.__name__, [(name, kind, default)], bases=(base,))
    found.__module__, found.__doc__ = base.__module__, base.__doc__
    return found


def walk(config: Any, name: str = "", idle: str = "", on_resume: OnResume = "refuses") -> Iterator[Found]:
    """Every option of a section and of those in it, in the order of the fields; what it does not say itself is what its
    section says. A field that was not made by ``option`` has an empty description."""
    for every in fields(config):
        value, dotted = getattr(config, every.name), f"{name}.{every.name}" if name else every.name
        if is_dataclass(value):
            about = every.metadata
            yield from walk(value, dotted, about.get(_IDLE) or idle, about.get(_ON_RESUME) or on_resume)
        else:
            known: Option = every.metadata.get(_KEY, Option())
            resumed = known.on_resume or on_resume
            yield Found(dotted, replace(known, idle=known.idle or idle, on_resume=resumed), value)


def sections(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The section itself and all in it, with their dotted names."""
    yield name, config
    for every in fields(config):
        if is_dataclass(value := getattr(config, every.name)):
            yield from sections(value, f"{name}.{every.name}" if name else every.name)


def problems(config: Any, name: str = "", known: Callable[[str], Iterable[str]] | None = None) -> Iterator[str]:
    """What is wrong with a section, a line each: options out of range or unknown, then the sections' own checks.
    ``known`` gives the names of a registry; without it they are not checked."""
    wrong = []
    for found in walk(config, name):
        if line := _problem(found, known):
            wrong.append(found.name)
            yield line
    for dotted, part in sections(config, name):
        inside = f"{dotted}." if dotted else ""
        if isinstance(part, Checked) and not any(option.startswith(inside) for option in wrong):
            yield from part.problems(dotted)


def _problem(found: Found, known: Callable[[str], Iterable[str]] | None) -> str:
    """The line about the first value that cannot be, empty if there is none."""
    name, about, value = found
    allowed = [*known(about.registry)] if about.registry and known else [*about.choices]
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if item is None or isinstance(item, (bool, Enum, Mapping)):
            continue
        if item in about.retired:
            return f"{name}={item}: is gone; {about.retired[item]} (known: {', '.join(allowed)})"
        if allowed and item not in allowed and not (about.reference and split_reference(str(item)).place):
            own = f"; one of your own is {REFERENCE}" if about.reference else ""
            return f"{name}={item}: {_unknown(str(item), allowed)}{own}"
        if isinstance(item, (int, float)) and not about.holds(item):
            bound = about.bound() + (" and finite" if abs(item) == math.inf else "")
            return f"{name}={item}: must be {bound}{f'. {about.about}' if about.about else ''}"
    return ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _unknown(value: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(value, allowed, n=1)
    return f"unknown (known: {', '.join(allowed)})" + (f"; did you mean {close[0]!r}?" if close else "")
