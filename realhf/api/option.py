"""Configuration options: dataclass fields with a description, a default, and the allowed values.

    @dataclass
    class MarginOptions:
        '''Description of the section as a whole.'''

        margin: float = option(0.5, "Maximum absolute advantage; larger ones are clipped.", above=0, at_most=10)

    @dataclass
    class Config(ExperimentConfig):
        algorithm: MarginOptions = section(MarginOptions)

The help, the reference page and error messages are generated from the fields. A section whose
options depend on each other has a method ``problems(self, name)``, see ``Checked``. A field also
declares with ``on_resume`` whether its value may change when a run resumes from a checkpoint.
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
"""Effect of a changed option on a run that resumes from a checkpoint. ``free``: the new value is
used, because it only affects how the run is executed. ``warns``: the new value is used from the
checkpoint on, with a warning. ``refuses``: the change is an error, because it would be another
experiment. The default is ``refuses``."""

MAX_SEED = 2**63 - 1
"""Largest seed that all random generators accept as a signed 64-bit integer."""
REFERENCE = "FILE.py:NAME"
"""Form in which the command line names a custom component."""
_KEY = "option"
"""Key of the ``Option`` in a field's metadata."""
_UNUSED_BECAUSE = "unused_because"
"""Key of a section's ``unused_because`` text in a field's metadata."""
_ON_RESUME = "on_resume"
"""Key of a section's ``on_resume`` in a field's metadata."""


@dataclass(frozen=True)
class Option:
    """Properties of an option other than its default."""

    about: str = ""
    """Description, one sentence."""
    at_least: float | None = None
    """Inclusive lower bound."""
    above: float | None = None
    """Exclusive lower bound."""
    at_most: float | None = None
    """Inclusive upper bound."""
    choices: tuple[str, ...] = ()
    """Allowed values; () allows any value."""
    registry: str = ""
    """Registry in ``realhf.registry`` whose names are the allowed values."""
    reference: bool = False
    """Whether ``FILE.py:NAME`` is allowed in addition to ``choices`` or ``registry``."""
    retired: Mapping[str, str] = field(default_factory=dict)
    """Values that are no longer allowed, with advice on what to use instead."""
    unused_because: str = ""
    """Reason why the option may have no effect, such as ``only adv_estimator=gae has values``. The
    error about an option that was set but not read ends with it."""
    on_resume: OnResume | None = None
    """Effect of a changed value on resume; None to inherit it from the section."""

    def bound(self) -> str:
        """Return the bounds as text, such as ``at least 1`` or ``between 0 and 1``; "" if there are
        none."""
        low = self.at_least
        high = self.at_most
        if low is not None and high is not None:
            return f"between {_format_number(low)} and {_format_number(high)}"
        parts = []
        if low is not None:
            parts.append(f"at least {_format_number(low)}")
        if self.above is not None:
            parts.append("positive" if self.above == 0 else f"above {_format_number(self.above)}")
        if high is not None:
            parts.append(f"at most {_format_number(high)}")
        return " and ".join(parts)

    def is_within_bounds(self, value: float) -> bool:
        """Return whether a number is within the bounds. If the option has any bounds, infinity and
        NaN are outside of them."""
        low = self.at_least is None or value >= self.at_least
        high = self.at_most is None or value <= self.at_most
        finite = not self.bound() or abs(value) != math.inf
        return low and (self.above is None or value > self.above) and high and finite


class NamedOption(NamedTuple):
    """An option of a configuration, with its name and value."""

    name: str
    """Dotted name, such as ``actor.optimizer.lr``."""
    option: Option
    """Properties of the option, including those inherited from its sections."""
    value: Any
    """Value of the option."""


@runtime_checkable
class Checked(Protocol):
    """A section with checks across its options."""

    def problems(self, name: str) -> Iterable[str]:
        """Yield a line for each invalid combination of options. ``name`` is the section's dotted
        name.

        Called only if each option is valid by itself."""
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
    unused_because: str = "",
    on_resume: OnResume | None = None,
) -> Any:
    """Return a dataclass field for an option. The arguments are the fields of ``Option``.

    A default list or mapping is copied for every instance. Bounds and choices apply to each item of
    a list, and None is allowed wherever the type allows it.
    """
    properties = Option(
        about,
        at_least,
        above,
        at_most,
        tuple(choices),
        registry,
        reference,
        retired,
        unused_because,
        on_resume,
    )
    metadata = {_KEY: properties}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(
    kind: type[Any],
    *,
    unused_because: str = "",
    on_resume: OnResume | None = None,
    **defaults: Any,
) -> Any:
    """Return a dataclass field for a section of the class ``kind``.

    ``defaults`` replaces defaults of ``kind``. ``unused_because`` and ``on_resume`` (see
    ``Option``) apply to all options of the section that do not set them.
    """
    return field(
        default_factory=lambda: kind(**defaults),
        metadata={_UNUSED_BECAUSE: unused_because, _ON_RESUME: on_resume},
    )


def with_path(options: type[Any], path: str, about: str) -> type[Any]:
    """Return a subclass of ``options`` with an additional option ``path``, which names the chosen
    component. Return ``options`` itself if it already has that option."""
    if any(every.name == "path" for every in fields(options)):
        return options
    return _add_field(options, "path", str, option(path, about))


def with_section(config: type[C], name: str, kind: type[Any]) -> type[C]:
    """Return a subclass of ``config`` with a section ``name`` of the class ``kind``, which replaces
    any section of that name."""
    replaced = next((every.metadata for every in fields(config) if every.name == name), {})  # type: ignore[arg-type]
    on_resume = replaced[_KEY].on_resume if _KEY in replaced else replaced.get(_ON_RESUME)
    return _add_field(config, name, kind, section(kind, on_resume=on_resume))


def _add_field(base: type[Any], name: str, kind: type[Any], default: Any) -> type[Any]:
    """Return a subclass of ``base`` with one more field and with the same class name, module and
    docstring."""
    derived = make_dataclass(base.__name__, [(name, kind, default)], bases=(base,))
    derived.__module__ = base.__module__
    derived.__doc__ = base.__doc__
    return derived


def walk(
    config: Any, name: str = "", unused_because: str = "", on_resume: OnResume = "refuses"
) -> Iterator[NamedOption]:
    """Yield all options of a section and its subsections, in the order of the fields.

    Options inherit ``unused_because`` and ``on_resume`` from their sections. A field that was not
    created by ``option`` has an empty description."""
    for every in fields(config):
        value = getattr(config, every.name)
        dotted = f"{name}.{every.name}" if name else every.name
        if is_dataclass(value):
            metadata = every.metadata
            yield from walk(
                value,
                dotted,
                metadata.get(_UNUSED_BECAUSE) or unused_because,
                metadata.get(_ON_RESUME) or on_resume,
            )
        else:
            own: Option = every.metadata.get(_KEY, Option())
            inherited = replace(
                own,
                unused_because=own.unused_because or unused_because,
                on_resume=own.on_resume or on_resume,
            )
            yield NamedOption(dotted, inherited, value)


def sections(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a section and all of its subsections, with their dotted names."""
    yield name, config
    for every in fields(config):
        if is_dataclass(value := getattr(config, every.name)):
            yield from sections(value, f"{name}.{every.name}" if name else every.name)


def problems(
    config: Any, name: str = "", known: Callable[[str], Iterable[str]] | None = None
) -> Iterator[str]:
    """Yield a line for each mistake in a section: values out of range or unknown, then the
    sections' own checks.

    ``known`` returns the names in a registry; if it is None, options with a registry are not
    checked against it.
    """
    invalid = []
    for entry in walk(config, name):
        if line := _find_problem(entry, known):
            invalid.append(entry.name)
            yield line
    for dotted, part in sections(config, name):
        prefix = f"{dotted}." if dotted else ""
        if isinstance(part, Checked) and not any(option.startswith(prefix) for option in invalid):
            yield from part.problems(dotted)


def _find_problem(entry: NamedOption, known: Callable[[str], Iterable[str]] | None) -> str:
    """Return a line about the first invalid value of an option, or "" if all are valid."""
    name, option, value = entry
    allowed = [*known(option.registry)] if option.registry and known else [*option.choices]
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if item is None or isinstance(item, (bool, Enum, Mapping)):
            continue
        if item in option.retired:
            return f"{name}={item}: is no longer supported; {option.retired[item]} (known: {', '.join(allowed)})"
        if (
            allowed
            and item not in allowed
            and not (option.reference and split_reference(str(item)).place)
        ):
            own = f"; one of your own is {REFERENCE}" if option.reference else ""
            return f"{name}={item}: {_unknown_value(str(item), allowed)}{own}"
        if isinstance(item, (int, float)) and not option.is_within_bounds(item):
            bound = option.bound() + (" and finite" if abs(item) == math.inf else "")
            return f"{name}={item}: must be {bound}{f'. {option.about}' if option.about else ''}"
    return ""


def _format_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _unknown_value(value: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(value, allowed, n=1)
    return f"unknown (known: {', '.join(allowed)})" + (
        f"; did you mean {close[0]!r}?" if close else ""
    )
