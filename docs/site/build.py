"""Builds the documentation as a site: make docs

The pages keep their places and links, so the same files read well in the repository. What a page
links to is copied beside it, pages about the interfaces are made from docstrings, and every page is
there as Markdown, too. A broken link, a page that the navigation does not name and anything loaded
from another server are errors.
"""

from __future__ import annotations

import ast
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SOURCE = ROOT / "out" / "site-source"
"""The pages as they are given to MkDocs: the same folders as in the repository."""
SITE = ROOT / "site"
API_ROOMS = ("realhf/api", "realhf/aws/client", "realhf/trajectory/client")
"""Folders whose public classes and functions get pages."""
TOP = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "AGENTS.md",
    "examples/README.md",
)
"""Pages beside those of ``docs/``, where they exist."""
ELSEWHERE = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^\"'> ]+"
)
"""A tag that has the browser load something from another server."""
LIBRARIES = re.compile(r"(?<=\")https://[\w.-]+/[^\"\s]*(?:polyfill|\.js)(?=\")")
"""A script or polyfill that a script of the theme names by its address."""
_LINK = re.compile(r"\]\(([^()\s#]+)[^()\s]*\)")


def pages() -> list[Path]:
    """Return the pages that people wrote, relative to the repository."""
    written = [path.relative_to(ROOT) for path in sorted((ROOT / "docs").rglob("*.md"))]
    return [Path(name) for name in TOP if (ROOT / name).is_file()] + written


def title(text: str, otherwise: str) -> str:
    """Return the first heading of a page."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found[1].replace("`", "").strip() if found else otherwise


def linked_files(page: Path) -> Iterator[Path]:
    """Yield what a page links to beside other pages, relative to the repository."""
    for target in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        file = (ROOT / page.parent / target).resolve()
        if (
            "://" not in target
            and file.is_file()
            and file.suffix != ".md"
            and file.is_relative_to(ROOT)
        ):
            yield file.relative_to(ROOT)


def navigation(api: dict[str, str]) -> list[dict[str, object]]:
    """Return the navigation: the tables of ``docs/README.md``, section by section, then the
    interfaces. Pages that no table names come last, so that none is lost."""
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    known = {page.as_posix() for page in pages()}
    left = known - {"README.md", "docs/README.md"}
    found: list[dict[str, object]] = [{"Home": "README.md"}, {"Contents": "docs/README.md"}]
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        entries = []
        for row in re.findall(r"^\| (\[.*?\) )\|", body, re.MULTILINE):
            [target, *_] = _LINK.findall(row)
            page = (ROOT / "docs" / target).resolve().relative_to(ROOT).as_posix()
            if page in left:
                left.remove(page)
                entries.append(page)
        if entries:
            found.append({name.strip(): _titled(entries)})
    found.append({"API": [{module: page} for page, module in _api_titles(api).items()]})
    if left:
        found.append({"More": _titled(sorted(left))})
    return found


def _titled(entries: list[str]) -> list[dict[str, str]]:
    return [{title((ROOT / page).read_text(encoding="utf-8"), page): page} for page in entries]


def _api_titles(api: dict[str, str]) -> dict[str, str]:
    return {page: title(text, page) for page, text in api.items()}


def api_pages() -> dict[str, str]:
    """Return the Markdown of each module that has public names, by its place in the site."""
    found = {}
    for room in API_ROOMS:
        for path in sorted((ROOT / room).glob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            text = "\n\n".join(_module(module, ast.parse(path.read_text(encoding="utf-8"))))
            if "\n## " in text:
                found[f"api/{module.removesuffix('.__init__')}.md"] = text + "\n"
    return found


def _module(name: str, tree: ast.Module) -> Iterator[str]:
    """Yield the parts of a module's page."""
    yield f"# `{name.removesuffix('.__init__')}`"
    yield _docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _class(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
            "_"
        ):
            yield f"## `{node.name}`"
            yield _signature(node)
            yield _docstring(node)


def _class(node: ast.ClassDef) -> Iterator[str]:
    yield f"## `{node.name}`"
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield _code(f"class {node.name}({bases})" if bases else f"class {node.name}")
    yield _docstring(node)
    for number, member in enumerate(node.body):
        if isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_"):
            after = node.body[number + 1] if number + 1 < len(node.body) else None
            said = _text(after.value) if isinstance(after, ast.Expr) else ""
            yield f"- `{ast.unparse(member.target)}: {ast.unparse(member.annotation)}`" + (
                f": {said}" if said else ""
            )
        elif isinstance(
            member, ast.FunctionDef | ast.AsyncFunctionDef
        ) and not member.name.startswith("_"):
            yield f"### `{node.name}.{member.name}`"
            yield _signature(member)
            yield _docstring(member)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    decorators = "".join(f"@{ast.unparse(each)}\n" for each in node.decorator_list)
    return _code(f"{decorators}{word} {node.name}({ast.unparse(node.args)}){returned}")


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _text(node: ast.expr) -> str:
    """Return the docstring below a field in one line, or nothing for another expression."""
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return ""
    return _markdown(" ".join(node.value.split()))


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return _markdown(ast.get_docstring(node) or "")


def _markdown(text: str) -> str:
    """Return a docstring as Markdown: ``code`` with one backtick, and no brackets or tags where
    none are meant."""
    parts = re.split(r"(`[^`]*`)", text.replace("``", "`"))
    return "".join(
        part if part.startswith("`") else re.sub(r"([<\[_])", r"\\\1", part) for part in parts
    )


def index_for_models(api: dict[str, str]) -> str:
    """Return ``llms.txt``: what the project is, and every page as Markdown."""
    first = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[1]
    lines = ["# realhf", "", *(f"> {line}" for line in first.splitlines())]
    for section in navigation(api):
        for name, value in section.items():
            entries = [{name: value}] if isinstance(value, str) else value
            lines += ["", f"## {name}", ""]
            for entry in entries if isinstance(entries, list) else ():
                lines += [f"- [{heading}]({page})" for heading, page in entry.items()]
    return "\n".join(lines) + "\n"


def stage(api: dict[str, str]) -> None:
    """Put the pages and what they link to into ``SOURCE``."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    files = {*pages()}
    files |= {linked for page in pages() for linked in linked_files(page)}
    for file in sorted(files):
        (SOURCE / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, SOURCE / file)
    for name, text in api.items():
        (SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
        (SOURCE / name).write_text(text, encoding="utf-8")


def loaded_from_elsewhere(site: Path) -> list[str]:
    """Return every tag of the site that has a browser load something from another server."""
    found = []
    for page in sorted(site.rglob("*.html")):
        tags = ELSEWHERE.findall(page.read_text(encoding="utf-8"))
        found += [f"{page.relative_to(site)}: {tag}" for tag in tags]
    for sheet in sorted(site.rglob("*.css")):
        loads = re.findall(
            r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\"' ]+", sheet.read_text(encoding="utf-8")
        )
        found += [f"{sheet.relative_to(site)}: {load}" for load in loads]
    for script in sorted(site.rglob("*.js")):
        loads = LIBRARIES.findall(script.read_text(encoding="utf-8"))
        found += [f"{script.relative_to(site)}: {load}" for load in loads]
    return found


def not_twice(site: Path, written: list[Path]) -> list[str]:
    """Return every page that is missing for people or as Markdown."""
    wanted = [*written]
    wanted += [
        page.with_name("index.html") if page.name == "README.md" else page.with_suffix(".html")
        for page in written
    ]
    return [f"{page}: is missing" for page in wanted if not (site / page).is_file()]


def keep_libraries_away(site: Path) -> None:
    """Take the addresses out of the theme's scripts from which it would load libraries: for
    diagrams, which no page has, and for browsers that are many years old."""
    for script in sorted(site.rglob("*.js")):
        text = script.read_text(encoding="utf-8")
        script.write_text(LIBRARIES.sub("data:text/javascript,", text), encoding="utf-8")


def main() -> int:
    """Build the site. Returns the exit code: 1 with a line for each fault."""
    # They are in .venv-docs alone.
    from mkdocs.commands.build import build  # pyright: ignore[reportMissingImports]
    from mkdocs.config import load_config  # pyright: ignore[reportMissingImports]
    from mkdocs.exceptions import Abort  # pyright: ignore[reportMissingImports]

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    api = api_pages()
    stage(api)
    config = load_config(
        config_file=str(HERE / "mkdocs.yml"),
        docs_dir=str(SOURCE),
        site_dir=str(SITE),
        nav=navigation(api),
        strict=True,
    )
    try:
        build(config)
    except Abort as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for page in sorted(SOURCE.rglob("*.md")):
        shutil.copyfile(page, SITE / page.relative_to(SOURCE))
    keep_libraries_away(SITE)
    (SITE / "llms.txt").write_text(index_for_models(api), encoding="utf-8")
    faults = [*loaded_from_elsewhere(SITE), *not_twice(SITE, [*pages(), *map(Path, api)])]
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    print(f"{SITE}: {len([*SITE.rglob('*.html')])} pages")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
