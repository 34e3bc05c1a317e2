"""What a public project has beside its code: workflows, hooks, the pages for reporters and for
coding agents. The workflows were never run; what they run is what CONTRIBUTING.md and the Makefile
name."""

import re
from pathlib import Path

import pytest
import yaml

import realhf
from tests.docs.agents_page import PAGE, agents_page

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SYSTEM_PACKAGES = "sudo apt-get install --yes bubblewrap"
PINNED = re.compile(r"^(ruff|pyright)==(\S+)$", re.MULTILINE)


def steps(workflow: Path) -> list[dict]:
    """Return the steps of all jobs, each with the matrix of its job."""
    found = []
    for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
        assert job["timeout-minutes"] <= 180, "every wait has a deadline"
        found += [
            {**step, "matrix": job.get("strategy", {}).get("matrix", {})} for step in job["steps"]
        ]
    return found


def commands(step: dict) -> list[str]:
    """Return the commands of a step, one for each entry of the matrix."""
    lines = step.get("run", "").splitlines()
    for name, values in step["matrix"].items():
        place = re.compile(rf"\$\{{\{{ matrix\.{name} \}}\}}")
        lines = [
            place.sub(str(value), line)
            for line in lines
            for value in (values if place.search(line) else [""])
        ]
    return lines


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_the_project_names_and_nothing_else(workflow: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    help_text = "\n".join(re.findall(r"@echo \"(make .*)\"", makefile))
    found = [line for step in steps(workflow) for line in commands(step)]
    assert found
    for line in found:
        assert "${{" not in line, "an expression in a command lets whoever sets it run commands"
        if line == SYSTEM_PACKAGES:
            continue
        target = re.fullmatch(r"make ([\w-]+)( PYTHON=python3\.1[123])?", line)
        assert target, line
        assert re.search(rf"^{target[1]}:", makefile, re.MULTILINE), line
        assert re.search(rf"make\s+{target[1]}\b", contributing + help_text), (
            f"{line}: no page names it"
        )


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_the_repository_and_no_more(workflow: Path) -> None:
    found = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert found["permissions"] == {"contents": "read"}
    assert {step["uses"].partition("@")[0] for step in steps(workflow) if "uses" in step} <= {
        "actions/checkout",
        "actions/setup-python",
    }


def test_every_version_of_python_that_is_promised_is_tested() -> None:
    tested = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    versions = tested["jobs"]["test"]["strategy"]["matrix"]["python"]
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert versions == re.findall(r"Programming Language :: Python :: (3\.\d+)", setup)


def test_hooks_run_the_programs_that_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"], (
        "the versions are those of constraints.txt"
    )
    entries = [hook["entry"] for hook in hooks[0]["hooks"]]
    assert {entry.split()[0] for entry in entries} == {".venv/bin/ruff", ".venv/bin/pyright"}
    assert {
        name for name, _ in PINNED.findall((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    } == {
        "ruff",
        "pyright",
    }
    lint = re.search(
        r"^lint: install\n((?:\t.*\n)+)",
        (ROOT / "Makefile").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert lint
    for entry in entries:
        program, *verbs = entry.replace("--force-exclude", "").split()
        assert f"$(BIN)/{Path(program).name} {' '.join(verbs)}".strip() in lint[1]


def test_the_citation_has_the_version_and_the_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == realhf.__version__
    assert citation["license"] == "Apache-2.0" and citation["authors"] == [
        {"name": "the realhf authors"}
    ]


def test_no_page_for_the_public_invents_an_address() -> None:
    pages = [ROOT / "SECURITY.md", ROOT / "CITATION.cff", PAGE, *(ROOT / ".github").rglob("*.md")]
    for page in pages:
        assert not re.search(r"https?://|[\w.]+@[\w.]+\.\w+", page.read_text(encoding="utf-8")), (
            page
        )


def test_the_page_for_coding_agents_is_made_from_the_page_for_people() -> None:
    assert PAGE.read_text(encoding="utf-8") == agents_page(), (
        "python -m tests.docs.agents_page > AGENTS.md"
    )
    assert len(agents_page().split()) < 1500
