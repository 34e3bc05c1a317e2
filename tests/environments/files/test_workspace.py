"""The files workspace as a plain class: what its tools do, what hostile calls do not, and what
earns what."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.environments.files import workspace as module
from realhf.environments.files.workspace import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_FILES,
    MAX_PATH_CHARS,
    MAX_SHOWN_LINES,
    MAX_TOTAL_CHARACTERS,
    FilesWorkspace,
)
from tests.cheapest import cheapest

START = {"a.txt": "one", "b.txt": "two\nlines two", "sub/c.txt": "three", "sub/deep/d.txt": ""}


def listed(files: dict[str, str]) -> list[dict[str, str]]:
    return [{"path": path, "text": text} for path, text in files.items()]


def opened(wanted: dict[str, str] | None = None, answer: str | None = "42") -> FilesWorkspace:
    found = FilesWorkspace()
    assert (
        found.reset("do it", listed(START), None if wanted is None else listed(wanted), answer)
        == "do it"
    )
    return found


def tree(workspace: FilesWorkspace) -> dict[str, str]:
    """All files, seen through the tools alone."""
    found: dict[str, str] = {}
    folders = [""]
    while folders:
        inside = folders.pop()
        said = workspace.list_files(inside)
        for name in [] if said == "(empty)" else said.splitlines():
            if name.endswith("/"):
                folders.append(inside + name)
            else:
                text = workspace.read_file(inside + name)
                found[inside + name] = "" if text == "(empty)" else text
    return found


def refused(tool: Callable[..., str], *arguments: Any) -> str:
    """The reason why a call was refused, "" if it was not."""
    try:
        assert isinstance(tool(*arguments), str)
    except ValueError as error:
        return str(error)
    return ""


def test_the_class_imports_nothing_of_ours():
    """It can be copied to where nothing of this package is installed."""
    source = Path(inspect.getfile(module)).read_text(encoding="utf-8")
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    assert imported == {"__future__", "collections.abc", "hashlib", "typing"}


def test_the_tools_are_what_trl_takes():
    """TRL makes a tool of every public method but reset and get_reward. transformers reads its
    schema from hints and docstring, and wants a description of every argument."""
    from transformers.utils import get_json_schema

    methods = dict(inspect.getmembers(FilesWorkspace(), inspect.ismethod))
    tools = {
        name: method
        for name, method in methods.items()
        if name[0] != "_" and name not in ("reset", "get_reward")
    }
    known = "list_files read_file write_file replace_text search_files move_file delete_file answer"
    assert {*tools} == {*known.split()}
    schemas = [get_json_schema(method) for method in tools.values()]
    for schema in schemas:
        parameters = schema["function"]["parameters"]["properties"]
        assert parameters and all(each["type"] == "string" for each in parameters.values())
    assert len(json.dumps(schemas)) < 2600


def test_what_the_tools_say():
    workspace = opened()
    assert (
        workspace.list_files()
        == workspace.list_files(".")
        == workspace.list_files("/")
        == "a.txt\nb.txt\nsub/"
    )
    assert workspace.list_files("sub") == workspace.list_files("sub/") == "c.txt\ndeep/"
    assert workspace.read_file("a.txt") == workspace.read_file("./a.txt") == "one"
    assert workspace.read_file("sub/deep/d.txt") == "(empty)"
    assert workspace.search_files("two") == "b.txt: two"
    assert workspace.search_files("lines") == "b.txt: lines two"
    assert workspace.search_files("e") == "a.txt: one\nb.txt: lines two\nsub/c.txt: three"
    assert workspace.search_files("nowhere") == "nothing found"
    assert workspace.write_file("new/e.txt", "four four") == "wrote new/e.txt"
    assert workspace.replace_text("new/e.txt", "four", "five") == "replaced 2 in new/e.txt"
    assert workspace.move_file("a.txt", "new/a.txt") == "moved to new/a.txt"
    assert workspace.delete_file("sub/deep/d.txt") == "deleted sub/deep/d.txt"
    after = {
        "b.txt": START["b.txt"],
        "sub/c.txt": "three",
        "new/e.txt": "five five",
        "new/a.txt": "one",
    }
    assert tree(workspace) == after
    assert refused(workspace.list_files, "sub/deep") == "there is no folder sub/deep"
    assert not workspace.done
    assert workspace.answer(" 42 ") == "answered"
    assert refused(workspace.read_file, "b.txt") == "you have answered, the task is over"
    assert workspace.done


def test_an_empty_folder_says_so():
    workspace = opened()
    for path in START:
        workspace.delete_file(path)
    assert workspace.list_files() == "(empty)"


HOSTILE_PATHS: list[Any] = [
    "",
    "/",
    "//",
    ".",
    "..",
    "./",
    "../a.txt",
    "sub/../a.txt",
    "sub/./c.txt",
    "/etc/passwd",
    "/a.txt",
    "//a.txt",
    "././a.txt",
    "sub//c.txt",
    "sub/",
    "a.txt/",
    "..\\a.txt",
    "C:\\a.txt",
    "a.txt\0",
    "a.txt\n",
    " a.txt",
    "a.txt ",
    "a\u202etxt",
    "\ud800",
    "a.txt\x7f",
    "x" * (MAX_PATH_CHARS + 1),
    "x" * 3_000_000,
    "/".join("x" * (MAX_DEPTH + 1)),
    "../" * 1_000_000,
    None,
    7,
    True,
    ["a.txt"],
    {"path": "a.txt"},
    b"a.txt",
]


@pytest.mark.parametrize("path", HOSTILE_PATHS, ids=lambda path: ascii(path)[:30])
def test_a_path_that_is_none_is_refused_and_changes_nothing(path: Any):
    """Every tool that takes a path refuses it, quickly and briefly, and the folder stays as it
    was."""
    workspace = opened()
    said = list[str]()

    def every_tool() -> None:
        said[:] = [
            refused(workspace.read_file, path),
            refused(workspace.write_file, path, "x"),
            refused(workspace.delete_file, path),
            refused(workspace.move_file, path, "z.txt"),
            refused(workspace.move_file, "a.txt", path),
        ]

    assert cheapest(every_tool, 0.5) < 0.5
    assert all(0 < len(line) < 200 for line in said)
    assert json.dumps(said, ensure_ascii=False).encode()
    assert tree(workspace) == START


@pytest.mark.parametrize(
    "text",
    [None, 7, ["x"], "\ud800", "a\0b", "x" * (MAX_CHARACTERS + 1), "é" * 5_000_000],
    ids=lambda text: ascii(text)[:20],
)
def test_a_text_that_is_none_is_refused(text: Any):
    workspace = opened()
    assert refused(workspace.write_file, "a.txt", text)
    assert refused(workspace.search_files, text)
    assert refused(workspace.replace_text, "a.txt", text, "x")
    assert refused(workspace.replace_text, "a.txt", "one", text)
    assert refused(workspace.answer, text)
    assert tree(workspace) == START
    assert workspace.get_reward() == 0


def test_what_would_destroy_a_file_unseen_is_refused():
    """A file is never a folder as well, and no move overwrites."""
    workspace = opened()
    assert refused(workspace.write_file, "a.txt/x.txt", "x") == "a.txt is a file"
    assert refused(workspace.write_file, "sub", "x") == "sub is a folder"
    assert refused(workspace.move_file, "a.txt", "sub") == "sub is a folder"
    assert refused(workspace.move_file, "a.txt", "b.txt/a.txt") == "b.txt is a file"
    assert refused(workspace.move_file, "a.txt", "b.txt") == "b.txt exists"
    assert refused(workspace.move_file, "a.txt", "a.txt") == "a.txt exists"
    assert refused(workspace.move_file, "z.txt", "y.txt") == "there is no file z.txt"
    assert tree(workspace) == START
    assert workspace.move_file("a.txt", "a.txt/x.txt") == "moved to a.txt/x.txt"


def test_a_replacement_that_does_nothing_or_too_much_is_refused():
    workspace = opened()
    assert refused(workspace.replace_text, "z.txt", "one", "two") == "there is no file z.txt"
    assert (
        refused(workspace.replace_text, "a.txt", "nine", "two") == "a.txt does not hold that text"
    )
    assert refused(workspace.replace_text, "a.txt", "", "two") == "the text to replace is empty"
    assert tree(workspace) == START
    workspace.write_file("a.txt", "y" * MAX_CHARACTERS)
    said = refused(workspace.replace_text, "a.txt", "y", "z" * MAX_CHARACTERS)
    assert said == f"a text has at most {MAX_CHARACTERS} characters"
    for number in range(6):
        workspace.write_file(f"f{number}.txt", "y" * MAX_CHARACTERS)
    workspace.write_file("last.txt", "y" * (MAX_CHARACTERS // 2))
    said = refused(workspace.replace_text, "last.txt", "y", "zz")
    assert said == f"all files hold at most {MAX_TOTAL_CHARACTERS} characters"
    assert workspace.read_file("last.txt") == "y" * (MAX_CHARACTERS // 2)


@pytest.mark.slow
def test_files_and_characters_are_bounded():
    """Thousands of files and huge texts are refused before they are kept; what is kept can still be
    changed."""
    workspace = opened()
    said = [refused(workspace.write_file, f"f{n}.txt", "x") for n in range(5_000)]
    assert said.count("") == MAX_FILES - len(START)
    said = [refused(workspace.write_file, f"f{n}.txt", "y" * MAX_CHARACTERS) for n in range(20)]
    assert 0 < said.count("") < MAX_TOTAL_CHARACTERS // MAX_CHARACTERS
    assert "at most" in said[-1]
    assert len(workspace.list_files().splitlines()) == MAX_SHOWN_LINES + 1


def test_a_search_is_for_plain_text():
    """Patterns that would keep a regular-expression engine busy for years are text as any other."""
    workspace = opened()
    for number in range(7):
        workspace.write_file(f"f{number}.txt", "y" * MAX_CHARACTERS)
    texts = ("y" * 100 + "z", "(y+)+$", "(?:y|y)*z", ".*" * 50)
    assert cheapest(lambda: [workspace.search_files(text) for text in texts], 1.0) < 1.0
    assert {workspace.search_files(text) for text in texts} == {"nothing found"}
    found = workspace.search_files("yy")
    assert len(found.splitlines()) == 7 and max(map(len, found.splitlines())) < 220


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from("wmdre"),
            st.one_of(st.sampled_from([*START, "x", "./x", "sub"]), st.text(max_size=6)),
            st.one_of(st.sampled_from([*START, "y/z", "sub/deep"]), st.text(max_size=6)),
        ),
        max_size=20,
    )
)
def test_any_calls_leave_the_files_that_a_plain_model_has(calls: list[tuple[str, str, str]]):
    """A map beside, changed by the calls that were not refused, ends with the same files."""
    workspace = opened()
    model = dict(START)
    for tool, first, second in calls:
        own = first.removeprefix("./")
        if tool == "w" and not refused(workspace.write_file, first, second):
            model[own] = second
        elif tool == "m" and not refused(workspace.move_file, first, second):
            model[second.removeprefix("./")] = model.pop(own)
        elif tool == "d" and not refused(workspace.delete_file, first):
            del model[own]
        elif tool == "e" and not refused(workspace.replace_text, first, "o", second):
            model[own] = model[own].replace("o", second)
        elif tool == "r":
            assert bool(refused(workspace.read_file, first)) == (own not in model)
    assert {path: workspace.read_file(path) for path in model} == {
        path: text or "(empty)" for path, text in model.items()
    }
    assert len(model) == 0 or workspace.list_files() != "(empty)"
    assert workspace.get_reward() <= 0


def test_reward_of_a_change():
    """The part that is done; a file that nobody wants counts as one more to do; 1 only for the very
    folder."""
    wanted = {"x.txt": "one", "b.txt": "new", "sub/c.txt": "three", "sub/deep/d.txt": ""}
    workspace = opened(wanted, None)
    assert workspace.get_reward() == 0
    workspace.write_file("b.txt", "wrong")
    assert workspace.get_reward() == 0
    workspace.write_file("b.txt", "new")
    assert workspace.get_reward() == pytest.approx(1 / 3)
    workspace.write_file("x.txt", "one")
    assert workspace.get_reward() == pytest.approx(2 / 3)
    workspace.write_file("stray.txt", "one")
    assert workspace.get_reward() == pytest.approx(2 / 4)
    workspace.delete_file("a.txt")
    assert workspace.get_reward() == pytest.approx(3 / 4)
    workspace.delete_file("stray.txt")
    assert tree(workspace) == wanted
    assert workspace.get_reward() == 1


def test_losing_the_text_of_a_file_that_is_to_be_moved_earns_nothing():
    moved = {path: text for path, text in START.items() if path != "a.txt"} | {"x.txt": "one"}
    workspace = opened(moved, None)
    workspace.delete_file("a.txt")
    assert workspace.get_reward() == 0
    workspace.write_file("x.txt", "one")
    assert workspace.get_reward() == 1


def test_damage_costs_whatever_else_is_done_and_can_be_mended():
    """Files that were to stay: minus the part of them that is gone or changed."""
    wanted = {path: text for path, text in START.items() if path != "a.txt"}
    workspace = opened(wanted, None)
    workspace.delete_file("a.txt")
    assert workspace.get_reward() == 1
    workspace.write_file("sub/c.txt", "spoilt")
    assert workspace.get_reward() == pytest.approx(-1 / 3)
    for path in wanted:
        workspace.delete_file(path)
    assert workspace.get_reward() == -1
    for path, text in wanted.items():
        workspace.write_file(path, text)
    assert workspace.get_reward() == 1


@pytest.mark.parametrize("wrong", ["", "41", "42 files", "forty-two"])
def test_only_the_first_answer_counts(wrong: str):
    """Answers cannot be tried one after another."""
    workspace = opened()
    assert workspace.get_reward() == 0
    workspace.answer(wrong)
    assert refused(workspace.answer, "42")
    assert workspace.get_reward() == 0
    workspace = opened()
    workspace.answer("42")
    assert workspace.get_reward() == 1


def test_an_answer_and_a_change_are_wanted_together():
    workspace = opened({**START, "x.txt": "x"})
    workspace.write_file("x.txt", "x")
    assert workspace.get_reward() == 0.5
    workspace.answer("42")
    assert workspace.get_reward() == 1


def test_a_reset_forgets_the_episode_before():
    workspace = opened()
    workspace.delete_file("a.txt")
    workspace.answer("1")
    workspace.reset("again", listed(START), None, "42", prompt="other columns do not matter")
    assert tree(workspace) == START
    workspace.answer("42")
    assert workspace.get_reward() == 1


@pytest.mark.parametrize(
    ("files", "wanted", "answer", "cause"),
    [
        (START, None, "", "asks for nothing"),
        (START, START, None, "asks for nothing"),
        ({"../x": "x"}, None, "1", r"'\.\./x'.*relative"),
        ({"x": "x", "x/y": "y"}, None, "1", "x is a file"),
        ({"x": "x"}, {"/x": "x"}, "1", "relative"),
        ({"x": "x" * (MAX_CHARACTERS + 1)}, None, "1", "at most"),
        ({str(n): "" for n in range(MAX_FILES + 1)}, None, "1", "at most"),
    ],
)
def test_a_row_that_is_no_task_is_refused(
    files: dict[str, str], wanted: dict | None, answer: str | None, cause: str
):
    with pytest.raises(ValueError, match=cause):
        FilesWorkspace().reset(
            "x", listed(files), None if wanted is None else listed(wanted), answer
        )


def test_a_row_with_a_file_twice_is_refused():
    with pytest.raises(ValueError, match=r"two files 'a\.txt'"):
        FilesWorkspace().reset("x", [*listed(START), *listed({"a.txt": "other"})], None, "1")


def test_people_see_the_folder_and_the_answer_in_bounded_room() -> None:
    """A policy that writes much makes the view no longer; two folders that differ have views that
    differ."""
    workspace = FilesWorkspace()
    workspace.reset("?", [{"path": "a.txt", "text": "one"}], answer="two")
    assert workspace.view == {
        "title": "The folder",
        "columns": ["path", "text"],
        "rows": [["a.txt", "one"]],
    }
    workspace.write_file("b.txt", "x" * 8000)
    long = workspace.view
    workspace.write_file("b.txt", "x" * 7999 + "y")
    assert long != workspace.view and len(str(long)) < 400
    for number in range(100):
        workspace.write_file(f"{number}.txt", "x" * 200)
    many = workspace.view
    workspace.write_file("99.txt", "z")
    assert many != workspace.view and len(str(many)) < 20_000
    workspace.answer("two")
    assert workspace.view["note"] == "answer: two"


def test_the_state_key_is_that_of_the_folder_and_of_the_answer() -> None:
    """However it came about: by reads alone it stays, and what was undone is as it was."""
    one = opened()
    other = opened()
    start = one.state_key
    one.read_file("a.txt")
    one.write_file("n.txt", "new")
    one.write_file("a.txt", "changed")
    other.write_file("a.txt", "changed")
    assert start != one.state_key != other.state_key != start
    one.delete_file("n.txt")
    assert one.state_key == other.state_key
    one.answer("41")
    assert one.state_key != other.state_key and len(one.state_key) < 100
