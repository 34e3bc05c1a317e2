"""Command policy: decides before anything runs whether an agent's command line is allowed. It
inspects the words as the CLI parses them.

All code that needs to know the meaning of a command uses ``policy.Verdict``. Words that the CLI
would read differently are refused, so that there is only one interpretation.

Rules, as they appear in observations: ``not-aws``, ``malformed``, ``newline``, ``too-long``,
``unknown-service``, ``operation``, ``global-option``, ``region``, ``local-file``, ``url-value``,
``internal-path``, ``stdin``, ``query``, ``too-many``. The worker checks the parsed request against
the same rules again; ``too-many`` is checked only there.

Source: docs/reference/environment.md 5.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import unquote

from botocore import xform_name

from realhf.aws.cli.command_table import ALLOWED, WAITERS
from realhf.aws.cli.virtual_folder import is_name_in_folder
from realhf.base.text import quote_states


class RefusedRequest(Exception):
    """A request that an agent may not make. ``rule``: name of the policy rule, as shown in the
    observation."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule
        self.message = message


Refuse = Callable[[str, str], NoReturn]
"""Function of (rule, message) that records a refusal and raises RefusedRequest."""


def refuse(rule: str, message: str) -> NoReturn:
    """Raise RefusedRequest, without recording the refusal."""
    raise RefusedRequest(rule, message)


FORBIDDEN_OPTIONS = (
    "endpoint-url", "profile", "no-sign-request", "no-verify-ssl", "ca-bundle", "debug", "color", "version",
    "cli-input-json", "cli-input-yaml", "cli-auto-prompt", "no-cli-auto-prompt", "cli-read-timeout",
    "cli-connect-timeout", "cli-binary-format", "no-cli-pager", "generate-cli-skeleton", "v2-debug",
)  # fmt: skip
"""Options that are refused, also when abbreviated in a way that the CLI accepts."""
_WITHOUT_EFFECT = frozenset({"--no-cli-pager", "--no-cli-auto-prompt"})
"""Flags of AWS CLI version 2 that have no effect here, because the CLI already behaves as they
demand."""
DOCUMENTS = ("--cli-input-json", "--cli-input-yaml")
_BLOB_FORMAT = "--cli-binary-format"
RAW = "raw-in-base64-out"
BASE64 = "base64"
_VALUED_GLOBALS = ("region", "output", "query")
_FLAG_GLOBALS = ("no-paginate",)
_FLAGS = (
    "--no-paginate", "--dryrun", "--quiet", "--recursive", "--only-show-errors", "--no-progress",
    "--follow-symlinks", "--no-follow-symlinks", "--no-guess-mime-type", "--ignore-glacier-warnings",
    "--force-glacier-transfer", "--no-overwrite", "--validate-same-s3-paths", "--delete", "--size-only",
    "--exact-timestamps",
)  # fmt: skip


@dataclass(frozen=True)
class OwnOptions:
    """Options that the worker implements itself, because this version of the CLI does not know them
    or does not handle them safely."""

    document_option: str = ""
    """``--cli-input-json`` or ``--cli-input-yaml``; "" if neither is given."""
    document: str = ""
    """Value of ``document_option``: the document itself, or ``file://`` and a file name in the
    working folder."""
    blobs: str = ""
    """Value of ``--cli-binary-format``; "" if it is not given."""

    @property
    def words(self) -> tuple[str, ...]:
        """The options as command-line words that ``read_own_options`` can parse."""
        document = (self.document_option, self.document) if self.document_option else ()
        return (*document, *((_BLOB_FORMAT, self.blobs) if self.blobs else ()))


def read_own_options(words: Sequence[str]) -> tuple[list[str], OwnOptions]:
    """Split a command's words into (words for the CLI, OwnOptions).

    The worker's own options may be anywhere but not abbreviated. Flags of CLI version 2 that have
    no effect are dropped. Raises RefusedRequest for an option that is given twice, has no value, or
    names an unknown binary format.
    """
    cli_words: list[str] = []
    values: dict[str, str] = {}
    remaining = iter(words)
    for word in remaining:
        name, value = split_option(word)
        if name in DOCUMENTS or name == _BLOB_FORMAT:
            key = "document" if name in DOCUMENTS else name
            value = value if value is not None else next(remaining, None)
            if key in values or value is None:
                refuse(
                    "malformed",
                    f"option {name} is given once, with a value, and one document at most",
                )
            values |= {key: value, "option": name} if key == "document" else {key: value}
        elif word not in _WITHOUT_EFFECT:
            cli_words.append(word)
    blobs = values.get(_BLOB_FORMAT, "")
    if _BLOB_FORMAT in values and blobs not in (RAW, BASE64):
        refuse("global-option", f"option {_BLOB_FORMAT} is {RAW} or {BASE64}")
    return cli_words, OwnOptions(values.get("option", ""), values.get("document", ""), blobs)


def read_words(words: Sequence[str]) -> tuple[list[str], Sequence[str]]:
    """Return ([service, operation], remaining words).

    Service and operation are the first words that are neither global options nor values of global
    options; the list is shorter if they are missing. Raises RefusedRequest if an option other than
    the global ones precedes them.
    """
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
    return names, words[position:]


def split_option(word: str) -> tuple[str, str | None]:
    """Split ``--name=value`` into (name, value). Without "=" the value is None."""
    name, equals, value = word.partition("=")
    return name, value if equals else None


def with_option(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (option, value) for every word that is not an option, and for every ``--option=value``.
    The option is "" for a word that does not directly follow an option with a value."""
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


REGION = "us-east-1"
MAX_COMMAND_BYTES = 8192
"""Default of the server's limit for the length of a command line, in bytes."""
MAX_QUERY_CHARS = 1000
MAX_QUERY_DEPTH = 20
_OUTPUTS = ("json", "text", "table")
_FILE_OPTIONS = {("s3api", "put-object"): "--body", ("s3api", "upload-part"): "--body"}
_OUTFILE_OPERATIONS = frozenset({("s3api", "get-object"), ("lambda", "invoke")})
_TRANSFERS = frozenset({("s3", "cp"), ("s3", "mv"), ("s3", "sync")})
_WHOLE_FOLDER = (".", "./")
_LOCAL_PREFIX = re.compile(r"fileb?://", re.IGNORECASE)
_PLAIN_FILE = re.compile(r"fileb?://(.+)", re.DOTALL)
_URL = re.compile(r"\s*https?://", re.IGNORECASE)
_FETCHED_OPTIONS = ("--template-url", "--stack-policy-url", "--stack-policy-during-update-url")
"""Options whose value can be a URL from which the service fetches a document. URLs in other options
are plain text and are never followed."""
_BUCKET_OPTIONS = ("--bucket", "--copy-source")
_KEY_OPTION = "--key"
_WORDS = re.compile(r"""((?:[^ \t\r\n'"\\]|(['"])(?:(?<=')[^']*'|(?<=")[^"\\]*"))+)|[ \t\r\n]+""")
"""A word without escapes, whose second group is set if a part of it is quoted, or blanks."""
_QUOTED = re.compile(r"""'[^']*'|"[^"\\]*\"""")
_PLAIN_NAMES_ONLY = "only plain names inside the working folder can be used"


@dataclass(frozen=True)
class Verdict:
    """Decision of the policy on a command line."""

    argv: tuple[str, ...] = ()
    """Words of an allowed command, without ``aws`` and without the options in ``own``."""
    own: OwnOptions = OwnOptions()
    """Options that the worker implements itself."""
    service: str = ""
    """Service in the CLI's spelling."""
    operation: str = ""
    """Operation in the CLI's spelling; for a waiter, the operation that it repeats."""
    waits: bool = False
    """Whether the command is a waiter."""
    answer: str | None = None
    """Output of a command that is answered without being run, such as help; otherwise None."""
    rule: str | None = None
    """Rule that refused the command; None if it is allowed."""
    message: str = ""
    """Error text if the command is refused."""


def refusal_text(rule: str, message: str) -> str:
    """Return the error text that the observation shows for a refusal."""
    return f"refused ({rule}): {message}"


def check_command(command: str, max_bytes: int = MAX_COMMAND_BYTES) -> Verdict:
    """Return the decision on a command line as an agent wrote it. Never raises."""
    try:
        return _decide(_split_words(command, max_bytes))
    except RefusedRequest as refused:
        return Verdict(rule=refused.rule, message=refusal_text(refused.rule, refused.message))


@functools.lru_cache(maxsize=1024)
def operation_allowed(service: str, operation: str) -> bool:
    """Return whether a task's set-up may send this request (names as in botocore). Tasks are
    limited to the same operations as agents."""
    return xform_name(operation, "-") in ALLOWED.get("s3api" if service == "s3" else service, ())


def _split_words(command: str, max_bytes: int) -> list[str]:
    """Split a command line into words and return those after ``aws``. Raises RefusedRequest."""
    try:
        n_bytes = len(command.encode())
    except UnicodeEncodeError:
        refuse("malformed", "the command is not valid Unicode")
    if n_bytes > max_bytes:
        refuse("too-long", f"a command may have {max_bytes} bytes")
    command = command.strip()
    if "\0" in command:
        refuse("newline", "a command must not contain NUL")
    if _has_bare_newline(command):
        refuse(
            "newline",
            "one command at a time: a line continues in the next one after a backslash or in quotes",
        )
    try:
        words = split_quickly(command) or shlex.split(command, posix=True)
    except ValueError as error:
        refuse("malformed", f"the command line cannot be parsed: {error}")
    if not words or words[0] != "aws":
        refuse("not-aws", "a command must start with: aws")
    return words[1:]


def split_quickly(command: str) -> list[str]:
    """Return the words of a command line as ``shlex.split`` does, or [] if it must do that itself:
    there are none, a quote is open, or a backslash escapes something."""
    words = []
    position = 0
    for match in _WORDS.finditer(command):
        if match.start() != position:
            return []
        position = match.end()
        word = match[1]
        if word is not None:
            words.append(_QUOTED.sub(lambda quoted: quoted[0][1:-1], word) if match[2] else word)
    return words if position == len(command) else []


def _has_bare_newline(command: str) -> bool:
    # check for a line end first: few commands have one, and scanning the quotes is slow
    lines = "\n" in command or "\r" in command
    return lines and any(char in "\r\n" and not quote for char, quote, _ in quote_states(command))


def _decide(words: Sequence[str]) -> Verdict:
    """Return the decision on the words after ``aws``. Raises RefusedRequest."""
    words, own = read_own_options(words)
    _check_global_options(words)
    names, arguments = read_words(words)
    service, operation = (*names, "", "")[:2]
    if service == "help":
        return Verdict(answer=_listing("services", ALLOWED))
    if service not in ALLOWED:
        refuse("unknown-service", f"service {service[:60]!r} is not available here")
    if operation == "help":
        waiters = (f"wait {name}" for name in WAITERS.get(service, ()))
        return Verdict(answer=_listing(f"operations of {service}", [*ALLOWED[service], *waiters]))
    waits = operation == "wait"
    if waits:
        name, *arguments = arguments or [""]
        operation = WAITERS.get(service, {}).get(name, "")
        if not operation:
            refuse("operation", f"{service} wait {name[:60]!r} is not available here")
    elif operation not in ALLOWED[service]:
        refuse("operation", f"{service} {operation[:60]!r} is not available here")
    if any(
        word == "help" and not option.startswith("--") for option, word in with_option(arguments)
    ):
        refuse("operation", "only the operations of a service can be listed: aws SERVICE help")
    if own.document_option and (
        service == "s3" or waits or (service, operation) in _OUTFILE_OPERATIONS
    ):
        refuse(
            "global-option",
            f"option {own.document_option} is not available for {service} {operation}",
        )
    _check_values(service, [*own.words, *words])
    _check_files(service, operation, arguments)
    return Verdict(argv=tuple(words), own=own, service=service, operation=operation, waits=waits)


def _listing(title: str, names: Iterable[str]) -> str:
    return f"Available {title}:\n" + "\n".join(sorted(names)) + "\n"


def _check_global_options(words: Sequence[str]) -> None:
    for position, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, value = split_option(word)
        stem = name[2:]
        if any(option.startswith(stem) for option in FORBIDDEN_OPTIONS):
            refuse("global-option", f"option {name[:60]} is not available here")
        following = value if value is not None else "".join(words[position + 1 : position + 2])
        if "region".startswith(stem) and following != REGION:
            refuse("region", f"only {REGION} is available here")
        if "output".startswith(stem) and following not in _OUTPUTS:
            refuse("global-option", f"--output is one of {', '.join(_OUTPUTS)}")
        if "query".startswith(stem) and _query_too_complex(following):
            refuse(
                "query",
                f"--query may have {MAX_QUERY_CHARS} characters and {MAX_QUERY_DEPTH} levels",
            )


def _query_too_complex(query: str) -> bool:
    depth = deepest = 0
    for char in query:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return len(query) > MAX_QUERY_CHARS or deepest > MAX_QUERY_DEPTH


def _check_values(service: str, words: Sequence[str]) -> None:
    """Refuse local files, documents to fetch and internal paths in any value, however it is
    written. Raises RefusedRequest."""
    option = ""
    for word in words:
        value = word
        if word.startswith("--"):
            option, inline = split_option(word)
            value = inline or ""
        if _LOCAL_PREFIX.search(value):
            plain = _PLAIN_FILE.fullmatch(value)
            if plain is None or not is_name_in_folder(plain.group(1)):
                refuse("local-file", _PLAIN_NAMES_ONLY)
        if _URL.match(value) and _matches_option(option, *_FETCHED_OPTIONS):
            refuse("url-value", "no document is fetched from a URL here")
        if service in ("s3", "s3api") and _is_internal(option, value):
            refuse("internal-path", "this name is not part of AWS")


def _matches_option(option: str, *names: str) -> bool:
    """Return whether the CLI could read ``option``, which may be abbreviated, as one of
    ``names``."""
    return len(option) > 2 and any(name.startswith(option) for name in names)


def _is_internal(option: str, value: str) -> bool:
    """Return whether the value of an option leads to an internal path of the simulator.

    The name of a bucket is the first part of a request path, so it must not be one. An object key
    may be any string without "../".
    """
    address = value.startswith("s3://")
    bucket = address or _matches_option(option, *_BUCKET_OPTIONS)
    key = _matches_option(option, _KEY_OPTION)
    if not bucket and not key:
        return False
    path = value.removeprefix("s3://")
    for _ in range(3):
        path = unquote(path)
    path = path.replace("\\", "/")
    return (
        "../" in path
        or (bucket and path.lstrip("/").startswith("_"))
        or (address and path.startswith("/"))
    )


def _check_files(service: str, operation: str, arguments: Sequence[str]) -> None:
    """Refuse arguments that name a file outside the working folder without a prefix such as
    ``file://``. Raises RefusedRequest."""
    key = (service, operation)
    for option, word in with_option(arguments):
        if key in _FILE_OPTIONS and _matches_option(option, _FILE_OPTIONS[key]):
            if not is_name_in_folder(word):
                refuse("local-file", _PLAIN_NAMES_ONLY)
        elif option:
            continue
        elif key in _TRANSFERS:
            if word == "-":
                refuse("stdin", "standard input and output are not available here")
            if not (
                word.startswith("s3://")
                or word in _WHOLE_FOLDER
                or is_name_in_folder(word.removesuffix("/"))
            ):
                refuse("local-file", _PLAIN_NAMES_ONLY)
        elif key in _OUTFILE_OPERATIONS and not is_name_in_folder(word):
            refuse("local-file", _PLAIN_NAMES_ONLY)
