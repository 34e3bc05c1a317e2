"""One session on a real account (``BACKEND_TYPE=aws``), for operators who know the risks.

It starts only if the credentials belong to the account that the operator confirmed. The account is
never emptied, set up or disturbed, and every operation is logged. Agents may send the default reads
of ``real_aws.permissions`` and the operations listed in the operator's file; everything else is
refused.

Source: docs/reference/environment.md 5, Real AWS.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
from botocore import xform_name
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

from realhf.aws.cli.executor import (
    TIMED_OUT,
    CommandResult,
    OutputLimits,
    SimulatorLost,
    parse_reply,
)
from realhf.aws.cli.policy import BASE64, REGION, Verdict, check_command, refusal_text
from realhf.aws.cli.state_client import StateCallError, UnreadableAnswer
from realhf.aws.cli.virtual_folder import VirtualFolder, remove_folder
from realhf.aws.real_aws.permissions import (
    Permissions,
    RealAwsRefused,
    is_default_read,
    operations_sent,
    read_allow_file,
)
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.simulator.slot import PermittedReads, ReferenceSlots
from realhf.base.installation import IMPORT_ROOT
from realhf.env.containment.frames import BadFrame

_LOG = logging.getLogger(__name__)
_FILE_VALUE = re.compile("fileb?://", re.IGNORECASE)
_CHILD_ENVIRONMENT = {
    "PATH": "/nonexistent", "HOME": "/nonexistent", "LANG": "C.UTF-8", "TZ": "UTC", "AWS_PAGER": "",
    "PYTHONPATH": str(IMPORT_ROOT),
}  # fmt: skip
_MAX_PAGES = 50
"""Maximum number of pages of one answer."""
EXHAUSTED = "the account's only session is taken"


def confirm_account(session: botocore.session.Session, expected: str) -> str:
    """Return the id of the account to which the session's credentials belong. Raises RealAwsRefused
    unless it is ``expected``."""
    try:
        client = session.create_client("sts", region_name=REGION)
        account = str(client.get_caller_identity()["Account"])
    except (BotoCoreError, ClientError) as error:
        raise RealAwsRefused(
            f"BACKEND_TYPE=aws: the caller cannot be identified: {error}"
        ) from None
    if account != expected:
        raise RealAwsRefused(
            f"BACKEND_TYPE=aws: the credentials belong to account {account}, but "
            f"AWS_RL_ENV_ALLOW_REAL_AWS confirms {expected}"
        )
    return account


class RealAwsExecutor:
    """Runner of permitted commands on a real account. Each command runs in a child process that
    receives the account's credentials, but none of the server's environment variables.

    ``endpoints``: botocore environment variables that replace AWS's endpoints.
    """

    def __init__(
        self,
        session: botocore.session.Session,
        folder: Path,
        permissions: Permissions,
        limits: OutputLimits,
        endpoints: Mapping[str, str],
    ) -> None:
        self._session = session
        self._folder = folder
        self._permissions = permissions
        self._limits = limits
        self._endpoints = dict(endpoints)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def worker_pid(self) -> int:
        """Pid of the child process that is running a command, or -1 if there is none."""
        process = self._process
        return process.pid if process is not None else -1

    def run(self, command: str) -> CommandResult:
        """Run a command and return its result, like ``CliExecutor.run``."""
        verdict = check_command(command, self._limits.command_bytes)
        if verdict.rule is not None:
            return CommandResult(252, "", verdict.message, refusal=verdict.rule)
        if verdict.answer is not None:
            return CommandResult(0, verdict.answer, "")
        names = f"{verdict.service} {verdict.operation}"
        if not self._permissions.permits(verdict.service, verdict.operation):
            return _refuse(
                "not-permitted",
                f"{names} is neither a default read nor in the file of allowed operations",
            )
        if verdict.own.document_option or verdict.own.blobs == BASE64:
            return _refuse(
                "global-option", f"option {verdict.own.words[0]} is not available on a real account"
            )
        if any(_FILE_VALUE.search(word) for word in verdict.argv):
            return _refuse("local-file", "no parameter is read from a file on a real account")
        _LOG.info("real AWS: %s", names)
        return self._execute(verdict)

    def _execute(self, verdict: Verdict) -> CommandResult:
        try:
            order = json.dumps(self._order(verdict)).encode()
        except (BotoCoreError, ValueError) as error:
            _LOG.error("real AWS: no credentials: %s", error)
            return CommandResult(
                255,
                "",
                "command stopped: the account's credentials are not available",
                stopped=True,
            )
        pipe = subprocess.PIPE
        problem = b""
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-B", "-m", "realhf.aws.real_aws.cli"],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=self._folder,
            env=_CHILD_ENVIRONMENT,
        )
        try:
            out, problem = process.communicate(order, self._limits.timeout_s)
            reply = parse_reply({**json.loads(out), "last": True}, self._limits)
        except subprocess.TimeoutExpired:
            return CommandResult(124, "", TIMED_OUT, timed_out=True)
        except (ValueError, TypeError, BadFrame):
            error_text = problem[-500:].decode("utf-8", "replace")
            _LOG.error("real AWS: the command line ended without an answer: %s", error_text)
            return CommandResult(255, "", "command stopped", stopped=True)
        finally:
            self._process = None
            process.kill()
            process.wait()
        for sent in reply.result.requests:
            _LOG.info("real AWS: sent %s:%s, status %d", sent.service, sent.operation, sent.status)
        return reply.result

    def _order(self, verdict: Verdict) -> dict[str, Any]:
        """Return the child process's input. Raises BotoCoreError, or ValueError if there are no
        credentials."""
        provider = self._session.get_credentials()
        if provider is None:
            raise ValueError("none are configured")
        credentials = provider.get_frozen_credentials()
        return {
            "argv": ["--region", REGION, *verdict.argv],
            "service": "s3" if verdict.service == "s3api" else verdict.service,
            "operations": operations_sent(verdict.service, verdict.operation),
            "credentials": credentials._asdict(),
            "endpoints": self._endpoints,
            "folder": os.path.realpath(self._folder),
            "stdout_cap": self._limits.stdout_bytes,
            "stderr_cap": self._limits.stderr_bytes,
        }


def _refuse(rule: str, message: str) -> CommandResult:
    _LOG.warning("real AWS: refused (%s): %s", rule, message)
    return CommandResult(252, "", refusal_text(rule, message), refusal=rule)


class RealState:
    """API client for grading. It sends the default reads only, never a write and never a read that
    shows a secret, because the sender of a task can choose its checks."""

    def __init__(self, session: botocore.session.Session) -> None:
        self._session = session
        self._clients: dict[str, Any] = {}

    def call(
        self, service: str, operation: str, params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send an API request and return the response, like ``StateClient.call``. The pages of a
        paged response are merged.

        Raises StateCallError for anything but a default read or for an error response,
        UnreadableAnswer if there are too many pages, and ConnectionError.
        """
        if not is_default_read(service, operation):
            raise StateCallError(
                "AccessDenied",
                f"{service}:{operation} is not one of the default reads of a real account",
            )
        if service not in self._clients:
            self._clients[service] = self._session.create_client(service, region_name=REGION)
        try:
            answer = self._call_all_pages(self._clients[service], operation, dict(params or {}))
        except ParamValidationError as error:
            raise StateCallError("ParamValidation", str(error)) from None
        except ClientError as error:
            details = error.response.get("Error", {})
            raise StateCallError(
                str(details.get("Code", "")), str(details.get("Message", ""))
            ) from None
        except BotoCoreError as error:
            raise ConnectionError(f"AWS: {error}") from error
        answer.pop("ResponseMetadata", None)
        return answer

    def _call_all_pages(
        self, client: Any, operation: str, params: dict[str, Any]
    ) -> dict[str, Any]:
        name = xform_name(operation)
        if not client.can_paginate(name):
            return client._make_api_call(operation, params)
        merged: dict[str, Any] = {}
        for number, page in enumerate(client.get_paginator(name).paginate(**params)):
            if number == _MAX_PAGES:
                raise UnreadableAnswer(f"{operation} answers in more than {_MAX_PAGES} pages")
            merged = _merge_pages(merged, page)
        return merged


def _merge_pages(one: Any, other: Any) -> Any:
    """Return two pages of an answer as one. Lists are concatenated; other values are taken from the
    later page."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{name: _merge_pages(one.get(name), item) for name, item in other.items()}}
    return one + other if isinstance(one, list) and isinstance(other, list) else other


@dataclass(eq=False)
class RealAwsSlot:
    """The parts of ``Slot``'s interface that an episode needs, for a real account."""

    account: str
    """Account id."""
    executor: RealAwsExecutor
    """Runs the agent's commands, each in a process of its own."""
    own_executor: RealAwsExecutor
    """Runs the commands of checks. Only default reads are permitted."""
    files: VirtualFolder
    """The session's working folder."""
    state: RealState
    """API client for grading."""
    reads: PermittedReads
    """Reads that the grader may send."""
    reference_slots: ReferenceSlots | None
    """Computes the targets of tasks in a simulator."""
    index = 0
    """Number of the slot; there is only one."""
    simulated = False
    """Whether the account is simulated: never."""

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Pids of the child processes that are running a command."""
        return tuple(
            pid for pid in (self.executor.worker_pid, self.own_executor.worker_pid) if pid > 0
        )

    def reset(self, seed: int = 0) -> None:
        """Delete the session's files. The AWS account is not changed."""
        self.files.clear()


class RealAwsPool:
    """Pool with a single slot, on the confirmed account.

    ``expected_account``: id of the confirmed account. ``allow_file``: path of the file of allowed
    operations, or "". ``simulators``: a pool that is started and stopped together with this one.
    Its reference slots compute the targets of tasks.
    """

    def __init__(
        self,
        expected_account: str,
        allow_file: str,
        limits: OutputLimits,
        simulators: MiniStackPool,
        endpoints: Mapping[str, str] | None = None,
    ) -> None:
        self._expected = expected_account
        self._allow_file = allow_file
        self._limits = limits
        self._simulators = simulators
        self._endpoints = dict(endpoints or {})
        self._lock = threading.Lock()
        self._slot: RealAwsSlot | None = None
        self._leased = False
        self._folder = ""

    def start(self) -> None:
        """Confirm the account, start the simulators and create the slot.

        Raises RealAwsRefused if the credentials belong to another account or the allow file is
        invalid, OSError if the file cannot be read, and the errors of ``MiniStackPool.start``.
        """
        permissions = Permissions(read_allow_file(self._allow_file))
        session = botocore.session.Session()
        account = confirm_account(session, self._expected)
        self._simulators.start()
        self._folder = tempfile.mkdtemp(prefix="realhf-aws-")
        files = VirtualFolder(Path(self._folder) / "files")
        agents, own = (
            RealAwsExecutor(session, files.path, granted, self._limits, self._endpoints)
            for granted in (permissions, Permissions())
        )
        written = frozenset(
            "s3" if service == "s3api" else service for service, _ in permissions.named
        )
        reads = PermittedReads(is_default_read, written)
        reference_slots = self._simulators.slots[0].reference_slots
        self._slot = RealAwsSlot(
            account, agents, own, files, RealState(session), reads, reference_slots
        )

    def acquire(self) -> RealAwsSlot:
        """Lease the slot. Raises SimulatorLost (a RuntimeError) if it is already leased."""
        with self._lock:
            if self._slot is None or self._leased:
                raise SimulatorLost(EXHAUSTED)
            self._leased = True
            return self._slot

    def release(self, slot: RealAwsSlot) -> None:
        """Delete the session's files and free the slot. The account is not changed."""
        slot.files.clear()
        with self._lock:
            self._leased = False

    @property
    def free_count(self) -> int:
        """1 if the slot is free, otherwise 0."""
        return int(self._slot is not None and not self._leased)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics shown at /metrics: the number of slots, of free slots and of leased
        slots."""
        return {"size": 1, "free": self.free_count, "leased": int(self._leased)}

    def containment(self) -> str:
        """Describe what may happen to the account, for the log at start."""
        account = self._slot.account if self._slot else self._expected
        return (
            f"REAL AWS, account {account}: nothing is simulated, emptied, set up or disturbed; "
            f"only reads "
            "that show no secret run, and what the allow file names; every operation is logged"
        )

    def stop(self) -> None:
        """Kill running commands, stop the simulators and delete the session's files. Idempotent."""
        self._simulators.stop()
        slot = self._slot
        self._slot = None
        for pid in slot.worker_pids if slot is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        folder = self._folder
        self._folder = ""
        if folder:
            remove_folder(Path(folder))
