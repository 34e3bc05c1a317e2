"""A figure that stands on several pages is the same on all of them: that of its own page, mostly docs/measured.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"(?<![\w.,])\d+(?:[.,]\d+)*")
MEASURED = "docs/measured.md"
QUOTED = (
    ("docs/quickstart.md", r"in about nine minutes on two cores \((.*?) on the machine", MEASURED, "whole default run"),
    ("docs/environment.md", r"\| environment time of 8 sessions.*", MEASURED, "environment time of 8 sessions"),
    ("docs/environments/sql.md", r"evaluations included, took (321 s)", MEASURED, "whole runs on `sql`"),
    ("docs/environments/files.md", r"sampled episodes: (63\.5 %) before", MEASURED, "whole runs on `sql`"),
    ("docs/environments/files.md", r"Wilson\), (87\.7 %) after", MEASURED, "whole runs on `sql`"),
    ("docs/environments/files.md", r"on quiet cores: (236 s)", MEASURED, "whole runs on `sql`"),
    ("docs/environments/countdown.md", r"sampled episodes: (34\.5 %) before", MEASURED, "whole runs on `sql`"),
    ("docs/environments/countdown.md", r"Wilson\), (58\.8 %) after", MEASURED, "whole runs on `sql`"),
    ("docs/adapters.md", r"all weights reach (58\.8 %)", MEASURED, "whole runs on `sql`"),
    ("docs/trajectory_server.md", r"a day later (?s:(.*?))\. These", MEASURED, "trajectory server, durable"),
    (
        "docs/asynchronous.md",
        r"\| 200 ms, simulated, the latest(?: \| \d){3}.*",
        MEASURED,
        "asynchronous (eta 1) against",
    ),
    ("docs/asynchronous.md", r"\| true, about .*?4\.01.*", MEASURED, "the same with the true latency"),
    ("docs/running.md", r"The last row took (.*?) on two quiet", MEASURED, "SmolLM2-135M from an empty clone"),
    ("README.md", r"to the report it took (.*?):", MEASURED, "SmolLM2-135M from an empty clone"),
    ("README.md", r"report it took(?s:.*?)(52\.4) after the demonstrations", "docs/running.md", "All 1,287 episodes"),
    ("README.md", r"after the demonstrations, (86\.0)", "docs/running.md", "after 36 steps of GRPO, seed 1"),
    ("README.md", r"86\.0, (87\.4)", "docs/running.md", "seed 2 (from"),
    ("README.md", r"87\.4\s+and (84\.1) after", "docs/running.md", "seed 3 (from"),
)
"""A page, what it says (the group, if there is one), the page that has it first, and how the row or paragraph begins
there, in which every number has to stand."""
COUNTED = re.compile(r"^\| (?:200 ms, simulated|true, about)")
"""Rows whose first cells are no measurements: latency, eta, niceness and rounds."""


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def source(page: str, start: str) -> str:
    """The one row or paragraph of a page that begins so."""
    lines = re.split(r"\n(?=\|)|\n\n", read(page))
    (found,) = [line for line in lines if line.lstrip("| \n").startswith(start)]
    return found


def numbers(text: str) -> list[str]:
    return NUMBER.findall(text)


@pytest.mark.parametrize(("page", "quote", "origin", "start"), QUOTED, ids=lambda part: str(part)[:40])
def test_a_quoted_figure_is_that_of_its_source(page: str, quote: str, origin: str, start: str) -> None:
    found = re.search(quote, read(page))
    assert found, f"{page} does not say {quote!r} any more"
    text = found[1] if found.re.groups else found[0]
    if COUNTED.search(text):
        text = "|".join(text.split("|")[5:])
    known = numbers(source(origin, start))
    assert numbers(text) and [number for number in numbers(text) if number not in known] == []


def test_the_rows_of_the_readme_are_rows_of_the_page_of_measurements() -> None:
    """The README shows some of them, shorter."""
    section = read("README.md").partition("## Measured")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 6
    for name, said in rows:
        start = re.split(r", 64 episodes|:|, simulated", name)[0]
        if "true latency" in name:
            start = "the same with the true latency"
        known = numbers(source(MEASURED, start))
        assert [number for number in numbers(said) if number not in known] == [], name


def learned(page: str) -> list[str]:
    """The rows of the learning table, three seeds sampled and greedy."""
    return re.findall(r"^\| [123] \| (?:sampled|greedy) \| .*->.*$", read(page), re.MULTILINE)


def test_the_learning_table_is_one() -> None:
    """The README and the page of measurements."""
    table = learned(MEASURED)
    assert len(table) == 6 and learned("README.md") == table


def test_the_output_in_the_readme_is_of_the_run_in_its_table() -> None:
    """The same run had other figures on two pages."""
    text = read("README.md")
    said = [
        re.findall(r"([\d.]+)%", line) for line in re.findall(r"held-out, (?:before|after).*sampled overall.*", text)
    ]
    first = learned("README.md")[0].split(" | ")[2:]
    cells = [cell.strip(" |").split(" -> ") for cell in first]
    assert said == [[before for before, _ in cells], [after for _, after in cells]]


def test_a_run_that_a_page_names_has_the_figures_of_one_page() -> None:
    """No two pages print what a run of one name has said."""
    named: dict[str, set[str]] = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for name in re.findall(r"^results: runs/\S*?/(\S*\d)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            named.setdefault(name, set()).add(page.name)
    assert named and [name for name, pages in named.items() if len(pages) > 1] == []
