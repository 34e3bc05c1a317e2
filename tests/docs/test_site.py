"""The site is made of every page and of the docstrings of the interfaces, and loads nothing from
another server.

``make docs`` builds it, strictly, and checks what it built; here is what needs no MkDocs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.site import build

CONFIG = (build.HERE / "mkdocs.yml").read_text(encoding="utf-8")


def named(entry: object) -> Iterator[str]:
    """Every page of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for value in entry.values():
            yield from named(value)
    elif isinstance(entry, list):
        for value in entry:
            yield from named(value)


def test_the_navigation_names_every_page_once() -> None:
    api = build.api_pages()
    found = [*named(build.navigation(api))]
    assert sorted(found) == sorted({*(page.as_posix() for page in build.pages()), *api})
    assert len(api) >= 20 and "docs/quickstart.md" in found


def test_the_index_for_models_names_every_page_as_markdown() -> None:
    api = build.api_pages()
    text = build.index_for_models(api)
    assert [page for page in named(build.navigation(api)) if f"]({page})" not in text] == []
    assert text.startswith("# realhf\n\n> realhf trains language-model agents")


@pytest.mark.slow
def test_pages_about_interfaces_name_every_public_class_and_function() -> None:
    """With signature, docstring and, of a dataclass, the fields."""
    api = build.api_pages()
    names = 0
    for room in build.API_ROOMS:
        for path in (build.ROOT / room).glob("*.py"):
            page = api.get(f"api/{room.replace('/', '.')}.{path.stem}.md", "")
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                is_part = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                if is_part and not node.name.startswith("_"):
                    names += 1
                    assert f"## `{node.name}`\n" in page, f"{path}: {node.name}"
    assert names > 100
    sample = api["api/realhf.api.sample.md"]
    assert (
        "```python\n@staticmethod\ndef of(" in sample
        and "Return the number of rows of the packed tensor." in sample
    )


def test_what_is_loaded_from_another_server_is_found(tmp_path: Path) -> None:
    """A script, a picture, a font; a link that a reader follows is none."""
    pages = {
        "index.html": '<script src="https://elsewhere.example/a.js"></script><a href="https://elsewhere.example/">x</a>',
        "own.html": '<script src="assets/a.js"></script><link rel="stylesheet" href="a.css">',
        "a.js": 'function a(){return b("https://elsewhere.example/mermaid.min.js")} // https://elsewhere.example/',
        "a.css": "@font-face { src: url(//elsewhere.example/a.woff2) }",
    }
    for name, text in pages.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = build.loaded_from_elsewhere(tmp_path)
    assert [fault.partition(":")[0] for fault in found] == ["index.html", "a.css", "a.js"]
    build.keep_libraries_away(tmp_path)
    assert [fault.partition(":")[0] for fault in build.loaded_from_elsewhere(tmp_path)] == [
        "index.html",
        "a.css",
    ]


def test_the_theme_asks_nobody_for_fonts() -> None:
    assert (
        "\n  font: false\n" in CONFIG
        and "analytics" not in CONFIG
        and "extra_javascript" not in CONFIG
    )


def test_a_page_that_is_there_only_once_is_found(tmp_path: Path) -> None:
    """Each is a page for people and one of Markdown."""
    for name in ("index.html", "README.md", "docs/running.md", "api/x.html", "api/x.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert build.not_twice(
        tmp_path, [Path("README.md"), Path("docs/running.md"), Path("api/x.md")]
    ) == ["docs/running.html: is missing"]
