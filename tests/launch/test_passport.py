"""The passport of an environment in the folder of a run."""

from pathlib import Path

from realhf.api.passport import PASSPORT_FILE, Counts, Passport, describe_passport
from realhf.env.loader.load import passport_file
from realhf.launch.run import copy_passport

SHELF = """
class Shelf:
    def reset(self, **row):
        return "?"

    def get_reward(self):
        return 0.0
"""


def test_a_run_keeps_what_its_environment_has_and_nothing_of_another(tmp_path: Path) -> None:
    file = tmp_path / "shelf.py"
    run = tmp_path / "run"
    file.write_text(SHELF)
    run.mkdir()
    assert (
        passport_file(str(file))
        == passport_file(f"{file}:Shelf")
        == tmp_path / "Shelf.passport.json"
    )
    Passport("shelf", "check", "2026-11-28", "", {"beside": Counts(wrong=3)}).write(
        tmp_path / "Shelf.passport.json"
    )
    copy_passport(f"{file}:Shelf", run)
    assert describe_passport(run / PASSPORT_FILE).startswith("shelf: of 3 wrong plays 0 were paid")
    (tmp_path / "Shelf.passport.json").unlink()
    copy_passport(f"{file}:Shelf", run)
    assert not (run / PASSPORT_FILE).exists()
    copy_passport("", run)
    assert [*run.iterdir()] == [], "a run without an environment has none"


def test_what_ships_has_its_passport_beside_its_module() -> None:
    assert passport_file("aws").parts[-2:] == ("aws", "aws.passport.json")
    assert passport_file("files").name == "files.passport.json"
