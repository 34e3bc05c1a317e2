"""The Python sources of a vLLM, installed or in a wheel, as text and syntax trees. Nothing of them
is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from functools import cached_property
from pathlib import Path


class VllmSources:
    """Python files of the package ``vllm`` in ``place``: a folder that contains it, or a wheel."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._read: dict[str, str] = {}
        self._joined: dict[str, str] = {}

    @cached_property
    def _names(self) -> list[str]:
        if self.place.is_dir():
            paths = (self.place / "vllm").rglob("*.py")
            return sorted(str(path.relative_to(self.place)) for path in paths)
        every = self._wheel.namelist()
        return sorted(name for name in every if name[:5] == "vllm/" and name.endswith(".py"))

    def text(self, file: str) -> str:
        """Text of ``vllm/file``; "" without such a file."""
        name = f"vllm/{file}"
        if name not in self._names:
            return ""
        if name not in self._read:
            self._read[name] = self._load(name)
        return self._read[name]

    def _load(self, name: str) -> str:
        if self.place.is_dir():
            return (self.place / name).read_text(encoding="utf-8")
        return self._wheel.read(name).decode()

    @cached_property
    def _wheel(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.place)

    def texts(self, under: str) -> str:
        """Text of all files whose path below ``vllm`` starts with ``under``."""
        if under not in self._joined:
            names = [name.removeprefix("vllm/") for name in self._names]
            found = [self.text(name) for name in names if name.startswith(under)]
            self._joined[under] = "\n".join(found)
        return self._joined[under]

    def find(self, file: str, path: str) -> ast.ClassDef | ast.FunctionDef | None:
        """Class or function of a file by its name, a method as ``Class.method``; None without."""
        body: list[ast.stmt] = ast.parse(self.text(file)).body
        found: ast.ClassDef | ast.FunctionDef | None = None
        for part in path.split("."):
            named = [
                node
                for node in body
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
            ]
            if not named:
                return None
            found = named[-1]
            body = found.body
        return found

    def source(self, file: str, path: str) -> str:
        """Code of a class or function without comments and docstring; "" without it."""
        node = self.find(file, path)
        if node is None:
            return ""
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return ast.unparse(node)

    def fields(self, file: str, name: str) -> dict[str, bool]:
        """Fields of a dataclass, and whether each has a default; {} without the class."""
        node = self.find(file, name)
        return {
            row.target.id: row.value is not None
            for row in (node.body if node is not None else [])
            if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name)
        }

    def parameters(self, file: str, path: str) -> list[str]:
        """Names of a function's parameters; [] without the function."""
        node = self.find(file, path)
        if not isinstance(node, ast.FunctionDef):
            return []
        every = node.args
        return [each.arg for each in (*every.posonlyargs, *every.args, *every.kwonlyargs)]


def version_of(wheel: Path) -> str:
    """Version in the name of a wheel, such as 0.33."""
    return ".".join(wheel.name.split("-")[1].split(".")[:2])


def download(version: str, folder: Path, timeout_s: float) -> Path | str:
    """Wheel of a vLLM, downloaded without what it needs and never installed; the reason if that is
    not possible. A wheel that is there already is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), f"vllm=={version}"]
    if not (found := sorted(folder.glob(f"vllm-{version}*.whl"))):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"pip did not download vllm=={version} within {timeout_s:g} s"
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word of pip"])[-1]
            return f"pip does not download vllm=={version}: {last}"
        found = sorted(folder.glob(f"vllm-{version}*.whl"))
    return found[0] if found else f"pip downloaded no wheel of vllm=={version}"
