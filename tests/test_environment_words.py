"""The framework knows no environment: outside its own folder nothing imports AWS or speaks its
words."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OWN = ROOT / "realhf" / "aws"
WORDS = re.compile(r"(?<![A-Za-z])(?:aws|ministack|tiers?(?![A-Za-z]))", re.IGNORECASE)
"""``aws`` and ``ministack`` also at the beginning of a name, as in ``AwsEnvironment``; not in
``draws``."""
EXCEPTIONS = {
    "realhf/registry.py": ('"aws": "realhf.aws.environment:DEFINITION"',),
    "realhf/backends/builtin_policy.py": (
        "`aws s3api create-bucket`",
        r'r"aws [a-z0-9-]+ [a-z0-9-]+"',
        r'r"|arn:aws:',
    ),
    "realhf/env/check/calls.py": ('_ENVIRONMENTS = ("environments", "aws")',),
    "realhf/__main__.py": (
        '"python -m realhf.aws.tasks":',
        '"python -m realhf.aws.evaluate":',
        '"aws-env":',
    ),
    "realhf/rollout/anthropic_messages.py": ('"service_tier",',),
    "realhf/rollout/openai_requests.py": ('"service_tier",',),
    "realhf/rollout/openai_responses.py": ('"service_tier",',),
    "realhf/monitor/provenance.py": ('"ministack",', '"awscli",'),
}
"""Lines that may say a word: the registration; how the built-in tokenizer splits text, where a
change would make another policy; folders of the package that hold environments; the default
experiment's environment, whose options stand in the reference already; the list of commands;
packages whose versions a run records; a field of the APIs of OpenAI and Anthropic."""


def files():
    return [path for path in sorted((ROOT / "realhf").rglob("*.py")) if OWN not in path.parents]


def said(path, text):
    """Lines with a word that is no exception of the file."""
    allowed = EXCEPTIONS.get(path.relative_to(ROOT).as_posix(), ())
    lines = [line for line in text.splitlines() if WORDS.search(line)]
    return [line.strip() for line in lines if not any(words in line for words in allowed)]


@pytest.mark.slow
def test_only_an_environments_own_folder_speaks_its_words():
    assert len(files()) > 300
    found = {
        path.relative_to(ROOT).as_posix(): said(path, path.read_text(encoding="utf-8"))
        for path in files()
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.nightly
@pytest.mark.slow
def test_nothing_outside_imports_it():
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            assert not [name for name in names if f"{name}.".startswith("realhf.aws.")], path


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_every_exception_is_needed(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert all(words in text and WORDS.search(words) for words in EXCEPTIONS[name])


def test_the_search_sees_what_it_looks_for():
    told = (
        "the AWS CLI\nAWS_RL_ENV_URL\nclass AwsTask\nby tier\nTIERS\nMiniStack pool\nit "
        "draws\nfrontier\nlaws\n"
    )
    assert len(said(ROOT / "realhf" / "none.py", told)) == 6
