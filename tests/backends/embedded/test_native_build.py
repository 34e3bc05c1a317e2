"""Libraries that the machine's compiler builds at first use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.backends.embedded import native_build
from realhf.backends.embedded.native_build import NativeBuildError, cache_folder, load_library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
LOAD = """
import sys
from pathlib import Path
from realhf.backends.embedded.native_build import load_library
print(load_library(Path(sys.argv[1])).answer())
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


@pytest.fixture
def only_cc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_COMPILERS", ("cc",))


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """Put a shell script in front of the compiler. ``real`` is the compiler itself."""
    script = folder / "bin" / "cc"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\nreal={shutil.which('cc')}\n{lines}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)


def libraries() -> list[Path]:
    return sorted(cache_folder().glob("*.so"))


def test_a_library_is_built_once_for_one_source(source: Path) -> None:
    assert load_library(source).answer() == 42
    [built] = libraries()
    assert built.stat().st_mode & 0o777 == 0o600 and built.parent.stat().st_mode & 0o777 == 0o700
    changed = built.stat().st_mtime_ns
    assert load_library(source).answer() == 42 and built.stat().st_mtime_ns == changed
    source.write_text("int answer(void) { return 43; }\n")
    assert load_library(source).answer() == 43 and len(libraries()) == 2


def test_processes_that_start_together_compile_once(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = source.with_name("calls")
    compiler(
        source.parent, monkeypatch, f'[ "$1" = --version ] || echo x >> {calls}; exec $real "$@"'
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD, str(source)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["42"] * 3
    assert calls.read_text() == "x\n"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("[ $1 = --version ] || { echo bad option >&2; exit 3; }", "ends with 3: bad option"),
        (
            "[ $1 = --version ] || { echo 'a.c: In function f:' >&2; echo 'a.c:1: error: no' >&2; exit 1; }",
            "ends with 1: a.c:1: error: no",
        ),
        ("[ $1 = --version ] || sleep 60", "did not end within"),
    ],
)
@pytest.mark.usefixtures("only_cc")
def test_a_compiler_that_fails_or_hangs_is_an_error(
    source: Path, monkeypatch: pytest.MonkeyPatch, lines: str, reason: str
) -> None:
    monkeypatch.setattr(native_build, "COMPILE_TIMEOUT_S", 1.0)
    compiler(source.parent, monkeypatch, lines)
    with pytest.raises(NativeBuildError, match=reason):
        load_library(source)
    assert not libraries()


def test_the_next_compiler_is_tried(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(source.parent, monkeypatch, "[ $1 = --version ] || exit 1")
    other = source.parent / "bin" / "gcc"
    other.symlink_to(shutil.which("cc", path=os.environ["PATH"].partition(os.pathsep)[2]) or "")
    assert load_library(source).answer() == 42


def test_a_damaged_library_is_built_again(source: Path) -> None:
    folder = cache_folder()
    code = "import sys; from pathlib import Path; from realhf.backends.embedded import native_build as n"
    code += "; p = Path(sys.argv[1]); n._find_or_build(n.find_compilers()[0], p).write_bytes(b'')"
    subprocess.run([sys.executable, "-c", code, str(source)], check=True)
    [built] = folder.glob("*.so")
    assert not built.stat().st_size
    assert load_library(source).answer() == 42 and libraries() == [built]


def test_the_folder_is_where_the_desktop_keeps_caches(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "realhf"
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "elsewhere"))
    assert cache_folder() == source.parent / "elsewhere" / "realhf"


def test_a_folder_that_others_can_replace_is_refused(source: Path) -> None:
    parent = cache_folder().parent
    parent.chmod(0o777)
    with pytest.raises(NativeBuildError, match="can be written by other users"):
        load_library(source)
    parent.chmod(0o1777)
    assert load_library(source).answer() == 42


def test_without_a_compiler_the_text_says_so(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(source.parent))
    with pytest.raises(NativeBuildError, match="no C compiler"):
        load_library(source)


def test_a_folder_or_file_that_others_can_write_is_refused(source: Path) -> None:
    load_library(source)
    [built] = libraries()
    built.chmod(0o622)
    with pytest.raises(NativeBuildError, match="only this user"):
        load_library(source)
    built.unlink()
    target = source.with_name("elsewhere.so")
    target.write_bytes(b"")
    built.symlink_to(target)
    with pytest.raises(NativeBuildError, match="only this user"):
        load_library(source)
    built.parent.chmod(0o770)
    with pytest.raises(NativeBuildError, match="open to other users"):
        load_library(source)
    shutil.move(built.parent, source.with_name("moved"))
    os.symlink(source.with_name("moved"), built.parent)
    with pytest.raises(NativeBuildError, match="not a folder of this user"):
        load_library(source)


def test_a_library_that_cannot_be_loaded_is_an_error(source: Path) -> None:
    source.write_text("int missing(void); int answer(void) { return missing(); }\n")
    with pytest.raises(NativeBuildError, match="missing"):
        load_library(source)
