"""What an agent's command line may say: decided on the parsed words, before anything runs (spec section 5).

Rules, as they appear in observations: ``not-aws``, ``malformed``, ``newline``, ``too-long``, ``unknown-service``,
``operation``, ``global-option``, ``region``, ``local-file``, ``url-value``, ``internal-path``, ``stdin``, ``query``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from realhf.env.command_table import ALLOWED
from realhf.env.vfs import is_plain_name

REGION = "us-east-1"
MAX_COMMAND_BYTES = 8192
MAX_QUERY_CHARS = 1000
MAX_QUERY_DEPTH = 20

_FORBIDDEN_OPTIONS = (
    "endpoint-url", "profile", "no-sign-request", "no-verify-ssl", "ca-bundle", "debug", "color", "version",
    "cli-input-json", "cli-input-yaml", "cli-auto-prompt", "no-cli-auto-prompt", "cli-read-timeout",
    "cli-connect-timeout", "cli-binary-format", "no-cli-pager", "generate-cli-skeleton", "v2-debug",
)  # fmt: skip
_ALLOWED_GLOBALS = ("region", "output", "query", "no-paginate")
_OUTPUTS = ("json", "text", "table")
_FILE_OPTIONS = {("s3api", "put-object"): "--body"}
_OUTFILE_OPERATIONS = {("s3api", "get-object"), ("lambda", "invoke")}
_TRANSFERS = {("s3", "cp"), ("s3", "mv")}
_LOCAL_PREFIX = re.compile(r"fileb?://", re.IGNORECASE)
_PLAIN_FILE = re.compile(r"^fileb?://([A-Za-z0-9][A-Za-z0-9_.-]{0,99})$")
_URL = re.compile(r"^\s*https?://", re.IGNORECASE)
_URL_OPTIONS = frozenset({
    "--queue-url", "--notification-endpoint", "--endpoint", "--callback-urls", "--logout-urls", "--uri",
    "--url", "--website-redirect", "--website-redirect-location", "--target",
})  # fmt: skip
_BUCKET_OPTIONS = ("--bucket", "--key", "--prefix", "--copy-source")


@dataclass(frozen=True)
class Verdict:
    """``argv`` (without ``aws``) when allowed; otherwise ``rule`` and a text for the observation."""

    argv: tuple[str, ...] = ()
    rule: str | None = None
    message: str = ""


def refusal_text(rule: str, message: str) -> str:
    """The observation's error text of a refusal."""
    return f"refused ({rule}): {message}"


def _refuse(rule: str, message: str) -> Verdict:
    return Verdict(rule=rule, message=refusal_text(rule, message))


def check_command(command: str) -> Verdict:
    """Decide on a command line as an agent wrote it. Never raises."""
    if len(command.encode("utf-8", "replace")) > MAX_COMMAND_BYTES:
        return _refuse("too-long", f"a command may have {MAX_COMMAND_BYTES} bytes")
    if "\0" in command or "\r" in command or "\n" in command.strip():
        return _refuse("newline", "a command is one line of text")
    if any("\ud800" <= char <= "\udfff" for char in command):
        return _refuse("malformed", "the command is not valid Unicode")
    try:
        words = shlex.split(command, posix=True)
    except ValueError as error:
        return _refuse("malformed", f"the command line cannot be parsed: {error}")
    if not words or words[0] != "aws":
        return _refuse("not-aws", "a command must start with: aws")
    return check_argv(words[1:])


def check_argv(words: Sequence[str]) -> Verdict:
    """Decide on the words after ``aws``."""
    option = _global_option_problem(words)
    if option is not None:
        return option
    positionals = _leading_words(words)
    if len(positionals) < 1 or positionals[0] not in ALLOWED:
        name = positionals[0] if positionals else ""
        return _refuse("unknown-service", f"service {name[:60]!r} is not available here")
    service = positionals[0]
    if len(positionals) < 2 or positionals[1] not in ALLOWED[service]:
        name = positionals[1] if len(positionals) > 1 else ""
        return _refuse("operation", f"{service} {name[:60]!r} is not available here")
    operation = positionals[1]
    problem = _value_problem(words) or _file_problem(service, operation, words)
    return problem or Verdict(argv=tuple(words))


def _split_option(word: str) -> tuple[str, str | None]:
    name, equals, value = word.partition("=")
    return name, value if equals else None


def _leading_words(words: Sequence[str]) -> list[str]:
    """Service and operation: the first two words that are neither global options nor their values."""
    found: list[str] = []
    position = 0
    while position < len(words) and len(found) < 2:
        word = words[position]
        if word.startswith("-"):
            name, value = _split_option(word)
            takes_value = any(option.startswith(name[2:]) for option in ("region", "output", "query"))
            position += 1 if value is not None or not takes_value else 2
        else:
            found.append(word)
            position += 1
    return found


def _global_option_problem(words: Sequence[str]) -> Verdict | None:
    for position, word in enumerate(words):
        if not word.startswith("-") or word == "-":
            continue
        name, value = _split_option(word)
        if not name.startswith("--"):
            continue
        stem = name[2:]
        if any(option.startswith(stem) for option in _FORBIDDEN_OPTIONS) and stem not in _ALLOWED_GLOBALS:
            return _refuse("global-option", f"option {name[:60]} is not available here")
        following = value if value is not None else (words[position + 1] if position + 1 < len(words) else "")
        if "region".startswith(stem) and following != REGION:
            return _refuse("region", f"only {REGION} is available here")
        if "output".startswith(stem) and following not in _OUTPUTS:
            return _refuse("global-option", f"--output is one of {', '.join(_OUTPUTS)}")
        if "query".startswith(stem) and _query_too_complex(following):
            return _refuse("query", f"--query may have {MAX_QUERY_CHARS} characters and {MAX_QUERY_DEPTH} levels")
    return None


def _query_too_complex(query: str) -> bool:
    depth = deepest = 0
    for char in query:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return len(query) > MAX_QUERY_CHARS or deepest > MAX_QUERY_DEPTH


def _value_problem(words: Sequence[str]) -> Verdict | None:
    """Local files and URLs in any value, whatever its form."""
    previous = ""
    for word in words:
        name, inline = _split_option(word) if word.startswith("--") else (previous, None)
        value = inline if inline is not None else word
        if _LOCAL_PREFIX.search(value):
            match = _PLAIN_FILE.match(value)
            if match is None or not is_plain_name(match.group(1)):
                return _refuse("local-file", "only plain names inside the working folder can be read")
        if _URL.match(value) and name not in _URL_OPTIONS:
            return _refuse("url-value", "a URL is not fetched and not accepted here")
        if name in _BUCKET_OPTIONS and value.replace("%5f", "_").replace("%5F", "_").lstrip("/").startswith("_"):
            return _refuse("internal-path", "this name is not part of AWS")
        if value.startswith("s3://_") or value.startswith("s3:///"):
            return _refuse("internal-path", "this name is not part of AWS")
        previous = word if word.startswith("--") and inline is None else previous
    return None


def _file_problem(service: str, operation: str, words: Sequence[str]) -> Verdict | None:
    """Arguments that name a local file without a prefix."""
    key = (service, operation)
    if key in _FILE_OPTIONS:
        for value in _option_values(words, _FILE_OPTIONS[key]):
            if not is_plain_name(value):
                return _refuse("local-file", "only plain names inside the working folder can be read")
    if key in _TRANSFERS or key in _OUTFILE_OPERATIONS:
        start = list(words).index(operation) + 1
        return _path_problem(key in _TRANSFERS, words[start:])
    return None


def _path_problem(transfer: bool, words: Sequence[str]) -> Verdict | None:
    """Every word that could be taken for a path must be an S3 address or a plain name."""
    paths: list[str] = []
    previous_option = False
    for word in words:
        if word.startswith("--"):
            previous_option = "=" not in word
            continue
        if transfer and word == "-":
            return _refuse("stdin", "standard input and output are not available here")
        if transfer or not previous_option:
            paths.append(word)
        elif "/" in word and (word.startswith(("/", "~", ".")) or ".." in word):
            return _refuse("local-file", "only plain names inside the working folder can be used")
        previous_option = False
    for path in paths:
        if not (transfer and path.startswith("s3://")) and not is_plain_name(path) and not (transfer and "/" in path and not path.startswith(("/", "~", ".")) and ".." not in path):
            return _refuse("local-file", "only plain names inside the working folder can be used")
    return None


def _option_values(words: Sequence[str], option: str) -> list[str]:
    """Values given to ``option`` in any spelling, abbreviations included."""
    values = []
    for position, word in enumerate(words):
        name, inline = _split_option(word)
        if len(name) > 2 and option.startswith(name):
            values.append(inline if inline is not None else "".join(words[position + 1 : position + 2]))
    return values
