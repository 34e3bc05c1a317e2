"""All options of a configuration class, by their dotted names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from realhf.api.config import ExperimentConfig
from realhf.api.config.option import Found, sections, walk


class Schema:
    """The options of one configuration class, with their defaults."""

    def __init__(self, kind: type[ExperimentConfig] = ExperimentConfig) -> None:
        self.kind = kind

    @cached_property
    def options(self) -> Mapping[str, Found]:
        """Dotted name to option, in the order of the dataclasses; the value is the default."""
        return {found.name: found for found in walk(self.kind())}

    @cached_property
    def sections(self) -> Mapping[str, Any]:
        """Dotted name to a section with its defaults, the whole configuration left out."""
        return {name: part for name, part in sections(self.kind()) if name}

    def mapping_of(self, key: str) -> str:
        """The option that holds a mapping and that ``key`` is, or is a name in; empty if there is none."""
        mappings = (name for name, found in self.options.items() if isinstance(found.value, dict))
        return next((name for name in mappings if key == name or key.startswith(f"{name}.")), "")

    def unknown(self, name: str) -> str:
        """What is said about an option that does not exist: the closest one, with its sentence."""
        close = close_name(name, [*self.options]) or self._same_leaf(name)
        if not close:
            return f"unknown option {name!r}"
        return f"unknown option {name!r}; did you mean {close!r}? {self.options[close].option.about}".rstrip()

    def _same_leaf(self, name: str) -> str:
        """An option whose last part resembles the last part of ``name`` (``lr`` finds ``actor.optimizer.lr``)."""
        leaves = {option.rpartition(".")[2]: option for option in reversed([*self.options])}
        return leaves.get(close_name(name.rpartition(".")[2], [*leaves], cutoff=0.75), "")

    def set_in(self, path: Path, group: str = "") -> dict[str, Any]:
        """The dotted options that a YAML file sets itself, with their values; {} if there is no such file. What a file
        of a ``group`` says is about the section of that name, unless its first line says ``@package _global_``."""
        import yaml

        def flat(part: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
            for key, value in part.items():
                name = f"{prefix}{key}"
                if isinstance(value, Mapping) and name not in self.options:
                    yield from flat(value, f"{name}.")
                else:
                    yield name, value

        text = path.read_text(encoding="utf-8") if path.exists() else ""
        prefix = f"{group}." if group and "@package _global_" not in text else ""
        return {name: value for name, value in flat(yaml.safe_load(text) or {}, prefix) if name in self.options}


def close_name(name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """The known name that resembles ``name`` most, empty if none does."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")
