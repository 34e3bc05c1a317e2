"""What an agent's command line may say: decided on the parsed words, before anything runs (spec section 5).

Rules, as they appear in observations: ``not-aws``, ``malformed``, ``newline``, ``too-long``, ``unknown-service``,
``operation``, ``global-option``, ``region``, ``local-file``, ``url-value``, ``internal-path``, ``stdin``, ``query``.
The worker enforces the same rules a second time on what the CLI made of the words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

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
_VALUED_GLOBALS = ("region", "output", "query")
_OUTPUTS = ("json", "text", "table")
_FILE_OPTIONS = {("s3api", "put-object"): "--body"}
_OUTFILE_OPERATIONS = frozenset({("s3api", "get-object"), ("lambda", "invoke")})
_TRANSFERS = frozenset({("s3", "cp"), ("s3", "mv"), ("s3", "sync")})
_WHOLE_FOLDER = "."
_FLAGS = (
    "--no-paginate", "--dryrun", "--quiet", "--recursive", "--only-show-errors", "--no-progress",
    "--follow-symlinks", "--no-follow-symlinks", "--no-guess-mime-type", "--ignore-glacier-warnings",
    "--force-glacier-transfer", "--no-overwrite", "--validate-same-s3-paths", "--delete", "--size-only",
    "--exact-timestamps",
)  # fmt: skip
_LOCAL_PREFIX = re.compile(r"fileb?://", re.IGNORECASE)
_PLAIN_FILE = re.compile(r"fileb?://(.+)", re.DOTALL)
_URL = re.compile(r"\s*https?://", re.IGNORECASE)
_URL_OPTIONS = frozenset({
    "--queue-url", "--notification-endpoint", "--callback-urls", "--logout-urls", "--uri", "--url",
    "--website-redirect", "--website-redirect-location", "--target",
})  # fmt: skip
_PATH_OPTIONS = ("--bucket", "--key", "--copy-source")
_PLAIN_NAMES_ONLY = "only plain names inside the working folder can be used"


@dataclass(frozen=True)
class Verdict:
    """``argv`` (without ``aws``) when allowed; ``answer`` when the text is known without running anything;
    otherwise ``rule`` and a text for the observation."""

    argv: tuple[str, ...] = ()
    answer: str | None = None
    rule: str | None = None
    message: str = ""


def refusal_text(rule: str, message: str) -> str:
    """The observation's error text of a refusal."""
    return f"refused ({rule}): {message}"


def _refuse(rule: str, message: str) -> Verdict:
    return Verdict(rule=rule, message=refusal_text(rule, message))


def check_command(command: str) -> Verdict:
    """Decide on a command line as an agent wrote it. Never raises."""
    if any("\ud800" <= char <= "\udfff" for char in command):
        return _refuse("malformed", "the command is not valid Unicode")
    if len(command.encode()) > MAX_COMMAND_BYTES:
        return _refuse("too-long", f"a command may have {MAX_COMMAND_BYTES} bytes")
    command = command.strip()
    if "\0" in command or _has_bare_newline(command):
        return _refuse("newline", "a command is one line of text")
    try:
        words = shlex.split(command, posix=True)
    except ValueError as error:
        return _refuse("malformed", f"the command line cannot be parsed: {error}")
    if not words or words[0] != "aws":
        return _refuse("not-aws", "a command must start with: aws")
    return check_argv(words[1:])


def _has_bare_newline(command: str) -> bool:
    quote, escaped = "", False
    for char in command:
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        if char in "\r\n" and not quote:
            return True
    return False


def check_argv(words: Sequence[str]) -> Verdict:
    """Decide on the words after ``aws``."""
    option = _global_option_problem(words)
    if option is not None:
        return option
    places = _command_places(words)
    names = [words[place] for place in places]
    if names[:1] == ["help"]:
        return Verdict(answer=_listing("services", ALLOWED))
    if not names or names[0] not in ALLOWED:
        return _refuse("unknown-service", f"service {' '.join(names[:1])[:60]!r} is not available here")
    if names[1:] == ["help"]:
        return Verdict(answer=_listing(f"operations of {names[0]}", ALLOWED[names[0]]))
    if len(names) < 2 or names[1] not in ALLOWED[names[0]]:
        return _refuse("operation", f"{names[0]} {' '.join(names[1:])[:60]!r} is not available here")
    service, operation = names
    arguments = words[places[1] + 1 :]
    if any(word == "help" and not option.startswith("--") for option, word in _with_option(arguments)):
        return _refuse("operation", "only the operations of a service can be listed: aws SERVICE help")
    problem = _value_problem(words) or _file_problem(service, operation, arguments)
    return problem or Verdict(argv=tuple(words))


def _listing(title: str, names: Iterable[str]) -> str:
    return f"Available {title}:\n" + "\n".join(sorted(names)) + "\n"


def _split_option(word: str) -> tuple[str, str | None]:
    name, equals, value = word.partition("=")
    return name, value if equals else None


def _with_option(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every word that is not an option, with the option it directly follows (a value) or ``""``."""
    option = ""
    for word in words:
        if word.startswith("--"):
            name, value = _split_option(word)
            is_flag = len(name) > 2 and any(flag.startswith(name) for flag in _FLAGS)
            option = "" if value is not None or is_flag else name
            if value is not None:
                yield name, value
        else:
            yield option, word
            option = ""


def _command_places(words: Sequence[str]) -> list[int]:
    """Where service and operation stand: the first words that are neither global options nor their values."""
    found: list[int] = []
    position = 0
    while position < len(words) and len(found) < 2:
        word = words[position]
        if word.startswith("-"):
            name, value = _split_option(word)
            takes_value = any(option.startswith(name[2:]) for option in _VALUED_GLOBALS)
            position += 1 if value is not None or not takes_value else 2
        else:
            found.append(position)
            position += 1
    return found


def _global_option_problem(words: Sequence[str]) -> Verdict | None:
    for position, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, value = _split_option(word)
        stem = name[2:]
        if any(option.startswith(stem) for option in _FORBIDDEN_OPTIONS):
            return _refuse("global-option", f"option {name[:60]} is not available here")
        following = value if value is not None else "".join(words[position + 1 : position + 2])
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
    """Local files, URLs and internal paths in any value, whatever its form."""
    option = ""
    for word in words:
        value = word
        if word.startswith("--"):
            option, inline = _split_option(word)
            value = inline or ""
        if _LOCAL_PREFIX.search(value):
            plain = _PLAIN_FILE.fullmatch(value)
            if plain is None or not is_plain_name(plain.group(1)):
                return _refuse("local-file", _PLAIN_NAMES_ONLY)
        if _URL.match(value) and option not in _URL_OPTIONS:
            return _refuse("url-value", "a URL is not fetched and not accepted here")
        if _is_internal(option, value):
            return _refuse("internal-path", "this name is not part of AWS")
    return None


def _is_internal(option: str, value: str) -> bool:
    address = value.startswith("s3://")
    if not address and not (len(option) > 2 and any(name.startswith(option) for name in _PATH_OPTIONS)):
        return False
    path = value.removeprefix("s3://")
    for _ in range(3):
        path = unquote(path)
    return path.replace("\\", "/").lstrip("/").startswith("_") or "../" in path or (address and path.startswith("/"))


def _file_problem(service: str, operation: str, arguments: Sequence[str]) -> Verdict | None:
    """Arguments that name a local file without a prefix."""
    key = (service, operation)
    for option, word in _with_option(arguments):
        if key in _FILE_OPTIONS and len(option) > 2 and _FILE_OPTIONS[key].startswith(option):
            if not is_plain_name(word):
                return _refuse("local-file", _PLAIN_NAMES_ONLY)
        elif option:
            continue
        elif key in _TRANSFERS:
            if word == "-":
                return _refuse("stdin", "standard input and output are not available here")
            whole_folder = operation == "sync" and word == _WHOLE_FOLDER
            if not word.startswith("s3://") and not is_plain_name(word) and not whole_folder:
                return _refuse("local-file", _PLAIN_NAMES_ONLY)
        elif key in _OUTFILE_OPERATIONS and not is_plain_name(word):
            return _refuse("local-file", _PLAIN_NAMES_ONLY)
    return None
