"""The files behind a result: imports followed, modules that are started followed, nothing missing in silence."""

import pytest

from realhf.base.files import imported_files, matching_files


@pytest.fixture
def package(tmp_path):
    texts = {
        "made/first.py": "from made import second\nimport json\nSTARTED = ['-m', 'made.started', 'made.nothing']\n",
        "made/second.py": "def later():\n    from made.deep.third import thing\n    return thing\n",
        "made/deep/third.py": "import made.first\nthing = 1\n",
        "made/started.py": "from made.room import thing\n",
        "made/room/__init__.py": "from made.room.one import thing\n",
        "made/room/one.py": "thing = 1\n",
        "made/deep/__init__.py": "",
        "made/alone.py": "",
        "made/data/one.yaml": "",
        "made/data/more/two.yaml": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "made"


def test_imports_are_followed_through_others_and_into_processes(package):
    names = [path.relative_to(package).as_posix() for path in imported_files(package, ["made.first"])]
    assert names == ["deep/third.py", "first.py", "room/__init__.py", "room/one.py", "second.py", "started.py"]


def test_a_module_or_a_pattern_that_finds_nothing_is_an_error(package):
    assert [path.name for path in matching_files(package, ["data/**/*"])] == ["two.yaml", "one.yaml"]
    with pytest.raises(FileNotFoundError, match=r"made\.gone"):
        imported_files(package, ["made.first", "made.gone"])
    with pytest.raises(FileNotFoundError, match="data/\\*\\.yml"):
        matching_files(package, ["data/*.yaml", "data/*.yml"])
