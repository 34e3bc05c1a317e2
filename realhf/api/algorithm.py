"""User-defined policy-gradient algorithms in one file: advantage, loss, options and preset.

    python -m realhf.launch experiment=grpo env=countdown ppo.algo=FILE.py:NAME
    algorithm.OPTION=VALUE

``NAME`` is an ``Algorithm`` in that file. Every process that computes with the algorithm imports
the file; no other file needs to change (docs/extend/algorithm.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from realhf.api.option import problems
from realhf.base.plugin import load_reference, split_reference
from realhf.base.text import suggest_names

T = TypeVar("T")
CLIP_OPTIONS = ("eps_clip", "eps_clip_higher", "c_clip", "ratio")
"""Options of the section ``ppo`` that only some losses read."""
LOSS = "loss"
"""Option of the section ``ppo`` that names the loss."""
ADVANTAGES = "adv_estimator"
"""Option of the section ``ppo`` that names the advantage estimator."""
DECLARED_CLIP_OPTIONS = "clip_options"
"""Attribute of a registered loss function with the options in ``CLIP_OPTIONS`` that it reads."""
_ARGUMENTS = {"loss": ("terms", "ppo", "own"), "advantages": ("scores", "valid", "group", "own")}
"""Argument names of an algorithm's functions, for error messages."""


@dataclass(frozen=True)
class Algorithm:
    """A policy-gradient algorithm. Everything that it does not define is taken from GRPO.

    ``loss(terms, ppo, own)`` returns the ``TokenLoss`` of ``LossTerms`` under the resolved options
    ``ppo`` of ``realhf.algorithms``. ``advantages(scores, valid, group, own)`` takes f32 (n,), bool
    (n,) and i64 (n,), with an entry for each rollout, and returns f32 (n,), exactly 0 where not
    ``valid``. Otherwise both behave like a registered loss and estimator
    (docs/extend/policy_loss.md). ``own`` is an instance of ``options``, None without options.

    Raises ValueError for a contradictory definition.
    """

    preset: Mapping[str, Any] = field(default_factory=dict)
    """Default values of options in the section ``ppo``, like those that ``ppo.algo=grpo`` sets."""
    loss: Callable[[Any, Any, Any], Any] | None = None
    """Loss function; None to use the loss that ``ppo.loss`` names."""
    advantages: Callable[[Any, Any, Any, Any], Any] | None = None
    """Advantage function; None to use the estimator that ``ppo.adv_estimator`` names."""
    options: type[Any] | None = None
    """Dataclass with the algorithm's own options as ``option`` fields. They form the section
    ``algorithm``."""
    clip_options: tuple[str, ...] = ()
    """Options in ``CLIP_OPTIONS`` that the loss reads. Setting any other one is an error."""
    compares: bool = True
    """Whether the advantages compare rollouts, so that groups need at least two of them."""

    def __post_init__(self) -> None:
        for name, value in ((LOSS, self.loss), (ADVANTAGES, self.advantages)):
            if value is not None and name in self.preset:
                raise ValueError(
                    f"preset: {name}={self.preset[name]} conflicts with the algorithm's own "
                    "function; remove one of them"
                )
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self, name)
            if function is not None and not _accepts_arguments(function, len(arguments)):
                raise ValueError(f"{name}: must be a function of ({', '.join(arguments)})")
        if unknown := [name for name in self.clip_options if name not in CLIP_OPTIONS]:
            raise ValueError(
                f"clip_options: {unknown[0]!r} is not one of {', '.join(CLIP_OPTIONS)}"
            )
        if self.clip_options and self.loss is None:
            raise ValueError("clip_options: need a loss")
        if "algo" in self.preset:
            raise ValueError("preset: must not contain algo; list the values instead")
        self._check_options()

    def _check_options(self) -> None:
        if self.options is None:
            return
        if not (isinstance(self.options, type) and is_dataclass(self.options)):
            raise ValueError(f"options: must be a dataclass, not {self.options!r}")
        if self.loss is None and self.advantages is None:
            raise ValueError("options: they have no effect without a loss or advantages")
        try:
            self.options()
        except TypeError as error:
            raise ValueError(
                f"options: every field of {self.options.__name__} needs a default ({error})"
            ) from None

    def defaults(self, reference: str) -> Mapping[str, Any]:
        """Return the preset. If the algorithm defines a loss or advantages, the options that name
        these contain the algorithm's ``reference``."""
        own = {LOSS: self.loss, ADVANTAGES: self.advantages}
        return {
            **self.preset,
            **{name: reference for name, function in own.items() if function is not None},
        }

    def read_options(self, section: Any) -> Any:
        """Return an instance of ``options`` with the values of ``section``; None if the algorithm
        has no options.

        section: a dataclass or a mapping; None for the defaults. Raises ValueError that names an
        unknown or invalid option.
        """
        if self.options is None:
            return None
        known = [option.name for option in fields(self.options)]
        if not isinstance(section, Mapping):
            section = (
                {name: getattr(section, name) for name in known} if section is not None else {}
            )
        for name in section:
            if name not in known:
                raise ValueError(
                    f"algorithm.{name} is not an option{suggest_names(str(name), known)}"
                )
        options = self.options(**section)
        if wrong := [*problems(options, "algorithm")]:
            raise ValueError("\n".join(wrong))
        return options


def reads_clip_options(*names: str) -> Callable[[T], T]:
    """Return a decorator declaring which of ``CLIP_OPTIONS`` a registered loss function reads.

    Setting one that the loss does not declare is an error, because it would do nothing. The
    decorator goes below ``policy_losses.register``. Raises ValueError for another name.
    """
    if unknown := [name for name in names if name not in CLIP_OPTIONS]:
        raise ValueError(
            f"reads_clip_options: {unknown[0]!r} is not one of {', '.join(CLIP_OPTIONS)}"
        )

    def declare(loss: T) -> T:
        """Store the names in an attribute of ``loss`` and return ``loss``."""
        setattr(loss, DECLARED_CLIP_OPTIONS, names)
        return loss

    return declare


def _accepts_arguments(function: Any, arguments: int) -> bool:
    """Return whether ``function`` can be called with this number of positional arguments."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*range(arguments))
    except (TypeError, ValueError):
        return False
    return True


def is_user_algorithm(algo: str) -> bool:
    """Return whether the value ``algo`` of ``ppo.algo`` refers to a user's algorithm instead of a
    preset."""
    return bool(split_reference(algo).place)


def load_algorithm(reference: str) -> Algorithm:
    """Import and return the algorithm that ``file.py:Name`` or ``package.module:Name`` refers to.

    Raises ValueError with one sentence that says what is wrong and where.
    """
    if not split_reference(reference).name:
        raise ValueError(f"ppo.algo={reference}: name the algorithm in it, {reference}:NAME")
    try:
        module, name = load_reference(reference)
    except ValueError as error:
        raise ValueError(f"ppo.algo={error}") from None
    value = getattr(module, name)
    if not isinstance(value, Algorithm):
        kind = (
            f"the class {value.__name__}"
            if isinstance(value, type)
            else f"a {type(value).__name__}"
        )
        raise ValueError(
            f"ppo.algo={reference}: is {kind}, expected an Algorithm (realhf.api.algorithm)"
        )
    return value
