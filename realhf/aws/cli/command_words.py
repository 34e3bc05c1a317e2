"""Reads the words of an AWS command line as the CLI does: global options, service, operation, arguments.

Every part that must know what a command asks for takes it from here, by way of ``policy.Verdict``. Words that the CLI
would read in another way than this module are refused, so that there are no two opinions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from realhf.aws.cli.refusal import refuse

FORBIDDEN_OPTIONS = (
    "endpoint-url", "profile", "no-sign-request", "no-verify-ssl", "ca-bundle", "debug", "color", "version",
    "cli-input-json", "cli-input-yaml", "cli-auto-prompt", "no-cli-auto-prompt", "cli-read-timeout",
    "cli-connect-timeout", "cli-binary-format", "no-cli-pager", "generate-cli-skeleton", "v2-debug",
)  # fmt: skip
"""Options that are refused in every spelling that the CLI would take for them."""
_WITHOUT_EFFECT = frozenset({"--no-cli-pager", "--no-cli-auto-prompt"})
"""Flags of the CLI's second version that ask for what is the case here anyway."""
_BLOB_FORMAT, _RAW = "--cli-binary-format", "raw-in-base64-out"
_VALUED_GLOBALS = ("region", "output", "query")
_FLAG_GLOBALS = ("no-paginate",)
_FLAGS = (
    "--no-paginate", "--dryrun", "--quiet", "--recursive", "--only-show-errors", "--no-progress",
    "--follow-symlinks", "--no-follow-symlinks", "--no-guess-mime-type", "--ignore-glacier-warnings",
    "--force-glacier-transfer", "--no-overwrite", "--validate-same-s3-paths", "--delete", "--size-only",
    "--exact-timestamps",
)  # fmt: skip


@dataclass(frozen=True)
class CommandWords:
    """Holds the parts of a command line. ``names``: up to two words, service and operation; ``arguments``: everything
    after them."""

    names: tuple[str, ...]
    arguments: tuple[str, ...]


def without_second_version(words: Sequence[str]) -> list[str]:
    """Return the words without the options of the CLI's second version that change nothing here, wherever they stand.
    Raises RefusedRequest for a binary format other than the one that is in force."""
    kept: list[str] = []
    pending = iter(words)
    for word in pending:
        name, value = split_option(word)
        if name == _BLOB_FORMAT:
            if (value if value is not None else next(pending, "")) != _RAW:
                refuse("global-option", f"option {_BLOB_FORMAT} is {_RAW} here")
        elif word not in _WITHOUT_EFFECT:
            kept.append(word)
    return kept


def read_words(words: Sequence[str]) -> CommandWords:
    """Find service and operation: the first words that are neither global options nor their values. Raises
    RefusedRequest for any other option before them."""
    names: list[str] = []
    position = 0
    while position < len(words) and len(names) < 2:
        word = words[position]
        position += 1
        if not word.startswith("-"):
            names.append(word)
            continue
        name, value = split_option(word)
        stem = name.removeprefix("--")
        if not name.startswith("--") or not stem:
            refuse("global-option", f"option {word[:60]!r} is not known before the operation")
        if any(option.startswith(stem) for option in _VALUED_GLOBALS):
            position += value is None
        elif value is not None or not any(option.startswith(stem) for option in _FLAG_GLOBALS):
            refuse("global-option", f"option {word[:60]!r} is not known before the operation")
    return CommandWords(tuple(names), tuple(words[position:]))


def split_option(word: str) -> tuple[str, str | None]:
    """Split ``--name=value`` into a pair; the value is None where there is none."""
    name, equals, value = word.partition("=")
    return name, value if equals else None


def with_option(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield every word that is not an option, with the option it directly follows (a value) or ``""``."""
    option = ""
    for word in words:
        if word.startswith("--"):
            name, value = split_option(word)
            is_flag = len(name) > 2 and any(flag.startswith(name) for flag in _FLAGS)
            option = "" if value is not None or is_flag else name
            if value is not None:
                yield name, value
        else:
            yield option, word
            option = ""
