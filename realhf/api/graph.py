"""The dataflow graph: model function calls connected by the keys that they produce and consume.

Edges follow from the keys and are not configured (docs/reference/dataflow.md 3). ``build_graph``
checks the graph and reports all problems at once, each with the model function call and the key.
The graph is a ``networkx`` multigraph. Only this module imports ``networkx``, so that processes
without a graph do not load it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import networkx as nx

from realhf.api.experiment import InterfaceType, MFCDef

DATASET = "__dataset__"
"""Node of the data source."""


class GraphError(ValueError):
    """Raised for an invalid graph. ``problems`` lists all reasons, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"the dataflow graph has {len(problems)} problem(s):\n{lines}")


class DataFlowGraph:
    """A validated dataflow graph, built by ``build_graph``. ``warnings`` lists unusual but valid
    properties."""

    def __init__(
        self, mfcs: Sequence[MFCDef], dataset_keys: Sequence[str], log_keys: Sequence[str]
    ) -> None:
        self.mfcs = tuple(mfcs)
        self.dataset_keys = tuple(dataset_keys)
        self.log_keys = tuple(log_keys)
        self.warnings: tuple[str, ...] = ()
        self._by_name = {mfc.name: mfc for mfc in self.mfcs}
        self._producers: dict[str, list[str]] = {key: [DATASET] for key in self.dataset_keys}
        for mfc in self.mfcs:
            for key in mfc.output_keys:
                self._producers.setdefault(key, []).append(mfc.name)
        self._inputs = {mfc.name: self._bound_inputs(mfc) for mfc in self.mfcs}
        self._consumers: dict[str, list[str]] = {}
        for mfc in self.mfcs:
            for key in self._inputs[mfc.name]:
                self._consumers.setdefault(key, []).append(mfc.name)
        self.nx = self._multigraph()
        """Graph with the calls and the data source as nodes, and an edge (producer, consumer, key)
        for each key that is passed between two of them."""

    def _bound_inputs(self, mfc: MFCDef) -> tuple[str, ...]:
        """Return the keys for which a call waits: its required inputs and the optional ones that
        have a producer."""
        optional = (key for key in mfc.optional_input_keys if key in self._producers)
        return (*mfc.input_keys, *optional)

    def _multigraph(self) -> nx.MultiDiGraph:
        graph = nx.MultiDiGraph()
        graph.add_node(DATASET)
        graph.add_nodes_from(mfc.name for mfc in self.mfcs)
        for key, producers in self._producers.items():
            for producer in producers:
                for consumer in self._consumers.get(key, ()):
                    graph.add_edge(producer, consumer, key=key)
        return graph

    def __getitem__(self, name: str) -> MFCDef:
        return self._by_name[name]

    @property
    def n_seqs(self) -> int:
        """N, the number of samples in a train step, which is the largest ``n_seqs`` of all
        calls."""
        return max(mfc.n_seqs for mfc in self.mfcs)

    def inputs(self, name: str) -> tuple[str, ...]:
        """Return the keys for which the call ``name`` waits: its required inputs and the optional
        ones that have a producer."""
        return self._inputs[name]

    def producers(self, key: str) -> tuple[str, ...]:
        """Return the producers of ``key`` (``__dataset__`` for the source). A valid graph has at
        most one."""
        return tuple(self._producers.get(key, ()))

    def consumers(self, key: str) -> tuple[str, ...]:
        """Return the calls that read ``key``, in the order of definition."""
        return tuple(self._consumers.get(key, ()))

    def topological_levels(self) -> list[list[str]]:
        """Return groups of calls such that each group depends only on earlier groups. Calls in one
        group may run concurrently."""
        return [sorted(level) for level in nx.topological_generations(self._calls())]

    def ancestors(self, name: str) -> frozenset[str]:
        """Return the calls on which ``name`` depends directly or indirectly."""
        return frozenset(nx.ancestors(self._calls(), name))

    def cycle(self) -> list[tuple[str, str, str]]:
        """Return the edges of a dependency cycle; [] in a valid graph."""
        try:
            return list(nx.find_cycle(self.nx))
        except nx.NetworkXNoCycle:
            return []

    def _calls(self) -> nx.MultiDiGraph:
        """Return the graph without the data source."""
        return self.nx.subgraph(self._by_name)

    def required_dataset_keys(self) -> list[str]:
        """Return the keys that the data source must provide, sorted."""
        return sorted(key for key in self.dataset_keys if key in self._consumers)

    def summary(self) -> str:
        """Return a text table with one call per line, in topological order."""
        rows = [("level", "call", "role", "method", "n_seqs", "inputs", "outputs")]
        for depth, level in enumerate(self.topological_levels()):
            for name in level:
                mfc = self[name]
                rows.append(
                    (
                        str(depth),
                        name,
                        mfc.model_role,
                        mfc.interface_type.value,
                        str(mfc.n_seqs),
                        ", ".join(self._inputs[name]) or "-",
                        ", ".join(mfc.output_keys) or "-",
                    )
                )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def _merged_edges(self) -> list[tuple[str, str, str]]:
        """Return (producer, consumer, comma-separated keys) for each pair of connected nodes."""
        merged = {
            (DATASET, mfc.name): ["metadata"] for mfc in self.mfcs if not self._inputs[mfc.name]
        }
        for source, target, key in sorted(self.nx.edges(keys=True)):
            merged.setdefault((source, target), []).append(key)
        return [(source, target, ", ".join(keys)) for (source, target), keys in merged.items()]

    def to_mermaid(self) -> str:
        """Return the graph as Mermaid flowchart text."""
        lines = ["flowchart LR", "  dataset[(dataset)]"]
        lines += [
            f'  {m.name}["{m.name}<br/>{m.model_role}.{m.interface_type.value}"]' for m in self.mfcs
        ]
        for source, target, keys in self._merged_edges():
            lines.append(f'  {"dataset" if source == DATASET else source} -- "{keys}" --> {target}')
        return "\n".join(lines) + "\n"

    def to_dot(self) -> str:
        """Return the graph as Graphviz text."""
        lines = [
            "digraph dataflow {",
            "  rankdir=LR;",
            f'  "{DATASET}" [label="dataset", shape=cylinder];',
        ]
        for m in self.mfcs:
            label = f"{m.name}\\n{m.model_role}.{m.interface_type.value}"
            lines.append(f'  "{m.name}" [label="{label}", shape=box];')
        lines += [f'  "{s}" -> "{t}" [label="{k}"];' for s, t, k in self._merged_edges()]
        return "\n".join([*lines, "}"]) + "\n"


def build_graph(
    mfcs: Iterable[MFCDef],
    dataset_keys: Iterable[str],
    log_keys: Iterable[str] = (),
    *,
    roles: Collection[str] | None = None,
) -> DataFlowGraph:
    """Build a graph from model function calls, and check it.

    roles: existing model roles; None to skip the check of roles. An output that is neither read by
    a call nor in ``log_keys`` gives a warning. Raises GraphError with all problems.
    """
    calls = tuple(mfcs)
    if not calls:
        raise GraphError(["there is no model function call"])
    graph = DataFlowGraph(calls, tuple(dict.fromkeys(dataset_keys)), tuple(log_keys))
    names = _name_problems(graph)
    problems = [*names, *_producer_problems(graph), *_input_problems(graph)]
    problems += [] if names else _cycles(graph)
    problems += [*_role_problems(graph, roles), *_output_problems(graph), *_count_problems(graph)]
    graph.warnings = tuple(_unread_outputs(graph))
    if problems:
        raise GraphError(problems)
    return graph


def to_async(
    mfcs: Iterable[MFCDef], also: Collection[str] = ("rew_inf",)
) -> tuple[list[MFCDef], list[MFCDef]]:
    """Split the calls for an asynchronous run: return (calls that stay in the graph, calls that
    rollout workers run).

    Rollout workers run all generating calls and those named in ``also``. The outputs of these calls
    arrive as streamed samples, so for the remaining graph they are dataset keys
    (docs/reference/dataflow.md 3). Raises GraphError if no call generates, or if a call for rollout
    workers needs a key that a remaining call produces.
    """
    calls = list(mfcs)
    leaving = [mfc for mfc in calls if mfc.interface_type is InterfaceType.GENERATE]
    if not leaving:
        raise GraphError(["no call generates, so there is nothing to stream"])
    leaving += [mfc for mfc in calls if mfc.name in also and mfc not in leaving]
    staying = [mfc for mfc in calls if mfc not in leaving]
    left_behind = {key: mfc.name for mfc in staying for key in mfc.output_keys}
    problems = [
        f"{mfc.name!r} would be run by rollout workers, but its key {key!r} is produced by "
        f"{left_behind[key]!r}"
        for mfc in leaving
        for key in mfc.input_keys
        if key in left_behind
    ]
    if problems:
        raise GraphError(problems)
    return staying, leaving


def _name_problems(graph: DataFlowGraph) -> list[str]:
    counts = Counter(mfc.name for mfc in graph.mfcs)
    return [f"{n} model function calls are named {name!r}" for name, n in counts.items() if n > 1]


def _producer_problems(graph: DataFlowGraph) -> list[str]:
    keys = {*graph.dataset_keys, *(key for mfc in graph.mfcs for key in mfc.output_keys)}
    problems = []
    for key in sorted(keys):
        producers = graph.producers(key)
        if len(producers) > 1:
            names = " and ".join("the dataset" if p == DATASET else repr(p) for p in producers)
            problems.append(f"key {key!r} has {len(producers)} producers: {names}")
    return problems


def _input_problems(graph: DataFlowGraph) -> list[str]:
    known = sorted({*graph.dataset_keys, *(key for mfc in graph.mfcs for key in mfc.output_keys)})
    problems = []
    for mfc in graph.mfcs:
        for key in mfc.input_keys:
            if graph.producers(key):
                continue
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            problems.append(
                f"{mfc.name!r} needs key {key!r}, which no call and no dataset produces{hint}"
            )
    return problems


def _cycles(graph: DataFlowGraph) -> list[str]:
    edges = graph.cycle()
    path = "".join(f"{source} -[{key}]-> " for source, _, key in edges)
    return [f"the calls form a cycle: {path}{edges[0][0]}"] if edges else []


def _role_problems(graph: DataFlowGraph, roles: Collection[str] | None) -> list[str]:
    if roles is None:
        return []
    return [
        f"{mfc.name!r} runs on model role {mfc.model_role!r}, which has no model (models: "
        f"{', '.join(sorted(roles)) or 'none'})"
        for mfc in graph.mfcs
        if mfc.model_role not in roles
    ]


def _output_problems(graph: DataFlowGraph) -> list[str]:
    problems = []
    for mfc in graph.mfcs:
        if mfc.interface_type.produces_keys:
            continue
        for key in mfc.output_keys:
            readers = ", ".join(repr(name) for name in graph.consumers(key))
            if readers:
                method = mfc.interface_type.value
                problems.append(
                    f"{mfc.name!r} is a {method} and cannot produce key {key!r}, read by {readers}"
                )
    return problems


def _count_problems(graph: DataFlowGraph) -> list[str]:
    total = graph.n_seqs
    return [
        f"{mfc.name!r} takes n_seqs={mfc.n_seqs} samples, which does not divide the step's {total}"
        for mfc in graph.mfcs
        if total % mfc.n_seqs
    ]


def _unread_outputs(graph: DataFlowGraph) -> list[str]:
    return [
        f"{mfc.name!r} produces key {key!r}, which no call reads and which is not in log_keys"
        for mfc in graph.mfcs
        for key in mfc.output_keys
        if not graph.consumers(key) and key not in graph.log_keys
    ]
