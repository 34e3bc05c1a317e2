"""What the pages say is so: what they and the code cite exists, the architecture is that of the
tree, figures agree."""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from realhf.aws.tasks.loader import load_templates
from realhf.env.__main__ import main as environment_command

HERE = Path(__file__).resolve()
REPO = HERE.parents[2]
REFERENCE = "docs/reference"
FOLDERS = ("realhf", "workers", "experiments", "tests", "benchmarks", "configs", "examples")
SECTION = r"\d{1,2}(?:\.\d{1,2})?(?!\d)"
ASIDE = r"(?:\s+\([^()]*\))?"
SECTIONS = rf"{SECTION}{ASIDE}(?:(?:,|,?\s+and|,?\s+to)\s+{SECTION}{ASIDE})*"
CITATION = re.compile(rf"docs/reference/(?P<file>\w+\.md)(?P<rest>\s+(?P<sections>{SECTIONS}))?")
"""The one form: file, space, section; several with commas, "and" and "to", each perhaps with words
in brackets."""
LINKED_CITATION = re.compile(
    r"\]\((?:\.\./|reference/|docs/reference/)*(?P<file>dataflow|environment|trajectory|learning)\.md\) "
    rf"(?P<sections>{SECTIONS})"
)
OTHER_SPELLING = re.compile(
    r"(?<![-\w.`])(?:(?:dataflow|environment|trajectory|learning)\s+spec(?:ification)?s?\b"
    r"|spec(?:ification)?s?,?(?:\s+(?:dataflow|environment|trajectory|learning))?,?(?:\s+(?:sections?|tests?))?\s+\d"
    r"|the\s+specifications?\b(?=[^.\n]{0,40}\d))",
    re.IGNORECASE,
)
LINK = re.compile(r"\]\((?P<target>[^()\s]+)\)")
DOCS_PATH = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|png)")
MODULE_PATH = re.compile(r"(?<![\w/.-])realhf/[\w./*-]*[\w/*]")
DOTTED = re.compile(
    r"(?P<run>python3? -m )?(?<![\w./-])(?P<name>realhf(?:\.\w+)+)(?::(?P<attribute>\w+))?"
)

TO_BE_WRITTEN = {"realhf.backends.bigram_generation"}
"""Modules that a page of ``docs/extend/`` tells its reader to add."""


@pytest.mark.slow
def test_every_citation_names_a_section_of_the_reference() -> None:
    """A citation in code or tests is a file of the reference and sections that it has."""
    found = 0
    problems = []
    for path, text in _python_files():
        if path == HERE:
            continue
        for citation in CITATION.finditer(text):
            found += 1
            problems += [
                f"{_at(path, text, citation)}: {problem}"
                for problem in _citation_problems(citation)
            ]
    assert not problems, "\n".join(problems)
    assert found > 150, f"only {found} citations were found: is the form still the same?"


@pytest.mark.slow
def test_no_other_spelling_of_a_citation_is_left() -> None:
    """Nobody cites a specification that is not in the repository."""
    problems = [
        f"{_at(path, text, other)}: {other[0]!r}"
        for path, text in _python_files()
        if path != HERE
        for other in OTHER_SPELLING.finditer(text)
        if _in_words(text, other.start())
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_links_of_the_docs_lead_to_files_and_headings() -> None:
    """Relative links, and paths of docs in any text, exist; anchors are headings of the file that
    they point into."""
    problems = []
    links = 0
    for path, text in _documents():
        for link in LINK.finditer(text):
            target, _, anchor = link["target"].partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            links += 1
            file = path.parent / target if target else path
            if not file.exists():
                problems.append(f"{_at(path, text, link)}: no file {target}")
            elif anchor and anchor not in _anchors(file):
                problems.append(
                    f"{_at(path, text, link)}: {target or path.name} has no heading for #{anchor}"
                )
    for path, text in [*_documents(), *_python_files()]:
        problems += [f"{_at(path, text, named)}: no file {named[0]}"
                     for named in DOCS_PATH.finditer(text)
                     if path != HERE and not (REPO / named[0]).exists()]  # fmt: skip
    assert not problems, "\n".join(problems)
    assert links > 20, f"only {links} links were found"


def test_sections_that_the_docs_point_to_exist() -> None:
    """A link to a file of the reference that is followed by a section names one that the file
    has."""
    problems = []
    found = 0
    for path, text in _documents():
        for link in LINKED_CITATION.finditer(text):
            if not (path.parent.name == "reference" or "reference/" in link[0]):
                continue  # the guides have no numbered sections
            found += 1
            missing = _missing(f"{link['file']}.md", link["sections"])
            problems += [f"{_at(path, text, link)}: {problem}" for problem in missing]
    assert not problems, "\n".join(problems)
    assert found


def test_modules_and_paths_that_the_docs_name_exist() -> None:
    """``realhf/...`` is a file or folder, ``realhf.x.y`` a module or something in one, ``python
    -m`` can run it."""
    problems = []
    found = 0
    for path, text in _documents():
        for named in MODULE_PATH.finditer(text):
            found += 1
            if not (any(REPO.glob(named[0])) if "*" in named[0] else (REPO / named[0]).exists()):
                problems.append(f"{_at(path, text, named)}: no file {named[0]}")
        for named in DOTTED.finditer(text):
            found += 1
            problem = _module_problem(
                named["name"], named["attribute"], runs=named["run"] is not None
            )
            problems += [f"{_at(path, text, named)}: {problem}"] if problem else []
    assert not problems, "\n".join(problems)
    assert found > 20, f"only {found} names were found"


def test_what_is_wrong_is_found() -> None:
    """The checks above see a file, a section and a module that do not exist, and each old
    spelling."""
    assert not _citation_problems(_cited("see docs/reference/environment.md 2.1, 10. Parsing"))
    assert not _citation_problems(_cited("docs/reference/environment.md 7 (Chaos) and 8"))
    assert _citation_problems(_cited("docs/reference/nowhere.md 1"))
    assert _citation_problems(_cited("docs/reference/environment.md 99"))
    assert _citation_problems(_cited("docs/reference/trajectory.md 3.3 to 3.99"))
    assert _citation_problems(_cited("docs/reference/dataflow.md says so"))
    for spelling in ("environment spec "
                     "2.1", "spec dataflow, section "
                            "9", "dataflow spec section 2", "Spec section 6.",
                     "trajectory specification\n    3.11", "specification tests 27, 31", "spec 7"):  # fmt: skip
        assert OTHER_SPELLING.search(spelling), spelling
    assert _module_problem("realhf.no.such_module", None, runs=False)
    assert _module_problem("realhf.api.sample.NoSuchThing", None, runs=False)
    assert _module_problem("realhf.api.sample", None, runs=False) is None
    assert _module_problem("realhf.api.sample.SequenceSample", None, runs=False) is None


def _python_files() -> Iterator[tuple[Path, str]]:
    for folder in FOLDERS:
        for path in sorted((REPO / folder).rglob("*.py")):
            yield path, path.read_text(encoding="utf-8")


def _documents() -> Iterator[tuple[Path, str]]:
    for path in [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]:
        yield path, path.read_text(encoding="utf-8")


def _at(path: Path, text: str, found: re.Match[str]) -> str:
    return f"{path.relative_to(REPO)}:{text.count(chr(10), 0, found.start()) + 1}"


def _cited(text: str) -> re.Match[str]:
    found = CITATION.search(text)
    assert found is not None
    return found


def _citation_problems(citation: re.Match[str]) -> list[str]:
    if citation["sections"] is None:
        return [f"{citation[0]} names no section"]
    return _missing(citation["file"], citation["sections"])


def _missing(file: str, sections: str) -> list[str]:
    path = REPO / REFERENCE / file
    if not path.is_file():
        return [f"there is no {REFERENCE}/{file}"]
    numbers = re.findall(SECTION, re.sub(r"\([^()]*\)", "", sections))
    known = set(
        re.findall(r"^#{2,4} (\d+(?:\.\d+)?)\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    )
    return [
        f"{REFERENCE}/{file} has no section {number}" for number in numbers if number not in known
    ]


def _in_words(text: str, offset: int) -> bool:
    """Whether an offset of a module lies in a string or comment."""
    row = text.count("\n", 0, offset) + 1
    place = (row, offset - (text.rfind("\n", 0, offset) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    words = (tokenize.STRING, tokenize.COMMENT)
    return any(token.type in words and token.start <= place < token.end for token in tokens)


def _anchors(file: Path) -> set[str]:
    """What GitHub makes of the headings of a Markdown file."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _module_problem(name: str, attribute: str | None, *, runs: bool) -> str | None:
    parts = name.split(".")
    if ".".join(parts[:3]) in TO_BE_WRITTEN:
        return None
    for length in range(len(parts), 0, -1):
        base = REPO.joinpath(*parts[:length])
        file = next(
            (f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None
        )
        if file is None and not base.is_dir():
            continue
        rest = [*parts[length:], *([attribute] if attribute else [])]
        if rest and (file is None or rest[0] not in _names(file)):
            return f"{'.'.join(parts[:length])} has no {rest[0]}"
        if (
            runs
            and not rest
            and not (base.with_suffix(".py").is_file() or (base / "__main__.py").is_file())
        ):
            return f"python -m {name} has nothing to run"
        return None
    return f"no module {name}"


def _names(file: Path) -> set[str]:
    """What a module defines or imports at its top."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                part.id
                for target in targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name)
            }
    return found


ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FOLDER = re.compile(
    r"`((?:realhf|workers|experiments|configs|tests|benchmarks|docs|examples)/(?:[\w]+/)*)`"
)
MODULE = re.compile(r"`((?:realhf|workers|tests)/[\w/]+\.py)`")


def section(title: str) -> str:
    """The text below a heading of the second level, up to the next one."""
    parts = re.split(r"(?m)^## ", PAGE)
    found = [part for part in parts if part.startswith(f"{title}\n")]
    assert len(found) == 1, f"docs/architecture.md has {len(found)} sections {title!r}"
    return found[0]


def table(title: str) -> list[list[str]]:
    """The cells of every row of a section's table, without its head."""
    rows = [
        line.strip("|").split(" | ") for line in section(title).splitlines() if line.startswith("|")
    ]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def rooms() -> set[str]:
    """Every folder of the product that holds modules, as it is written on the page."""
    modules = [path for path in (ROOT / "realhf").rglob("*.py") if path.name != "__init__.py"]
    return {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in modules}


def console_scripts() -> set[str]:
    """Names of the commands that the package installs."""
    calls = [
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) and node.arg == "entry_points"
    ]
    points = ast.literal_eval(calls[0].value)
    return {entry.partition("=")[0].strip() for entry in points["console_scripts"]}


def test_every_room_of_the_tree_has_one_row():
    named = [folder for row in table("Rooms") for folder in FOLDER.findall(row[0])]
    assert sorted(named) == sorted(rooms())


def test_a_room_says_what_it_holds():
    assert [row for row in table("Rooms") if len(row) != 2 or len(row[1].split()) <= 3] == []


def test_each_question_is_answered_by_a_folder_or_a_module():
    questions = table("I want to change how X works")
    assert len({row[0] for row in questions}) == len(questions) >= 20
    known = rooms()
    for question, answer in questions:
        first = answer.partition(":")[0]
        folders = FOLDER.findall(first)
        modules = MODULE.findall(first)
        assert len(folders) + len(modules) == 1, (
            f"one folder or module answers {question!r}, not {folders + modules}"
        )
        assert set(folders) <= known, question


def test_every_worker_is_in_the_table_of_processes():
    workers = {f"workers/{path.name}" for path in (ROOT / "workers").glob("*_worker.py")}
    assert len(workers) >= 7
    named = {module for row in table("Processes") for module in MODULE.findall(row[0])}
    assert workers <= named


def test_every_console_script_is_in_the_table_of_processes():
    scripts = console_scripts()
    assert len(scripts) >= 2
    text = " ".join(row[0] for row in table("Processes"))
    assert {name for name in scripts if f"`{name}`" not in text} == set()


def test_a_process_says_who_starts_it_what_it_holds_and_what_ends_it():
    assert [row for row in table("Processes") if len(row) != 4 or not all(row)] == []


def test_every_worker_is_in_the_table_of_deaths():
    """By the name that the table of processes gives it."""
    dying = " ".join(row[0] for row in table("When a process dies"))
    for path in (ROOT / "workers").glob("*_worker.py"):
        kind = path.stem.removesuffix("_worker")
        assert kind in dying, f"nothing is said about the death of a {kind} worker"


def test_every_folder_and_module_on_the_page_exists():
    missing = [
        path
        for path in {*FOLDER.findall(PAGE), *MODULE.findall(PAGE)}
        if not (ROOT / path).exists()
    ]
    assert not missing


def test_the_tables_are_read_as_they_are_written():
    """The checks above see what they look for."""
    assert FOLDER.findall("`realhf/aws/cli/` and realhf/api/") == ["realhf/aws/cli/"]
    assert MODULE.findall("`workers/env_worker.py`, also `aws-env`") == ["workers/env_worker.py"]
    with pytest.raises(AssertionError, match="0 sections"):
        section("No such section")


NUMBER = re.compile(r"(?<![\w.,])\d+(?:[.,]\d+)*")
MEASURED = "docs/measured.md"
QUOTED = (
    (
        "docs/quickstart.md",
        r"minutes on two cores \((.*?) on the machine",
        MEASURED,
        "whole default run",
    ),
    (
        "docs/environments/sql.md",
        r"The runs took (.*?) on two quiet",
        MEASURED,
        "whole runs on `sql`",
    ),
    (
        "docs/environments/files.md",
        r"sampled episodes: (72\.6 %) of",
        MEASURED,
        "whole runs on `sql`",
    ),
    ("docs/environments/files.md", r"Wilson\), (94\.7 %) of", MEASURED, "whole runs on `sql`"),
    (
        "docs/environments/files.md",
        r"The runs took (296 to 599 s)",
        MEASURED,
        "whole runs on `sql`",
    ),
    (
        "docs/environments/countdown.md",
        r"sampled episodes: (72\.2 %) before",
        MEASURED,
        "whole runs on `sql`",
    ),
    (
        "docs/environments/countdown.md",
        r"360 episodes\), (89\.2 %) after",
        MEASURED,
        "whole runs on `sql`",
    ),
    (
        "docs/adapters.md",
        r"all weights came to (58\.8 %)",
        "docs/environments/countdown.md",
        "The equation of a two-number puzzle",
    ),
    (
        "docs/trajectory_server.md",
        r"a day later (?s:(.*?))\. These",
        MEASURED,
        "trajectory server, durable",
    ),
    (
        "docs/asynchronous.md",
        r"\| 200 ms, simulated, the latest(?: \| \d){3}.*",
        MEASURED,
        "asynchronous (eta 1) against",
    ),
    (
        "docs/asynchronous.md",
        r"\| true, about .*?4\.01.*",
        MEASURED,
        "the same with the true latency",
    ),
    (
        "docs/running.md",
        r"12 steps, 5e-5 \| (85\.5 -> 88\.3)",
        MEASURED,
        "SmolLM2-135M, demonstrations and GRPO",
    ),
    (
        "docs/recipes.md",
        r"(110 to 116 s) with the policy that ships",
        MEASURED,
        "whole default run",
    ),
    (
        "docs/recipes.md",
        r"(76\.1 -> 97\.3 .*?), two cores \| \[sql\]",
        MEASURED,
        "whole runs on `sql`",
    ),
    (
        "docs/recipes.md",
        r"(72\.6 -> 94\.7 .*?), two busy cores \| \[files\]",
        MEASURED,
        "whole runs on `sql`",
    ),
    (
        "docs/recipes.md",
        r"(72\.2 -> 89\.2 .*?), two cores \| \[countdown\]",
        MEASURED,
        "whole runs on `sql`",
    ),
    (
        "docs/recipes.md",
        r"(85\.5 after its demonstrations, 88\.3) after GRPO .*?\| 18 minutes",
        MEASURED,
        "SmolLM2-135M, demonstrations and GRPO",
    ),
    *(
        (
            "docs/recipes.md",
            rf"default job.*?({before} -> {after})",
            MEASURED,
            f"{seed} | sampled |",
        )
        for seed, before, after in ((1, "68.4", "95.5"), (2, "64.1", "95.5"), (3, "60.7", "97.2"))
    ),
    (
        "README.md",
        r"GRPO (86\.7,\s+90\.0 and 88\.1) %",
        MEASURED,
        "SmolLM2-135M, demonstrations and GRPO",
    ),
    (
        "README.md",
        r"Demonstrations bring (85\.5) %",
        MEASURED,
        "SmolLM2-135M, demonstrations and GRPO",
    ),
    (
        "README.md",
        r"less, (52\.4 %, came to 85\.9)\s",
        "docs/running.md",
        "60 steps of 16, 15 %",
    ),
    (
        "docs/measured.md",
        r"(85\.5 % after demonstrations, 88\.3)",
        "docs/running.md",
        "All three: 85.5",
    ),
    ("docs/measured.md", r"chance\): (86\.7), 90", "docs/running.md", "seed 1, after 12 steps"),
    ("docs/measured.md", r"86\.7, (90\.0) and", "docs/running.md", "seed 2, after 12 steps"),
    ("docs/measured.md", r"90\.0 and (88\.1) ", "docs/running.md", "seed 3, after 12 steps"),
    (
        "docs/measured.md",
        r"\| 17\.4 to (17\.5) minutes",
        "docs/running.md",
        "seed 2, after 12 steps",
    ),
)
"""A page, what it says (the group, if there is one), the page that has it first, and how the row or
paragraph begins there, in which every number has to stand."""
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


@pytest.mark.parametrize(
    ("page", "quote", "origin", "start"), QUOTED, ids=lambda part: str(part)[:40]
)
def test_a_quoted_figure_is_that_of_its_source(
    page: str, quote: str, origin: str, start: str
) -> None:
    found = re.search(quote, read(page))
    assert found, f"{page} does not say {quote!r} any more"
    text = found[1] if found.re.groups else found[0]
    if COUNTED.search(text):
        text = "|".join(text.split("|")[5:])
    known = numbers(source(origin, start))
    assert numbers(text) and [number for number in numbers(text) if number not in known] == []


def test_the_first_screen_of_the_readme_says_what_the_default_job_trains() -> None:
    """A small transformer that was taught on its own tasks, followed by the job's own curve and the
    real model."""
    screen = " ".join(read("README.md").partition("\n## ")[0].split())
    weights = ROOT / "realhf" / "aws" / "training" / "policy" / "model.safetensors"
    with safe_open(weights, "np") as opened:
        parameters = sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    assert round(parameters / 1e6, 1) == 1.0 and "a transformer of one million parameters" in screen
    templates = load_templates()
    tiers = ("warmup", "beginner", "intermediate")
    starters = [
        each
        for each in templates
        if "starter" in each.tags and each.tier in tiers and each.split != "heldout"
    ]
    assert (
        f"imitation of scripted episodes first, on the same {len(starters)} of the "
        f"{len(templates)} kinds" in screen
    )
    assert "make train-real" in screen and "SmolLM2-135M-Instruct" in screen
    assert re.findall(r"!\[.*?\]\((.*?)\)", read("README.md"))[0] == "docs/learning.png"


def test_the_readme_says_how_its_commands_find_the_environment() -> None:
    """Before the first of them that ``make`` does not run."""
    text = read("README.md")
    assert text.index("source .venv/bin/activate") < text.index("python -m realhf")
    for page in ("docs/README.md", "docs/quickstart.md"):
        assert "source .venv/bin/activate" in read(page)


def test_the_readme_allows_a_role_on_several_hosts_as_the_launcher_does() -> None:
    """Where the network is trusted, as the refusal and the page about hosts say."""
    limits = " ".join(read("README.md").partition("## Platforms and limits")[2].split())
    refusal = (ROOT / "realhf" / "dataflow" / "worker_group.py").read_text(encoding="utf-8")
    for said in (limits, read("docs/cluster.md"), refusal):
        assert "network.trusted=true" in said
    assert "A role is trained on one host, or on several where" in limits


def learned(page: str) -> list[str]:
    """The rows of the learning table, three seeds sampled and greedy."""
    return re.findall(r"^\| [123] \| (?:sampled|greedy) \| .*->.*$", read(page), re.MULTILINE)


def test_the_output_in_the_quickstart_is_of_the_run_in_the_learning_table() -> None:
    """Success before and after training, sampled, overall and by tier."""
    table = learned(MEASURED)
    assert len(table) == 6
    lines = re.findall(r"held-out, (?:before|after).*sampled overall.*", read("docs/quickstart.md"))
    printed = [re.findall(r"([\d.]+)%", line.partition("greedy")[0]) for line in lines]
    cells = [cell.strip(" |").split(" -> ") for cell in table[0].split(" | ")[2:]]
    before, after = [list(column) for column in zip(*cells, strict=True)]
    assert [printed[0], printed[-1]] == [before, after]


@pytest.mark.slow
def test_the_readme_fits_on_one_screen_and_its_environment_passes_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example is written to a file and checked by the command that the page prints under it."""
    text = read("README.md")
    assert len(text.splitlines()) <= 110
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [command] = re.findall(r"^    python -m realhf\.env (check .*?)\s+#", text, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(code)
    assert environment_command(command.split()) == 0, capsys.readouterr().out


def test_a_run_that_a_page_names_has_the_figures_of_one_page() -> None:
    """No two pages print what a run of one name has said."""
    named: dict[str, set[str]] = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for name in re.findall(
            r"^results: runs/\S*?/(\S*\d)(?:-\.\.\.)?$",
            page.read_text(encoding="utf-8"),
            re.MULTILINE,
        ):
            named.setdefault(name, set()).add(page.name)
    assert named and [name for name, pages in named.items() if len(pages) > 1] == []


def test_what_make_says_is_in_the_table_of_the_quickstart() -> None:
    """In the words of the Makefile; the page used to keep those of an earlier one."""
    said = re.findall(r"^\| `(make: .*?) \.\.\.` \|", read("docs/quickstart.md"), re.MULTILINE)
    makefile = read("Makefile")
    assert said and [words for words in said if words not in makefile] == []


def test_the_episode_in_the_quickstart_names_its_task_as_a_run_does() -> None:
    """By the identifier of the sample; the number of the template that the page showed is in no
    episodes.txt."""
    [(sample, task, seed)] = re.findall(
        r"^=== step \d+, sample (\S+)@\d+: \w+ task (\S+) \(seed (\d+)\)",
        read("docs/quickstart.md"),
        re.MULTILINE,
    )
    assert sample == task and task.endswith(f"-{seed}")
