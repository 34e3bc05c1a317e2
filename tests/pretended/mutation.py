"""Mutants by rule of the code that computes on a GPU: at every place that matches a rule, the code
is replaced by a call that does the same, or the mutant of the place if that is the active one.

So all mutants are compiled once, under the names and line numbers of their files, and none is
written to a file. A place also notes which tests reach it, and in which of them the mutant would
change anything at all.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    # the loss
    "realhf.algorithms.policy_loss",
    "realhf.algorithms.train_step",
    "realhf.algorithms.critic",
    "realhf.algorithms.preference",
    "realhf.algorithms.sft",
    "realhf.tinker.losses",
    # the training engine
    "realhf.backends.training.torch_engine",
    "realhf.backends.training.micro_batches",
    "realhf.backends.training.packed_forward",
    "realhf.backends.training.selected_logprobs",
    "realhf.backends.training.varlen_attention",
    "realhf.backends.training.optimizer",
    "realhf.backends.training.lora",
    # transfer and publication of weights
    "realhf.backends.embedded.weight_copy",
    "realhf.backends.vllm.device_transfer",
    "realhf.transport.weights",
    "realhf.base.tensor_digest",
)
"""Modules of which mutants are made."""
DEVICE = "device dropped"
FLOAT = ".float() added"
GRAD = "gradients not switched off"
DETACH = ".detach() dropped"
RELEASE = "release dropped"
KEPT = "reference kept"
WAIT = ".cpu() added"
WITHOUT_EFFECT = {
    DEVICE: "is on the right device anyway",
    FLOAT: "is fp32 or on the host anyway",
    GRAD: "is called where gradients are off",
    DETACH: "has no gradient anyway",
    RELEASE: "has nothing to release",
    KEPT: "has no tensor of the device",
    WAIT: "has no tensor of the device",
}
"""The rules, and why a mutant of each may change nothing."""
_NAME = "__mutant__"
_PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "matmul", "linear"})
_OF_FACTORS = frozenset({"_Products", "selected_logprobs", "most_likely_ids"})
"""Functions of the product that multiply their first two arguments."""
_RELEASES = frozenset(
    {"zero_grad", "release", "release_generation", "drop_merged", "free", "clear", "remove"}
)
"""Methods that let go of memory."""
_LOOPS = frozenset({"parts"})
"""What loops over micro-batches iterate over."""


@dataclass(frozen=True)
class Place:
    """A place in the product where a rule matches."""

    rule: str
    """The rule."""
    file: str
    """File, relative to the repository."""
    line: int
    """Line of the code that is mutated."""
    column: int
    """Column of it."""
    function: str
    """Name of the function around it; "" for none."""
    lines: range
    """Lines of that function, or of the code itself."""
    code: str
    """The code before it is mutated."""

    @property
    def key(self) -> str:
        """Text that tells the place from all others."""
        return f"{self.rule} {self.file}:{self.line}:{self.column}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.rule}: {self.code}"


class Switch:
    """What the instrumented code calls: does what the code did, or the active mutant."""

    def __init__(self) -> None:
        self.active: int | None = None
        self.test = ""
        self.reached: dict[int, set[str]] = {}
        self.effective: dict[int, set[str]] = {}
        self._kept: list[Tensor] = []

    def _is_active(self, place: int, effective: bool) -> bool:
        """Note that a place was reached, and whether its mutant has an effect now; return whether
        the mutant is active."""
        self.reached.setdefault(place, set()).add(self.test)
        if effective:
            self.effective.setdefault(place, set()).add(self.test)
        return place == self.active

    def move(self, place: int, value: Any, device: Any) -> Any:
        """``value.to(device)``."""
        moves = not isinstance(value, Tensor) or value.device != device
        return value if self._is_active(place, moves) else value.to(device)

    def device(self, place: int, device: Any) -> dict[str, Any]:
        """The keyword ``device``."""
        on_gpu = device is not None and torch.device(device).type == "cuda"
        return {} if self._is_active(place, on_gpu) else {"device": device}

    def widen(self, place: int, value: Any) -> Any:
        """``value``, by the mutant as fp32."""
        narrow = isinstance(value, Tensor) and value.is_cuda and value.dtype == torch.bfloat16
        return value.float() if self._is_active(place, narrow) and narrow else value

    def detach(self, place: int, value: Any) -> Any:
        """``value.detach()``."""
        return value if self._is_active(place, value.requires_grad) else value.detach()

    def releases(self, place: int) -> bool:
        """Whether to run a statement that releases memory."""
        return not self._is_active(place, True)

    def keep(self, place: int, value: Any) -> Any:
        """``value``, of which the mutant keeps the tensors."""
        tensors = _find_on_gpu(value)
        if self._is_active(place, bool(tensors)):
            self._kept += tensors
        return value

    def wait(self, place: int, value: Any) -> Any:
        """``value``, for whose tensors the mutant waits."""
        tensors = _find_on_gpu(value)
        if self._is_active(place, bool(tensors)):
            for tensor in tensors:
                tensor.cpu()
        return value

    def without_gradients(self, place: int, mode: Any) -> _Mode:
        """A context manager and decorator, ``torch.no_grad()`` or another one."""
        return _Mode(self, place, mode)


class _Mode:
    """``torch.no_grad()`` that may do nothing."""

    def __init__(self, switch: Switch, place: int, mode: Any) -> None:
        self._switch = switch
        self._place = place
        self._mode = mode
        self._entered = False

    def __enter__(self) -> None:
        self._entered = not self._switch._is_active(self._place, torch.is_grad_enabled())
        if self._entered:
            self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._entered:
            self._mode.__exit__(*error)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        without = self._mode(function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            active = self._switch._is_active(self._place, torch.is_grad_enabled())
            return (function if active else without)(*args, **kwargs)

        return run


def _find_on_gpu(value: Any) -> list[Tensor]:
    """Return the tensors of the GPU in a value."""
    if isinstance(value, Tensor):
        return [value] if value.is_cuda else []
    if isinstance(value, dict):
        value = [*value.values()]
    return (
        [t for each in value for t in _find_on_gpu(each)]
        if isinstance(value, (list, tuple))
        else []
    )


class Instrumenter(ast.NodeTransformer):
    """Replaces the code at all places of one file, which it adds to ``places``."""

    def __init__(self, file: str, places: list[Place]) -> None:
        self._file = file
        self._places = places
        self._functions: list[ast.FunctionDef] = []
        self._loops = 0

    def _add(self, rule: str, node: Any) -> ast.Constant:
        """Add a place, and return its number as code."""
        function = self._functions[-1] if self._functions else None
        around = function or node
        name = function.name if function else ""
        self._places.append(
            Place(
                rule,
                self._file,
                node.lineno,
                node.col_offset,
                name,
                range(around.lineno, (around.end_lineno or around.lineno) + 1),
                " ".join(ast.unparse(node).split())[:100],
            )
        )
        return ast.Constant(len(self._places) - 1)

    def _wrap(self, method: str, rule: str, node: Any, *values: ast.expr) -> Any:
        """Return a call of a method of the switch in place of a node."""
        number = self._add(rule, node)
        method_of = ast.Attribute(ast.Name(_NAME, ast.Load()), method, ast.Load())
        call = ast.Call(method_of, [number, *values], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))

    # ---- functions and loops

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        loops = self._loops
        self._loops = 0
        self._functions.append(node)
        decorators = [self.visit(each) for each in node.decorator_list]
        self.generic_visit(_without_decorators(node))
        self._functions.pop()
        node.decorator_list = decorators
        self._loops = loops
        return node

    def visit_For(self, node: ast.For) -> Any:
        over_parts = isinstance(node.iter, ast.Name) and node.iter.id in _LOOPS
        self._loops += over_parts
        self.generic_visit(node)
        self._loops -= over_parts
        return node

    # ---- values that are kept or waited for

    def visit_Return(self, node: ast.Return) -> Any:
        self.generic_visit(node)
        returns = self._functions[-1].returns
        text = "" if returns is None else ast.unparse(returns)
        if node.value is not None and "Tensor" in text and "Callable" not in text:
            node.value = self._keep_and_wait(node.value)
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        nothing = isinstance(node.value, ast.Constant) and node.value.value is None
        if isinstance(target, ast.Attribute) and target.attr == "grad" and nothing:
            return self._release(node)
        self.generic_visit(node)
        if self._loops and isinstance(target, ast.Name):
            node.value = self._keep_and_wait(node.value)
        return node

    def _keep_and_wait(self, value: ast.expr) -> Any:
        kept = self._wrap("keep", KEPT, value, value)
        wrapped = self._wrap("wait", WAIT, value, kept)
        # the code of the second place is that of the first one
        self._places[-1] = replace(self._places[-1], code=self._places[-2].code)
        return wrapped

    # ---- statements that release memory

    def visit_Expr(self, node: ast.Expr) -> Any:
        call = node.value
        method = call.func if isinstance(call, ast.Call) and not call.args else None
        if isinstance(method, ast.Attribute) and method.attr in _RELEASES:
            return self._release(node)
        self.generic_visit(node)
        return node

    def _release(self, node: ast.stmt) -> ast.stmt:
        test = self._wrap("releases", RELEASE, node)
        return ast.fix_missing_locations(ast.copy_location(ast.If(test, [node], []), node))

    # ---- expressions

    def visit_Call(self, node: ast.Call) -> Any:
        text = ast.unparse(node)
        self.generic_visit(node)
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        if isinstance(function, ast.Attribute):
            if name == "to" and len(node.args) == 1 and "device" in ast.unparse(node.args[0]):
                return self._named(
                    text, self._wrap("move", DEVICE, node, function.value, *node.args)
                )
            if name == "detach" and not node.args:
                return self._named(text, self._wrap("detach", DETACH, node, function.value))
            if name in ("no_grad", "inference_mode") and not node.args:
                return self._named(text, self._wrap("without_gradients", GRAD, node, node))
        if name in _PRODUCTS or name in _OF_FACTORS:
            factors = min(len(node.args), 2 if name in _OF_FACTORS or name != "addmm" else 3)
            for index in range(factors):
                node.args[index] = self._wrap("widen", FLOAT, node.args[index], node.args[index])
        if _makes_tensor(function):
            for keyword in node.keywords:
                if keyword.arg == "device":
                    given = self._named(text, self._wrap("device", DEVICE, node, keyword.value))
                    keyword.arg = None
                    keyword.value = given
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        if isinstance(node.op, ast.MatMult):
            node.left = self._wrap("widen", FLOAT, node.left, node.left)
            node.right = self._wrap("widen", FLOAT, node.right, node.right)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if node.attr == "last_hidden_state" and isinstance(node.ctx, ast.Load):
            return self._wrap("widen", FLOAT, node, node)
        return node

    def _named(self, text: str, wrapped: Any) -> Any:
        """Give the last place the code as it is in the file."""
        self._places[-1] = replace(self._places[-1], code=" ".join(text.split())[:100])
        return wrapped


def _without_decorators(node: ast.FunctionDef) -> ast.FunctionDef:
    node.decorator_list = []
    return node


def _makes_tensor(function: ast.expr) -> bool:
    """Return whether a function is one of torch's or of a tensor's that makes a tensor."""
    if not isinstance(function, ast.Attribute):
        return False
    of_torch = isinstance(function.value, ast.Name) and function.value.id == "torch"
    return of_torch or function.attr.startswith("new_")


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads an instrumented module."""

    places: list[Place]

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        file = str(Path(path).relative_to(ROOT))
        tree = ast.fix_missing_locations(Instrumenter(file, self.places).visit(tree))
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the instrumented modules."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """See ``importlib.abc.MetaPathFinder``."""
        if fullname not in MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        spec.loader = _Loader(fullname, spec.origin)
        spec.loader.places = self._places
        return spec


def instrument() -> tuple[Switch, list[Place]]:
    """Import ``MODULES`` with all their mutants; return the switch and the places. Raises
    RuntimeError if one of them has been imported before."""
    if imported := [name for name in MODULES if name in sys.modules]:
        raise RuntimeError(
            f"{imported[0]} is imported already: mutants need a process of their own"
        )
    switch = Switch()
    places: list[Place] = []
    setattr(builtins, _NAME, switch)
    sys.meta_path.insert(0, _Finder(places))
    for name in MODULES:
        importlib.import_module(name)
    return switch, places


def find_places(sources: Sequence[tuple[str, str]]) -> list[Place]:
    """Return the places in files, given as (name, content)."""
    places: list[Place] = []
    for file, content in sources:
        Instrumenter(file, places).visit(ast.parse(content))
    return places
