"""The passport of an environment: what it holds, how it is written and told, and what is no
passport."""

from pathlib import Path

import pytest

from realhf.api.evaluation import wilson_interval
from realhf.api.passport import Counts, Passport, describe_passport, read_passport


def passport() -> Passport:
    kinds = {"beside": Counts(), "left out": Counts(wrong=100, paid=1)}
    for paid in (True, True, False):
        kinds["beside"].add(right=True, paid=paid)
    return Passport(
        "shop",
        "python -m realhf.env check shop.py --mutate --passport",
        "2026-11-28",
        "0123456789ab",
        kinds,
    )


def test_a_passport_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "shop.passport.json"
    passport().write(file)
    assert read_passport(file) == passport()
    low, high = wilson_interval(1, 100)
    assert f"{round(low, 6)}" in file.read_text() and f"{round(high, 6)}" in file.read_text()


def test_the_line_says_how_many_of_which_and_how_sure_it_is(tmp_path: Path) -> None:
    line = passport().line()
    assert line.startswith(
        "shop: of 100 wrong plays 1 were paid (95 %: 0.18 to 5.45 %), of 3 right plays 1 were "
        "refused"
    )
    assert line.endswith("; 2026-11-28, commit 01234567")
    assert "no passport" in describe_passport(tmp_path / "shop.passport.json")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"kinds": {"a": {"wrong": "x"}}}', "[" * 10_000, '{"kinds": []}']
)
def test_what_is_no_passport_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "shop.passport.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"shop\.passport\.json is not a passport"):
        read_passport(file)
    assert "cannot be read" in describe_passport(file)
