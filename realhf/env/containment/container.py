"""Containers without a daemon: commands on a root of their own, as its user 0, in namespaces that
any user may make.

The root is the host's userland, or the folder of an unpacked image; both stay as they are, because
changes lie in memory, in a tmpfs of bounded size. Commands run in stages, see
``container_process``. A container that cannot be made as described is an error: nothing runs with
less containment. Linux 5.14 or later, with unprivileged user namespaces and overlayfs in them;
root is not needed, and not used.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from realhf.base.installation import PACKAGE
from realhf.base.process import share_niceness
from realhf.env.containment.container_stage import Order
from realhf.env.containment.frames import BadFrame, encode_frame, receive_frame

_PROGRAM = """
import sys
sys.path.append(sys.argv[1])
from realhf.env.containment.container_process import main
main(sys.argv[2:])
"""
"""Program of the process. The folder of this package comes after the standard library."""
_START_S = 30.0
"""Timeout in seconds of building the root, and of beginning or ending a stage."""
GRACE_S = 10.0
"""Seconds beyond the time limit of a command until its answer must be there."""
_STOP_S = 5.0
"""Seconds to wait for the process to exit."""
_MAX_MESSAGE = 64 * 1024
"""Maximum bytes of an answer of the process."""
_PIECE_BYTES = 4 << 20
"""Maximum bytes of a file that are sent at once."""


class ContainerError(RuntimeError):
    """Raised if a container, a stage or a request to it fails for another reason than the
    command."""


class StageEnded(ContainerError):
    """Raised if a stage has ended, or gives no answer in time, while the container still works.

    Commands may have done that; a new stage can begin on their files.
    """


class UnreadableFile(ContainerError):
    """Raised for something that is no regular file, or too large, in place of a file to read."""


@dataclass(frozen=True)
class CommandResult:
    """The end of a command."""

    code: int | None
    """Exit code, negative for a signal; None if the command was ended, see ``ended``."""
    output: str
    """What it wrote to stdout and stderr; of a long output, the first and the last part."""
    omitted: int = 0
    """Number of bytes between the two parts."""
    ended: str = ""
    """Why the command was ended: it took too long, or it wrote too much; "" if it was not."""


class Container:
    """A container in which one stage at a time runs.

    Not thread-safe, except for ``interrupt``.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._channel: socket.socket | None = None
        self._is_interrupted = False

    def start(self) -> None:
        """Build the root. Raises ContainerError with the reason if it cannot be built here."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        command = [sys.executable, "-I", "-S", "-B", "-c", _PROGRAM]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(PACKAGE.parent), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        share_niceness(self._process.pid)
        self._ask(asdict(self._order))

    def begin(self, *, verifying: bool = False) -> None:
        """Begin a stage: a PID namespace in which ``run`` starts commands. Raises ContainerError.

        verifying: it has an empty /tests and /logs/verifier of its own, which hide those of the
        stages before.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._channel = ours
            self._ask({"begin": verifying}, theirs.fileno())
        answer = self._receive(_START_S)
        if "error" in answer:
            raise ContainerError(f"a stage could not begin: {answer['error']}")

    def end(self) -> None:
        """End the stage and wait until none of its processes exists. Raises ContainerError."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            self._ask({"end": None})

    def run(
        self,
        command: str | Sequence[str],
        *,
        folder: str,
        variables: Mapping[str, str],
        timeout_s: float,
        output_bytes: int,
    ) -> CommandResult:
        """Run a command of the shell, or a program with its arguments, and return its end.

        A process that it leaves running stays until the end of the stage; after ``timeout_s``
        seconds, or 16 MiB of output, the command and the processes of its group are ended. Raises
        ContainerError, and StageEnded if no command can be run any more.
        """
        answer = self._request(
            timeout_s + GRACE_S,
            act="run",
            words=["sh", "-c", command] if isinstance(command, str) else [*command],
            folder=folder,
            variables=dict(variables),
            timeout_s=timeout_s,
            output_bytes=output_bytes,
        )
        return CommandResult(**answer)

    def clear(self) -> None:
        """End all processes of the stage, which goes on. Raises ContainerError."""
        self._request(_START_S, act="clear")

    def copy_in(self, source: Path, target: str) -> None:
        """Copy a file or folder of the host to a path in the container; links are copied as links.

        Raises ContainerError, and OSError if it cannot be read.
        """
        for path, place in _walk(source, PurePosixPath(target)):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                self._put(str(place), os.readlink(path), mode)
            elif stat.S_ISDIR(mode):
                self._put(str(place), "", mode)
            elif stat.S_ISREG(mode):
                self._put_file(path, str(place), mode)
            else:
                raise ContainerError(f"{path} is neither a file, a folder nor a link: remove it")

    def read(self, path: str) -> bytes | None:
        """Return the content of a file in the container; None if there is no such file.

        Raises ContainerError, and UnreadableFile for a link, a device and a file of more than
        1 MiB.
        """
        answer = self._send(_START_S, act="read", path=path)
        if "error" not in answer:
            return base64.b64decode(answer["data"])
        if answer["error"] == os.strerror(2):
            return None
        raise UnreadableFile(f"{path} cannot be read: {answer['error']}")

    def make_folder(self, path: str) -> None:
        """Make a folder in the container, with those above it. Raises ContainerError."""
        self._put(path, "", stat.S_IFDIR | 0o755)

    def interrupt(self) -> None:
        """Let a call that waits in another thread, and all later ones, raise ContainerError; the
        processes of the container end soon."""
        self._is_interrupted = True
        for channel in (self._channel, self._control):
            if channel is not None:
                with contextlib.suppress(OSError):
                    channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all processes of the container; its files are gone with them. Idempotent."""
        self.interrupt()
        for channel in (self._channel, self._control):
            if channel is not None:
                channel.close()
        self._channel = self._control = None
        if self._process is not None:
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_STOP_S)
            self._process = None

    def _put_file(self, path: Path, place: str, mode: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            data = file.read(_PIECE_BYTES)
            append = False
            while True:
                self._put(place, base64.b64encode(data).decode(), mode, append=append)
                append = True
                data = file.read(_PIECE_BYTES)
                if not data:
                    return

    def _put(self, path: str, data: str, mode: int, *, append: bool = False) -> None:
        self._request(_START_S, act="put", path=path, data=data, mode=mode, append=append)

    def _request(self, wait_s: float, **request: Any) -> dict[str, Any]:
        answer = self._send(wait_s, **request)
        if "error" in answer:
            raise ContainerError(f"{request['act']} {request.get('path', '')}: {answer['error']}")
        return answer

    def _send(self, wait_s: float, **request: Any) -> dict[str, Any]:
        if self._channel is None:
            raise ContainerError("no stage runs in the container")
        try:
            self._channel.settimeout(wait_s)
            self._channel.sendall(encode_frame(request))
        except TimeoutError:
            raise self._find_failure(f"took no request within {wait_s:g} s") from None
        except OSError as error:
            raise self._find_failure(f"ended: {error.strerror}") from None
        return self._receive(wait_s)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer of the stage. Raises ContainerError."""
        channel = self._channel
        if channel is None:
            raise ContainerError("no stage runs in the container")
        try:
            answer = receive_frame(channel, timeout_s)
        except TimeoutError:
            raise self._find_failure(f"gave no answer within {timeout_s:g} s") from None
        except (BadFrame, OSError) as error:
            raise self._find_failure(f"ended: {error}") from None
        if not isinstance(answer, dict):
            raise self._find_failure("gave an answer that is no map")
        return answer

    def _find_failure(self, text: str) -> ContainerError:
        """Return the error of a stage that failed: StageEnded only if nobody interrupted it and the
        process of the container lives."""
        is_alive = self._process is not None and self._process.poll() is None
        if self._is_interrupted or not is_alive:
            return ContainerError(f"the container {text}")
        return StageEnded(f"its first process {text}")

    def _ask(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        """Send a message to the process and wait for its answer. Raises ContainerError."""
        control = self._control
        if control is None:
            raise ContainerError("the container is closed")
        try:
            data = json.dumps(message).encode()
            socket.send_fds(control, [data], [] if descriptor is None else [descriptor])
            control.settimeout(_START_S)
            reply = control.recv(_MAX_MESSAGE)
        except TimeoutError:
            raise ContainerError(f"the container gave no answer within {_START_S:g} s") from None
        except OSError as error:
            raise ContainerError(f"the container ended: {error.strerror}") from None
        if not reply:
            raise ContainerError("the process of the container ended")
        if problem := json.loads(reply).get("error"):
            raise ContainerError(problem)


def _walk(source: Path, target: PurePosixPath) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yield a file, or a folder and all that it holds, each with its place in the container."""
    yield source, target
    if source.is_dir() and not source.is_symlink():
        for child in sorted(source.iterdir()):
            yield from _walk(child, target / child.name)
