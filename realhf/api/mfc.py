"""Defines model function calls: the nodes of the dataflow graph (docs/reference/dataflow.md 3).

Key names in an ``MFCDef`` are the names of the graph. An interface that uses other names says so with the remaps, which
read ``{graph name: interface name}`` for inputs and ``{interface name: graph name}`` for outputs: each reads in the
direction the data flows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from realhf.api.sample import MicroBatchSpec


class InterfaceType(Enum):
    """Says which method of the interface a call runs. The value is the method's name."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"

    @property
    def produces_keys(self) -> bool:
        """Whether a call of this type answers with a sample (generation, inference) or with statistics only."""
        return self in (InterfaceType.GENERATE, InterfaceType.INFERENCE)


@dataclass(frozen=True)
class MFCDef:
    """One model function call.

    ``interface`` is a registered name, ``interface_args`` its keyword arguments. ``n_seqs`` is the number of
    *samples* (task groups) one call takes; it must divide the largest ``n_seqs`` of the graph.
    ``optional_input_keys`` bind only if somebody produces them. ``balance`` decides how a call is split over
    several workers: equal ``tokens`` or equal ``count``. ``timeout_s`` bounds one call, in seconds.

    Raises ValueError on a value that cannot be right by itself; what concerns several MFCs is checked by
    ``build_graph``.
    """

    name: str
    model_role: str
    interface_type: InterfaceType
    interface: str
    interface_args: Mapping[str, Any] = field(default_factory=dict)
    n_seqs: int = 1
    input_keys: tuple[str, ...] = ()
    output_keys: tuple[str, ...] = ()
    input_key_remap: Mapping[str, str] = field(default_factory=dict)
    output_key_remap: Mapping[str, str] = field(default_factory=dict)
    optional_input_keys: tuple[str, ...] = ()
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    balance: str = "tokens"
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        problems = [text for bad, text in self._checks() if bad]
        if problems:
            raise ValueError(f"model function call {self.name!r}: " + "; ".join(problems))

    def _checks(self) -> list[tuple[bool, str]]:
        declared = (*self.input_keys, *self.optional_input_keys)
        twice = sorted({k for k in declared if declared.count(k) > 1})
        twice_out = sorted({k for k in self.output_keys if self.output_keys.count(k) > 1})
        stray_in = sorted(set(self.input_key_remap) - set(declared))
        stray_out = sorted(set(self.output_key_remap.values()) - set(self.output_keys))
        return [
            (not self.name or self.name.startswith("__"), "the name must not be empty or start with '__'"),
            (not self.model_role, "model_role is empty"),
            (self.n_seqs < 1, f"n_seqs is {self.n_seqs}, must be at least 1"),
            (self.timeout_s <= 0, f"timeout_s is {self.timeout_s}, must be positive"),
            (self.balance not in ("tokens", "count"), f"balance {self.balance!r} is not tokens or count"),
            (bool(twice), f"input keys declared twice: {', '.join(twice)}"),
            (bool(twice_out), f"output keys declared twice: {', '.join(twice_out)}"),
            (bool(stray_in), f"input_key_remap names keys it does not take: {', '.join(stray_in)}"),
            (bool(stray_out), f"output_key_remap yields keys it does not output: {', '.join(stray_out)}"),
            (_not_injective(self.input_key_remap), "input_key_remap maps two keys to one name"),
            (_not_injective(self.output_key_remap), "output_key_remap maps two keys to one name"),
        ]


def _not_injective(remap: Mapping[str, str]) -> bool:
    return len(set(remap.values())) != len(remap)
