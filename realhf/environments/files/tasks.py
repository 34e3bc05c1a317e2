"""Tasks of the files environment: names, templates in groups of increasing difficulty, and the task
set.

The three kinds of names have no word in common, so that a small policy can tell the kind from the
name, as in a real folder, where a date does not look like a person.

Names are held out by a stable hash of the whole name. Their words, and pairs of adjacent words,
occur in training names, so a policy must copy, not recall.

Every template takes a ``FilesScene``, from which it draws names and files, and returns a
``FilesInstance``. Texts are short, and each request has a single wording, for policies of a few
million parameters.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from realhf.api.environment import HELD_OUT, TRAIN, Task
from realhf.env.loader.tasks import GroupedTaskSet, is_held_out

Words = tuple[str, ...]
Kind = tuple[Words, Words, Words]


def _words(text: str) -> Words:
    return tuple(text.split())


ADJECTIVES = _words(
    """amber bitter blank bronze damp dusty faint frosty golden grey hollow icy late long misty narrow open pale
    plain quiet round silver small tall"""
)
NOUNS = _words(
    """anchor arrow basket bell bottle bridge brush button candle carpet chair clock coat compass drum fence flute
    garden hammer kettle key ladder lamp mirror needle oven piano pillow rope spoon table wagon"""
)
SUFFIXES = _words(
    """agenda budget diary draft essay guide index list memo menu notes plan poem quiz recipe report review sketch
    story"""
)
PLACES = _words(
    "abbey attic barn cabin cellar chapel depot farm forge harbor hotel lodge mill museum station "
    "tower"
)
SIDES = _words("east inner left lower north outer south upper west")
PARTS = _words("annex bay court deck dock hall porch roof stage wing yard")
ANIMALS = _words(
    """badger bear crab crow deer dove eagle finch fox goat goose hawk heron lion lynx mole otter owl panda raven
    seal swan tiger wolf"""
)
MATERIALS = _words(
    "brass brick chalk clay copper cork flint glass iron leather linen marble oak sand slate wool"
)
NUMBERS = _words("one two three four five six seven eight nine ten eleven twelve")
FILE = (ADJECTIVES, NOUNS, SUFFIXES)
FOLDER = (PLACES, SIDES, PARTS)
TEXT = (ANIMALS, MATERIALS, NUMBERS)
KINDS = (FILE, FOLDER, TEXT)
NAME = re.compile(r"\b([a-z]+)-([a-z]+)-([a-z]+)\b")
"""Matches names in any text of this environment, which contains no other hyphenated words."""


def choose_split(name: str) -> str:
    """Return the only split in which this name occurs."""
    return HELD_OUT if is_held_out(name) else TRAIN


def draw_name(rng: random.Random, split: str, kind: Kind = FILE) -> str:
    """Draw a name of the given kind (one of KINDS) that belongs to the split."""
    while True:
        name = "-".join(rng.choice(words) for words in kind)
        if choose_split(name) == split:
            return name


ONE_CALL = "one_call"
LOOK_FIRST = "look_first"
CHANGE = "change"
SEVERAL = "several"
GROUPS = (ONE_CALL, LOOK_FIRST, CHANGE, SEVERAL)
"""Groups by difficulty: one call; look, then answer; look, then change something; several
changes."""


@dataclass(frozen=True)
class FilesCall:
    """One tool call."""

    tool: str
    """Name of the tool."""
    arguments: Mapping[str, str]
    """Arguments of the call, by name."""


@dataclass(frozen=True)
class FilesInstance:
    """One task with its solution."""

    request: str
    """What the policy is asked."""
    files: Mapping[str, str]
    """Folder at the start: text by path."""
    wanted: Mapping[str, str]
    """Folder when the task is solved: text by path."""
    answer: str
    """Right answer; "" if none is asked for."""
    solution: tuple[FilesCall, ...]
    """Calls that solve the task."""

    @property
    def row(self) -> dict[str, Any]:
        """Arguments of ``FilesWorkspace.reset``, as plain JSON in the same format for all tasks."""
        return {
            "request": self.request,
            "files": [{"path": path, "text": text} for path, text in self.files.items()],
            "wanted": [{"path": path, "text": text} for path, text in self.wanted.items()],
            "answer": self.answer,
        }


@dataclass
class FilesScene:
    """Random draws for one template instance; all names in a scene are different."""

    rng: random.Random
    """Random generator of the instance."""
    split: str
    """Split of the names."""
    files: dict[str, str] = field(default_factory=dict)
    """Folder so far: text by path."""
    _names: set[str] = field(default_factory=set)
    """Names drawn so far."""

    def name(self, kind: Kind) -> str:
        """Draw a name of this kind that the scene does not contain yet."""
        while (name := draw_name(self.rng, self.split, kind)) in self._names:
            pass
        self._names.add(name)
        return name

    def word(self) -> str:
        """Draw a word for the text of a file."""
        return self.name(TEXT)

    def folder(self) -> str:
        """Draw the name of a folder."""
        return self.name(FOLDER)

    def path(self, folder: str = "", ending: str = "txt") -> str:
        """Draw the path of a file that does not exist."""
        name = f"{self.name(FILE)}.{ending}"
        return f"{folder}/{name}" if folder else name

    def file(self, folder: str = "", ending: str = "txt", *, words: int = 2) -> str:
        """Add a file with ``words`` words and return its path."""
        path = self.path(folder, ending)
        self.files[path] = " ".join(self.word() for _ in range(words))
        return path

    def others(self, min_count: int = 1, max_count: int = 3) -> None:
        """Add files that are unrelated to the task."""
        for _ in range(self.rng.randint(min_count, max_count)):
            self.file()

    def instance(
        self,
        request: str,
        *solution: FilesCall,
        wanted: Mapping[str, str | None] | None = None,
        answer: str = "",
    ) -> FilesInstance:
        """Return the instance, with its files in random order. ``wanted``: files of the final
        folder that differ from the initial one; None for a removed file."""
        paths = list(self.files)
        self.rng.shuffle(paths)
        files = {path: self.files[path] for path in paths}
        after = {
            path: text for path, text in {**files, **(wanted or {})}.items() if text is not None
        }
        return FilesInstance(request, files, after, answer, solution)


def _caller(tool: str, *names: str) -> Callable[..., FilesCall]:
    """Return a function that builds calls of a tool from the values of its arguments."""
    return lambda *values: FilesCall(tool, dict(zip(names, values, strict=True)))


move = _caller("move_file", "source", "target")
write = _caller("write_file", "path", "text")
read = _caller("read_file", "path")
replace_all = _caller("replace_text", "path", "old", "new")
delete = _caller("delete_file", "path")
search = _caller("search_files", "text")
list_folder = _caller("list_files", "folder")
answer = _caller("answer", "text")


def rename(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to rename a file."""
    scene.others()
    old = scene.file()
    new = scene.path()
    return scene.instance(
        f"Rename {old} to {new}.", move(old, new), wanted={old: None, new: scene.files[old]}
    )


def remove(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to delete a file."""
    scene.others()
    path = scene.file()
    return scene.instance(f"Delete {path}.", delete(path), wanted={path: None})


def create(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to write a new file."""
    scene.others()
    path = scene.path()
    text = scene.word()
    return scene.instance(
        f"Write {text} to the new file {path}.", write(path, text), wanted={path: text}
    )


def put_away(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to move a file into a folder."""
    scene.others()
    old = scene.file()
    folder = scene.folder()
    new = f"{folder}/{old}"
    request = f"Move {old} to the folder {folder}."
    return scene.instance(request, move(old, new), wanted={old: None, new: scene.files[old]})


def tell_text(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks what a file contains."""
    scene.others()
    path = scene.file(words=1)
    text = scene.files[path]
    return scene.instance(f"What is the text of {path}?", read(path), answer(text), answer=text)


def find(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks which file contains a word."""
    scene.others()
    path, word = _with_word(scene)
    return scene.instance(f"Which file holds {word}?", search(word), answer(path), answer=path)


def count_files(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to count the files in a folder."""
    scene.others()
    folder = scene.folder()
    count = scene.rng.randint(2, 5)
    for _ in range(count):
        scene.file(folder, words=1)
    request = f"How many files are in the folder {folder}?"
    return scene.instance(request, list_folder(folder), answer(str(count)), answer=str(count))


def count_found(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to count the files that contain a word."""
    scene.others()
    word = scene.word()
    count = scene.rng.randint(2, 4)
    for _ in range(count):
        scene.files[scene.path()] = word
    request = f"How many files hold {word}?"
    return scene.instance(request, search(word), answer(str(count)), answer=str(count))


def copy(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to copy a file."""
    scene.others()
    old = scene.file(words=1)
    new = scene.path()
    text = scene.files[old]
    return scene.instance(f"Copy {old} to {new}.", read(old), write(new, text), wanted={new: text})


def replace(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to replace a word in a file."""
    scene.others()
    path, old = _with_word(scene)
    new = scene.word()
    text = scene.files[path].replace(old, new)
    request = f"Replace {old} with {new} in {path}."
    return scene.instance(request, replace_all(path, old, new), wanted={path: text})


def append(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to add a word to a file."""
    scene.others()
    path = scene.file(words=1)
    word = scene.word()
    text = f"{scene.files[path]} {word}"
    request = f"Add {word} to the end of {path}, after a space."
    return scene.instance(request, read(path), write(path, text), wanted={path: text})


def rename_found(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to rename the file that contains a word."""
    scene.others()
    path, word = _with_word(scene)
    new = scene.path()
    request = f"Rename the file that holds {word} to {new}."
    return scene.instance(
        request, search(word), move(path, new), wanted={path: None, new: scene.files[path]}
    )


def remove_found(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to delete the file that contains a word."""
    scene.others()
    path, word = _with_word(scene)
    request = f"Delete the file that holds {word}."
    return scene.instance(request, search(word), delete(path), wanted={path: None})


def move_all(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to move the files in a folder to another folder."""
    scene.others()
    old = scene.folder()
    new = scene.folder()
    paths = sorted(scene.file(old, words=1) for _ in range(2))
    moved = {path: f"{new}/{path.removeprefix(f'{old}/')}" for path in paths}
    request = f"Move all files from the folder {old} to the folder {new}."
    wanted = {path: None for path in paths} | {moved[path]: scene.files[path] for path in paths}
    return scene.instance(
        request, list_folder(old), *(move(*pair) for pair in moved.items()), wanted=wanted
    )


def remove_all(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to delete the files with a given ending."""
    scene.others(2, 3)
    paths = sorted(scene.file(ending="log", words=1) for _ in range(2))
    request = "Delete every file whose name ends with .log."
    return scene.instance(
        request, list_folder(""), *map(delete, paths), wanted=dict.fromkeys(paths)
    )


def swap(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to swap the names of two files."""
    scene.others()
    first = scene.file()
    second = scene.file()
    between = "swap.txt"
    return scene.instance(
        f"Swap the names of {first} and {second}.",
        move(first, between),
        move(second, first),
        move(between, second),
        wanted={first: scene.files[second], second: scene.files[first]},
    )


def join(scene: FilesScene) -> FilesInstance:
    """Generate a task that asks to write the texts of two files to a third file."""
    scene.others()
    first = scene.file(words=1)
    second = scene.file(words=1)
    third = scene.path()
    text = f"{scene.files[first]} {scene.files[second]}"
    request = f"Write the texts of {first} and {second}, with a space between, to {third}."
    return scene.instance(
        request, read(first), read(second), write(third, text), wanted={third: text}
    )


def _with_word(scene: FilesScene) -> tuple[str, str]:
    """Add a file and return its path and one of its words."""
    path = scene.file()
    return path, scene.rng.choice(scene.files[path].split())


TEMPLATES: Mapping[str, tuple[str, Callable[[FilesScene], FilesInstance]]] = MappingProxyType(
    {
        template.__name__: (group, template)
        for group, templates in (
            (ONE_CALL, (rename, remove, create, put_away, replace)),
            (LOOK_FIRST, (tell_text, find, count_files, count_found)),
            (CHANGE, (copy, append, rename_found, remove_found)),
            (SEVERAL, (move_all, remove_all, swap, join)),
        )
        for template in templates
    }
)
"""(group, function that makes an instance) of each template, by name."""


class FilesTasks(GroupedTaskSet):
    """Task set of the templates in the given groups; each has unlimited instances by seed. Every
    instance contains names, and no name occurs in both splits. Raises ValueError for an unknown
    group or split."""

    def __init__(self, groups: Iterable[str], split: str) -> None:
        super().__init__(
            {name: group for name, (group, _) in TEMPLATES.items()}, GROUPS, groups, split
        )

    def instance(self, template_id: str, seed: int) -> FilesInstance:
        """Return the instance for ``seed``, with its solution. Raises KeyError for a template not
        in the set."""
        if template_id not in self.group_of:
            raise KeyError(template_id)
        rng = random.Random(f"files {self.split} {template_id} {seed}")
        return TEMPLATES[template_id][1](FilesScene(rng, self.split))

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the instance for ``seed``. Raises KeyError for a template not in the set."""
        row = self.instance(template_id, seed).row
        return Task(
            f"{template_id}/{seed}", group=self.group_of[template_id], payload=row, seed=seed
        )
