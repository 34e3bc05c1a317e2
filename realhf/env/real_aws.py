"""``BACKEND_TYPE=aws``: one session on a real account, for who knows what they do (environment spec 5, Real AWS).

Starts only when the caller's account is the one that was written down as confirmation. The world is never emptied,
set up or disturbed; every operation is logged; destructive ones are refused unless a file allows them by name.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import botocore.session
from botocore.exceptions import BotoCoreError, ClientError

from realhf.env.executor import TIMED_OUT, CommandResult, OutputLimits, SentRequest, SimulatorLost
from realhf.env.policy import REGION, check_command, refusal_text
from realhf.env.state_client import StateCallError
from realhf.env.tracker import is_read
from realhf.env.vfs import VirtualFolder

_LOG = logging.getLogger(__name__)
_DESTRUCTIVE = ("delete", "terminate", "remove", "stop", "deregister", "revoke", "detach", "disassociate", "purge",
                "release", "disable", "cancel", "reboot", "untag", "batch-delete", "admin-delete", "admin-disable",
                "schedule-key-deletion", "rm", "rb", "mv", "sync")  # fmt: skip
EXHAUSTED = "the account's only session is taken"


class RealAwsRefused(RuntimeError):
    """The account may not be used; the text says why."""


def confirm_account(expected: str) -> str:
    """The account of the present credentials. Raises RealAwsRefused unless it is ``expected``."""
    try:
        client = botocore.session.Session().create_client("sts", region_name=REGION)
        found = str(client.get_caller_identity()["Account"])
    except (BotoCoreError, ClientError) as error:
        raise RealAwsRefused(f"BACKEND_TYPE=aws: the caller cannot be identified: {error}") from None
    if found != expected:
        raise RealAwsRefused(f"BACKEND_TYPE=aws: the credentials belong to account {found}, but "
                             f"AWS_RL_ENV_ALLOW_REAL_AWS confirms {expected}")  # fmt: skip
    return found


def is_destructive(operation: str) -> bool:
    """Whether a CLI operation can take something away."""
    return operation.startswith(_DESTRUCTIVE)


def read_allow_file(path: str) -> frozenset[tuple[str, str]]:
    """``service operation`` lines; ``#`` starts a comment. Raises RealAwsRefused for another line."""
    allowed = set()
    for number, line in enumerate(Path(path).read_text().splitlines() if path else (), start=1):
        words = line.partition("#")[0].split()
        if len(words) not in (0, 2):
            raise RealAwsRefused(f"{path}, line {number}: not 'service operation': {line!r}")
        if words:
            allowed.add((words[0], words[1]))
    return frozenset(allowed)


class RealAwsExecutor:
    """Runs policed commands in a child process with the server's own credentials."""

    def __init__(self, folder: Path, allowed: frozenset[tuple[str, str]], limits: OutputLimits) -> None:
        self._folder = folder
        self._allowed = allowed
        self._limits = limits
        self._process: subprocess.Popen[str] | None = None

    @property
    def worker_pid(self) -> int:
        """The child that runs a command now, -1 when none does."""
        return self._process.pid if self._process is not None else -1

    def run(self, command: str) -> CommandResult:
        """As ``CliExecutor.run``."""
        verdict = check_command(command)
        if verdict.rule is not None:
            return CommandResult(252, "", verdict.message, refusal=verdict.rule)
        if verdict.answer is not None:
            return CommandResult(0, verdict.answer, "")
        names = tuple(word for word in verdict.argv if not word.startswith("-"))[:2]
        if is_destructive(names[1]) and names not in self._allowed:
            _LOG.warning("real AWS: refused %s", " ".join(names))
            message = refusal_text("destructive", f"{' '.join(names)} is not in the file of allowed operations")
            return CommandResult(252, "", message, refusal="destructive")
        _LOG.info("real AWS: %s", " ".join(names))
        return self._execute(verdict.argv)

    def _execute(self, argv: tuple[str, ...]) -> CommandResult:
        command = [sys.executable, "-P", "-m", "realhf.env.real_aws_cli"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=self._folder)
        try:
            out, problem = self._process.communicate(json.dumps({"argv": argv}), self._limits.timeout_s)
            reply = json.loads(out)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return CommandResult(124, "", TIMED_OUT, timed_out=True)
        except ValueError:
            _LOG.error("real AWS: the command line ended without an answer: %s", problem[-500:])
            return CommandResult(255, "", "command stopped")
        finally:
            self._process = None
        requests = tuple(SentRequest(**entry) for entry in reply["requests"])
        for sent in requests:
            _LOG.info("real AWS: sent %s:%s, status %d", sent.service, sent.operation, sent.status)
        return CommandResult(reply["exit_code"], _capped(reply["stdout"], self._limits.stdout_bytes),
                             _capped(reply["stderr"], self._limits.stderr_bytes), requests=requests)  # fmt: skip


def _capped(text: str, most: int) -> str:
    data = text.encode()
    if len(data) <= most:
        return text
    return f"{data[:most].decode('utf-8', 'ignore')}...[truncated {len(data) - most} bytes]"


class RealState:
    """Reads for grading, never a write: the world of a real account is not set up."""

    def __init__(self) -> None:
        self._session = botocore.session.Session()
        self._clients: dict[str, Any] = {}

    def call(self, service: str, operation: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """As ``StateClient.call``. Raises StateCallError for anything that is not a read."""
        if not is_read(f"{service}:{operation}"):
            raise StateCallError("AccessDenied", "a real account is not set up or disturbed")
        if service not in self._clients:
            self._clients[service] = self._session.create_client(service, region_name=REGION)
        try:
            answer = self._clients[service]._make_api_call(operation, dict(params or {}))
        except ClientError as error:
            details = error.response.get("Error", {})
            raise StateCallError(str(details.get("Code", "")), str(details.get("Message", ""))) from None
        except BotoCoreError as error:
            raise ConnectionError(f"AWS: {error}") from error
        answer.pop("ResponseMetadata", None)
        return answer


class RealAwsSlot:
    """What an episode needs of a slot."""

    index = 0

    def __init__(self, account: str, executor: RealAwsExecutor, files: VirtualFolder) -> None:
        self.account = account
        self.executor = self.own_executor = executor
        """Also of checks: every command is a process of its own, so none carries anything over from the agent's."""
        self.files = self.own_files = files
        self.state = RealState()

    @property
    def worker_pid(self) -> int:
        return self.executor.worker_pid

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Of the child that runs a command now."""
        return (self.worker_pid,) if self.worker_pid > 0 else ()

    def reset(self, seed: int = 0) -> None:
        """Only the session's files are emptied; the account stays as it is."""
        self.files.clear()


class RealAwsPool:
    """One slot on the confirmed account. Raises RealAwsRefused from ``start``."""

    def __init__(self, expected_account: str, allow_file: str, limits: OutputLimits) -> None:
        self._expected = expected_account
        self._allow_file = allow_file
        self._limits = limits
        self._lock = threading.Lock()
        self._slot: RealAwsSlot | None = None
        self._leased = False
        self._folder = ""

    def start(self) -> None:
        allowed = read_allow_file(self._allow_file)
        account = confirm_account(self._expected)
        self._folder = tempfile.mkdtemp(prefix="realhf-aws-")
        files = VirtualFolder(Path(self._folder) / "files")
        self._slot = RealAwsSlot(account, RealAwsExecutor(files.path, allowed, self._limits), files)

    def acquire(self) -> RealAwsSlot:
        """Raises RuntimeError when the session is taken."""
        with self._lock:
            if self._slot is None or self._leased:
                raise SimulatorLost(EXHAUSTED)
            self._leased = True
            return self._slot

    def release(self, slot: RealAwsSlot) -> None:
        slot.files.clear()
        with self._lock:
            self._leased = False

    @property
    def free_count(self) -> int:
        return int(self._slot is not None and not self._leased)

    def metrics(self) -> dict[str, Any]:
        return {"size": 1, "free": self.free_count, "leased": int(self._leased)}

    def containment(self) -> str:
        account = self._slot.account if self._slot else self._expected
        return (f"REAL AWS, account {account}: nothing is simulated, emptied or set up; destructive operations are "
                "refused unless the allow file names them; every operation is logged")  # fmt: skip

    def stop(self) -> None:
        """Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None and slot.worker_pid > 0:
            with suppress(ProcessLookupError):
                os.kill(slot.worker_pid, 9)
        shutil.rmtree(self._folder, ignore_errors=True)
