"""How the code reads, in figures, and a random sample of it for people to judge.

    python benchmarks/readability.py                           # figures of realhf, workers and experiments
    python benchmarks/readability.py --json FILE               # also as JSON, to compare two commits
    python benchmarks/readability.py --root ../older           # of another checkout
    python benchmarks/readability.py --docstrings 150 --functions 40 --seed 7    # a sample, printed to be read

The figures are no targets: a number can be improved without making the code easier to read. The
sample is what counts: somebody who knows the field but not the project marks each item as fine,
bad, or reading like a translation.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDERS = ("realhf", "workers", "experiments")
WORDS = (
    "told",
    "said",
    "nobody",
    "so many",
    "so much",
    "anew",
    "meanwhile",
    "beside",
    "in vain",
    "owed",
    "witness",
)
"""Words that engineers of this field hardly use, but that this code once used hundreds of times."""
IRREGULAR = frozenset(
    {
        "told",
        "said",
        "made",
        "kept",
        "held",
        "left",
        "gone",
        "done",
        "sent",
        "found",
        "drawn",
        "known",
        "given",
        "taken",
        "chosen",
        "shown",
        "written",
        "brought",
    }
)
NOT_PARTICIPLES = frozenset(
    {
        "add",
        "bed",
        "embed",
        "exceed",
        "feed",
        "grad",
        "led",
        "need",
        "proceed",
        "read",
        "red",
        "seed",
        "shed",
        "speed",
        "spread",
    }
)
"""Words that end like a participle but are nouns or verbs."""
LONG_LINE = 100
DUPLICATE_STATEMENTS = 5
"""Minimum number of statements for comparing function bodies; shorter ones may be equal by
chance."""
NO_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Figures:
    """Counts for a source tree."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    """Lines with at least one token of code. Docstrings are not code."""
    long_lines: int = 0
    """Lines longer than ``LONG_LINE`` columns."""
    tokens: int = 0
    comments: int = 0
    field_doc_lines: int = 0
    """Lines of strings below a field, a variable or a constant."""
    fields: int = 0
    documented_fields: int = 0
    tuple_assignments: int = 0
    """Assignments such as ``a, b = x, y``, including swaps."""
    functions: int = 0
    participles: list[str] = field(default_factory=list)
    """Functions, except properties, whose name begins with a participle."""
    longest_function: tuple[int, str] = (0, "")
    words: Counter[str] = field(default_factory=Counter)
    class_names: Counter[str] = field(default_factory=Counter)
    bodies: Counter[str] = field(default_factory=Counter)
    """Function bodies of at least ``DUPLICATE_STATEMENTS`` statements, with all names removed."""


@dataclass(frozen=True)
class Excerpt:
    """A function or class that a reader may be asked to judge."""

    place: str
    """File and line."""
    name: str
    docstring: str
    source: str


def measure(root: Path, folders: Sequence[str]) -> Figures:
    """Return the counts for the Python files in ``folders`` below ``root``."""
    figures = Figures()
    for path, source in python_files(root, folders):
        figures.files += 1
        count_text(source, figures)
        count_tree(ast.parse(source), str(path.relative_to(root)), figures)
    return figures


def python_files(root: Path, folders: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield (path, text) of each file, in a fixed order."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path, path.read_text(encoding="utf-8")


def count_text(source: str, figures: Figures) -> None:
    """Add the counts of a file's lines, tokens and words."""
    lines = source.splitlines()
    figures.lines += len(lines)
    figures.long_lines += sum(len(line) > LONG_LINE for line in lines)
    rows = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            figures.comments += 1
            continue
        is_docstring = token.type == tokenize.STRING and token.line.lstrip().startswith(
            ('"""', "'''")
        )
        if token.type not in NO_CODE and not is_docstring:
            figures.tokens += 1
            rows.add(token.start[0])
    figures.code_lines += len(rows)
    text = source.lower()
    for word in WORDS:
        figures.words[word] += len(re.findall(rf"\b{word}\b", text))


def count_tree(tree: ast.Module, place: str, figures: Figures) -> None:
    """Add the counts of a file's syntax tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _packs_tuples(node):
            figures.tuple_assignments += 1
        if isinstance(node, Function):
            count_function(node, place, figures)
        if isinstance(node, ast.ClassDef):
            figures.class_names[node.name] += 1
        if isinstance(node, ast.ClassDef | ast.Module):
            count_fields(node, figures)


def _packs_tuples(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def count_function(node: Function, place: str, figures: Figures) -> None:
    """Add the name, length and body of a function. Special methods are left out."""
    if node.name.startswith("__"):
        return
    figures.functions += 1
    is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    if is_participle(node.name) and not is_property:
        figures.participles.append(f"{place}:{node.lineno} {node.name}")
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    figures.longest_function = max(
        figures.longest_function, (length, f"{place}:{node.lineno} {node.name}")
    )
    statements = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
    if statements >= DUPLICATE_STATEMENTS:
        figures.bodies[_shape(node)] += 1


def _shape(node: Function) -> str:
    """Return the body of a function without its docstring and with all names removed."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    text = ast.dump(ast.Module(body, []))
    return re.sub(r"(id|arg|attr|name)='\w+'", r"\1", text)


def is_participle(name: str) -> bool:
    """Return whether the first word of a function's name is a participle, such as ``_accepted`` or
    ``sent_by``."""
    word = name.strip("_").split("_")[0]
    return word not in NOT_PARTICIPLES and (
        word in IRREGULAR or (word.endswith("ed") and len(word) > 3)
    )


def count_fields(node: ast.ClassDef | ast.Module, figures: Figures) -> None:
    """Add the fields of a class or the variables of a module, and the strings that document
    them."""
    for statement, following in (
        zip(node.body, [*node.body[1:], node], strict=True) if node.body else ()
    ):
        if not isinstance(statement, ast.AnnAssign | ast.Assign):
            continue
        documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if documented:
            figures.field_doc_lines += (
                (following.end_lineno or following.lineno) - following.lineno + 1
            )
        if isinstance(node, ast.ClassDef) and isinstance(statement, ast.AnnAssign):
            figures.fields += 1
            is_option = statement.value is not None and "option(" in ast.unparse(statement.value)
            figures.documented_fields += documented or is_option


def excerpts(root: Path, folders: Sequence[str]) -> list[Excerpt]:
    """Return all functions and classes, in a fixed order."""
    found = []
    for path, source in python_files(root, folders):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("__"):
                text = ast.get_source_segment(source, node) or ""
                place = f"{path.relative_to(root)}:{node.lineno}"
                found.append(Excerpt(place, node.name, ast.get_docstring(node) or "", text))
    return found


def print_figures(figures: Figures) -> None:
    """Print the counts, one subject per line."""
    per_thousand = 1000 / max(figures.lines, 1)
    print(f"{figures.files} files, {figures.lines} lines, {figures.code_lines} of them with code")
    print(f"tokens a code line: {figures.tokens / max(figures.code_lines, 1):.1f}")
    print(f"lines over {LONG_LINE} columns: {figures.long_lines}")
    tuples = figures.tuple_assignments
    print(f"tuple assignments: {tuples}, {tuples * per_thousand:.1f} per 1,000 lines")
    share = (figures.comments + figures.field_doc_lines) * per_thousand / 10
    print(f"comments and docs under fields and constants: {share:.1f} % of lines")
    print(
        f"fields with a docstring or an option's text: {figures.documented_fields} of "
        f"{figures.fields}"
    )
    participles = len(figures.participles)
    print(f"functions named by a participle: {participles} of {figures.functions}")
    print("words: " + ", ".join(f"{word} {figures.words[word]}" for word in WORDS))
    twice = sorted(name for name, count in figures.class_names.items() if count > 1)
    print(f"class names defined more than once: {len(twice)}: {', '.join(twice)}")
    length, place = figures.longest_function
    print(f"longest function: {length} lines, {place}")
    duplicates = sum(count - 1 for count in figures.bodies.values())
    print(f"functions whose body repeats another one's, names aside: {duplicates}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout"
    )
    parser.add_argument(
        "--folders", nargs="+", default=FOLDERS, help=f"default: {' '.join(FOLDERS)}"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument(
        "--docstrings", type=int, default=0, help="print so many docstrings, drawn by --seed"
    )
    parser.add_argument(
        "--functions", type=int, default=0, help="print so many functions, drawn by --seed"
    )
    parser.add_argument("--seed", default="0", help="any text, such as a commit's id (default 0)")
    options = parser.parse_args(argv)
    if options.docstrings or options.functions:
        everything = excerpts(options.root, options.folders)
        with_docstring = [excerpt for excerpt in everything if excerpt.docstring]
        draw = random.Random(options.seed)
        for excerpt in draw.sample(with_docstring, min(options.docstrings, len(with_docstring))):
            print(f"--- {excerpt.place} {excerpt.name}\n{excerpt.docstring}\n")
        for excerpt in draw.sample(everything, min(options.functions, len(everything))):
            print(f"=== {excerpt.place}\n{excerpt.source}\n")
        return 0
    figures = measure(options.root, options.folders)
    print_figures(figures)
    if options.json:
        values = {name: value for name, value in vars(figures).items() if name != "bodies"}
        options.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
