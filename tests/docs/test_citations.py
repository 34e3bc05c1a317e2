"""What the code cites and the docs name exists: sections of the reference, links, files and modules."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve()
REPO = HERE.parents[2]
REFERENCE = "docs/reference"
FOLDERS = ("realhf", "workers", "experiments", "tests", "benchmarks", "configs", "examples")
SECTION = r"\d{1,2}(?:\.\d{1,2})?(?!\d)"
ASIDE = r"(?:\s+\([^()]*\))?"
SECTIONS = rf"{SECTION}{ASIDE}(?:(?:,|,?\s+and|,?\s+to)\s+{SECTION}{ASIDE})*"
CITATION = re.compile(rf"docs/reference/(?P<file>\w+\.md)(?P<rest>\s+(?P<sections>{SECTIONS}))?")
"""The one form: file, space, section; several with commas, "and" and "to", each perhaps with words in brackets."""
LINKED_CITATION = re.compile(
    r"\]\((?:\.\./|reference/|docs/reference/)*(?P<file>dataflow|environment|trajectory|learning)\.md\) "
    rf"(?P<sections>{SECTIONS})"
)
OTHER_SPELLING = re.compile(
    r"(?<![-\w.`])(?:(?:dataflow|environment|trajectory|learning)\s+spec(?:ification)?s?\b"
    r"|spec(?:ification)?s?,?(?:\s+(?:dataflow|environment|trajectory|learning))?,?(?:\s+(?:sections?|tests?))?\s+\d"
    r"|the\s+specifications?\b(?=[^.\n]{0,40}\d))",
    re.IGNORECASE,
)
LINK = re.compile(r"\]\((?P<target>[^()\s]+)\)")
DOCS_PATH = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|png)")
MODULE_PATH = re.compile(r"(?<![\w/.-])realhf/[\w./*-]*[\w/*]")
DOTTED = re.compile(r"(?P<run>python3? -m )?(?<![\w./-])(?P<name>realhf(?:\.\w+)+)(?::(?P<attribute>\w+))?")

TO_BE_WRITTEN = {"realhf.backends.bigram_generation"}
"""Modules that a page of ``docs/extend/`` tells its reader to add."""


def test_every_citation_names_a_section_of_the_reference() -> None:
    """A citation in code or tests is a file of the reference and sections that it has."""
    found, problems = 0, []
    for path, text in _python_files():
        if path == HERE:
            continue
        for citation in CITATION.finditer(text):
            found += 1
            problems += [f"{_at(path, text, citation)}: {problem}" for problem in _citation_problems(citation)]
    assert not problems, "\n".join(problems)
    assert found > 150, f"only {found} citations were found: is the form still the same?"


def test_no_other_spelling_of_a_citation_is_left() -> None:
    """Nobody cites a specification that is not in the repository."""
    problems = [
        f"{_at(path, text, other)}: {other[0]!r}"
        for path, text in _python_files()
        if path != HERE
        for other in OTHER_SPELLING.finditer(text)
        if _in_words(text, other.start())
    ]
    assert not problems, "\n".join(problems)


def test_links_of_the_docs_lead_to_files_and_headings() -> None:
    """Relative links, and paths of docs in any text, exist; anchors are headings of the file that they point into."""
    problems, links = [], 0
    for path, text in _documents():
        for link in LINK.finditer(text):
            target, _, anchor = link["target"].partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            links += 1
            file = path.parent / target if target else path
            if not file.exists():
                problems.append(f"{_at(path, text, link)}: no file {target}")
            elif anchor and anchor not in _anchors(file):
                problems.append(f"{_at(path, text, link)}: {target or path.name} has no heading for #{anchor}")
    for path, text in [*_documents(), *_python_files()]:
        problems += [f"{_at(path, text, named)}: no file {named[0]}"
                     for named in DOCS_PATH.finditer(text)
                     if path != HERE and not (REPO / named[0]).exists()]  # fmt: skip
    assert not problems, "\n".join(problems)
    assert links > 20, f"only {links} links were found"


def test_sections_that_the_docs_point_to_exist() -> None:
    """A link to a file of the reference that is followed by a section names one that the file has."""
    problems, found = [], 0
    for path, text in _documents():
        for link in LINKED_CITATION.finditer(text):
            if not (path.parent.name == "reference" or "reference/" in link[0]):
                continue  # the guides have no numbered sections
            found += 1
            missing = _missing(f"{link['file']}.md", link["sections"])
            problems += [f"{_at(path, text, link)}: {problem}" for problem in missing]
    assert not problems, "\n".join(problems)
    assert found


def test_modules_and_paths_that_the_docs_name_exist() -> None:
    """``realhf/...`` is a file or folder, ``realhf.x.y`` a module or something in one, ``python -m`` can run it."""
    problems, found = [], 0
    for path, text in _documents():
        for named in MODULE_PATH.finditer(text):
            found += 1
            if not (any(REPO.glob(named[0])) if "*" in named[0] else (REPO / named[0]).exists()):
                problems.append(f"{_at(path, text, named)}: no file {named[0]}")
        for named in DOTTED.finditer(text):
            found += 1
            problem = _module_problem(named["name"], named["attribute"], runs=named["run"] is not None)
            problems += [f"{_at(path, text, named)}: {problem}"] if problem else []
    assert not problems, "\n".join(problems)
    assert found > 20, f"only {found} names were found"


def test_what_is_wrong_is_found() -> None:
    """The checks above see a file, a section and a module that do not exist, and each old spelling."""
    assert not _citation_problems(_cited("see docs/reference/environment.md 2.1, 10. Parsing"))
    assert not _citation_problems(_cited("docs/reference/environment.md 7 (Chaos) and 8"))
    assert _citation_problems(_cited("docs/reference/nowhere.md 1"))
    assert _citation_problems(_cited("docs/reference/environment.md 99"))
    assert _citation_problems(_cited("docs/reference/trajectory.md 3.3 to 3.99"))
    assert _citation_problems(_cited("docs/reference/dataflow.md says so"))
    for spelling in ("environment spec 2.1", "spec dataflow, section 9", "dataflow spec section 2", "Spec section 6.",
                     "trajectory specification\n    3.11", "specification tests 27, 31", "spec 7"):  # fmt: skip
        assert OTHER_SPELLING.search(spelling), spelling
    assert _module_problem("realhf.no.such_module", None, runs=False)
    assert _module_problem("realhf.api.sample.NoSuchThing", None, runs=False)
    assert _module_problem("realhf.api.sample", None, runs=False) is None
    assert _module_problem("realhf.api.sample.SequenceSample", None, runs=False) is None


def _python_files() -> Iterator[tuple[Path, str]]:
    for folder in FOLDERS:
        for path in sorted((REPO / folder).rglob("*.py")):
            yield path, path.read_text(encoding="utf-8")


def _documents() -> Iterator[tuple[Path, str]]:
    for path in [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]:
        yield path, path.read_text(encoding="utf-8")


def _at(path: Path, text: str, found: re.Match[str]) -> str:
    return f"{path.relative_to(REPO)}:{text.count(chr(10), 0, found.start()) + 1}"


def _cited(text: str) -> re.Match[str]:
    found = CITATION.search(text)
    assert found is not None
    return found


def _citation_problems(citation: re.Match[str]) -> list[str]:
    if citation["sections"] is None:
        return [f"{citation[0]} names no section"]
    return _missing(citation["file"], citation["sections"])


def _missing(file: str, sections: str) -> list[str]:
    path = REPO / REFERENCE / file
    if not path.is_file():
        return [f"there is no {REFERENCE}/{file}"]
    numbers = re.findall(SECTION, re.sub(r"\([^()]*\)", "", sections))
    known = set(re.findall(r"^#{2,4} (\d+(?:\.\d+)?)\b", path.read_text(encoding="utf-8"), re.MULTILINE))
    return [f"{REFERENCE}/{file} has no section {number}" for number in numbers if number not in known]


def _in_words(text: str, offset: int) -> bool:
    """Whether an offset of a module lies in a string or comment."""
    row = text.count("\n", 0, offset) + 1
    place = (row, offset - (text.rfind("\n", 0, offset) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    words = (tokenize.STRING, tokenize.COMMENT)
    return any(token.type in words and token.start <= place < token.end for token in tokens)


def _anchors(file: Path) -> set[str]:
    """What GitHub makes of the headings of a Markdown file."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _module_problem(name: str, attribute: str | None, *, runs: bool) -> str | None:
    parts = name.split(".")
    if ".".join(parts[:3]) in TO_BE_WRITTEN:
        return None
    for length in range(len(parts), 0, -1):
        base = REPO.joinpath(*parts[:length])
        file = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)
        if file is None and not base.is_dir():
            continue
        rest = [*parts[length:], *([attribute] if attribute else [])]
        if rest and (file is None or rest[0] not in _names(file)):
            return f"{'.'.join(parts[:length])} has no {rest[0]}"
        if runs and not rest and not (base.with_suffix(".py").is_file() or (base / "__main__.py").is_file()):
            return f"python -m {name} has nothing to run"
        return None
    return f"no module {name}"


def _names(file: Path) -> set[str]:
    """What a module defines or imports at its top."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return found
