"""Process that keeps a container, see ``container``.

It becomes an unprivileged user with a user namespace of its own, and builds the root of the
container in it: overlays of system folders over a tmpfs of bounded size. All changes lie in this
tmpfs, so they end with the process. A *stage* is a PID namespace in which commands run on this
root. When a stage ends, the kernel ends all of its processes, so that nothing of one stage runs
in the next.

Messages on the control socket, of the type SOCK_SEQPACKET, are JSON. The first is the ``Order``;
then ``{"begin": verifying}``, sent with the socket of the new stage, and ``{"end": null}``. Each is
answered by ``{}`` or ``{"error": reason}``. The process ends when the socket is closed at the other
end.

No command has more than the capabilities that ``container_stage`` keeps, and a system call filter
keeps it from namespaces and mounts. Linux 5.14 or later.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from realhf.env.containment import seccomp
from realhf.env.containment.container_stage import (
    MS_REC,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    Libc,
    Order,
    Stage,
    close_others,
    give_up_privileges,
)
from realhf.env.containment.frames import encode_frame

_NOBODY = 65534
"""User and group that the process becomes if it is started by root."""
_OLDEST_KERNEL = (5, 14)
"""First version of Linux that counts the processes of each user namespace by itself."""
_MAX_MESSAGE = 64 * 1024
"""Maximum bytes of a message on the control socket."""
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_MS_RDONLY = 1
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_NOEXEC = 8
_MS_REMOUNT = 32
_MS_PRIVATE = 0x40000
_MS_BIND = 0x1000
_MNT_DETACH = 2
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_BASES = ("/mnt", "/media", "/srv", "/opt", "/tmp")
"""Folders at which the root is built; the first that exists is used. Nothing on the host changes,
because the mounts are in the process's own namespace."""
_MAX_INODES = 200_000
"""Maximum number of files in the container's tmpfs; fewer if its size is small."""
_MIN_INODES = 8192
_FILE_BYTES = 4096
"""Bytes of the container's storage for which it may have one file, each of which also takes about
1 KiB of the kernel's memory."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders of the host's userland; symbolic links among them stay links."""
_SETTINGS = (
    "alternatives", "ca-certificates", "ca-certificates.conf", "debian_version", "fonts",
    "inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "localtime",
    "lsb-release", "magic", "mime.types", "nsswitch.conf", "os-release", "perl", "profile",
    "protocols", "python3", "python3.10", "python3.11", "python3.12", "python3.13", "rpc",
    "services", "shells", "ssl", "terminfo", "timezone",
)  # fmt: skip
"""Files and folders of the host's /etc that are visible; the others are not."""
_NETWORK_SETTINGS = ("resolv.conf", "hosts")
"""Files of the host's /etc that are visible in a container with a network."""
_WRITABLE = (
    "bin", "sbin", "lib", "share", "include", "local", "local/bin", "local/sbin", "local/lib",
    "local/share", "local/include", "local/etc",
)  # fmt: skip
"""Folders below /usr in which files can be made."""
_PACKAGES = (
    "local/lib/python3.*",
    "local/lib/python3.*/site-packages",
    "local/lib/python3.*/dist-packages",
    "lib/python3/dist-packages",
)
"""Folders of Python packages below /usr in which files can be made."""
_FOLDERS = (
    "dev", "etc", "home", "logs", "media", "mnt", "opt", "proc", "root", "run",
    "srv", "tmp", "var", "var/cache", "var/lib", "var/log", "var/spool", "var/tmp",
)  # fmt: skip
"""Folders that every container has."""
_MODES = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700}
"""Modes of the folders that have another one than 755."""
_REAL_FOLDERS = ("dev", "etc", "proc", "tmp")
"""Those of them that replace a link of an image."""
_DEVICES = {
    "null": "null",
    "zero": "full",
    "full": "full",
    "random": "random",
    "urandom": "urandom",
    "tty": "tty",
}
"""Devices, each with that of the host which it is. A map of /dev/zero can be shared memory without
a bound; /dev/full gives the same zeros, and cannot be mapped."""
_DEV_LIMITS = "size=1m,nr_inodes=1k,mode=0755"
_SHM_LIMITS = "size=64m,nr_inodes=10k,mode=1777"
_PTS_LIMITS = "newinstance,ptmxmode=0666,max=64"
_TCP_BUFFERS = "4096 65536 262144"
"""Smallest, first and largest size of the buffers of a container's TCP connection in bytes. The
memory of sockets counts for no process, so both their number and their size are bounded."""
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
          "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx"}  # fmt: skip
"""Symbolic links below /dev, with their targets."""
_PASSWD = (
    "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
)
_GROUP = "root:x:0:\nnogroup:x:65534:\n"
_HOSTS = "127.0.0.1 localhost container\n::1 localhost\n"
_VERIFIER_BYTES = 64 << 20
"""Maximum bytes of the files in each of /tests and /logs of a verifying stage, and bytes by which
the container's storage grows for it."""
_HIDDEN_LIMITS = "size=4k,nr_inodes=1,mode=0555"
"""Options of the empty tmpfs that lies over a hidden folder."""
_VERIFIER_INODES = 10_000
"""Number of files by which the container's storage grows for a verifying stage."""


def main(argv: Sequence[str]) -> None:
    """Serve the container until the control socket, whose descriptor is the only argument, is
    closed."""
    control = socket.socket(fileno=int(argv[0]))
    os.set_inheritable(control.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The helper waits for these; it inherits the mask, so that none of them comes too early.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    order = json.loads(control.recv(_MAX_MESSAGE))
    keeper = _Keeper(Order(**{**order, "hidden": tuple(order["hidden"])}))
    with contextlib.suppress(ConnectionError):
        _reply(control, keeper.build)
        while True:
            data, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 1)
            if not data:
                break
            message = json.loads(data)
            if "begin" in message:
                _reply(control, partial(keeper.begin, fds[0], verifying=message["begin"]))
            else:
                _reply(control, keeper.end)
    keeper.end()


def _reply(control: socket.socket, work: Callable[[], None]) -> None:
    try:
        work()
        answer: Mapping[str, str] = {}
    except (OSError, RuntimeError) as error:
        answer = {"error": getattr(error, "strerror", None) or str(error)}
    control.send(json.dumps(answer).encode())


class _Keeper:
    """Owner of the namespaces and the root of a container."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._libc = Libc()
        self._base = ""
        self._root = ""
        self._stage: int | None = None
        self._layers = 0
        self._max_inodes = min(_MAX_INODES, max(_MIN_INODES, order.storage_bytes // _FILE_BYTES))

    def build(self) -> None:
        """Enter the namespaces and build the root. Raises OSError or RuntimeError."""
        release = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in
                        os.uname().release.split(".")[:2])  # fmt: skip
        if release < _OLDEST_KERNEL:
            raise RuntimeError(f"Linux {os.uname().release} is older than 5.14")
        if not seccomp.available():
            raise RuntimeError(f"there is no system call filter for {os.uname().machine}")
        self._enter_namespaces()
        self._mount_root()

    def begin(self, channel: int, *, verifying: bool) -> None:
        """Begin a stage that serves ``channel``. Raises OSError or RuntimeError."""
        if self._stage is not None:
            raise RuntimeError("a stage runs already")
        if verifying:
            self._enlarge()
            for name in ("tests", "logs"):
                _make_real_folder(self._root, name)
        keeper = os.getpid()
        helper = os.fork()
        if helper == 0:
            self._run_helper(keeper, channel, verifying=verifying)
        os.close(channel)
        self._stage = helper

    def end(self) -> None:
        """End the stage, if one runs, with all of its processes."""
        if self._stage is None:
            return
        os.kill(self._stage, signal.SIGTERM)
        os.waitpid(self._stage, 0)
        self._stage = None

    def _enlarge(self) -> None:
        """Give the verifier room of its own, so that a full disk does not keep it from working."""
        size = self._order.storage_bytes + _VERIFIER_BYTES
        flags = _MS_REMOUNT | _MS_NOSUID | _MS_NODEV
        limits = f"size={size},nr_inodes={self._max_inodes + _VERIFIER_INODES},mode=0755"
        self._libc.mount("container", self._base, "", flags, limits)

    def _enter_namespaces(self) -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            self._libc.call("prctl", "prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
        user, group = os.geteuid(), os.getegid()
        flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWUTS
        flags |= 0 if self._order.network else _CLONE_NEWNET
        self._libc.call("making a user namespace", "unshare", flags)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {user} 1"),
            ("gid_map", f"0 {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text)
        self._libc.call("naming the host", "sethostname", b"container", len(b"container"))
        self._libc.mount("", "/", "", MS_REC | _MS_PRIVATE)
        if not self._order.network:
            with socket.socket() as control:
                request = struct.pack("16sh14x", b"lo", _IFF_UP)
                fcntl.ioctl(control, _SIOCSIFFLAGS, request)

    def _mount_root(self) -> None:
        order = self._order
        lower = {path: os.open(path, os.O_PATH) for path in _SYSTEM if os.path.isdir(path)}
        image = os.open(order.image, os.O_PATH | os.O_DIRECTORY) if order.image else None
        devices = {name: os.open(f"/dev/{source}", os.O_PATH) for name, source in _DEVICES.items()}
        self._base = next(path for path in _BASES if os.path.isdir(path))
        self._root = f"{self._base}/root"
        limits = f"size={order.storage_bytes},nr_inodes={self._max_inodes},mode=0755"
        self._libc.mount("container", self._base, "tmpfs", _MS_NOSUID | _MS_NODEV, limits)
        os.umask(0o022)
        os.mkdir(self._root)
        if image is not None:
            folders = [*_FOLDERS, *(f"usr/{name}" for name in _WRITABLE)]
            self._overlay(image, "", folders)
        else:
            self._libc.bind(self._root, self._root)
            for path in _SYSTEM:
                if os.path.islink(path):
                    os.symlink(os.readlink(path), f"{self._root}{path}")
                elif path in lower:
                    os.mkdir(f"{self._root}{path}")
                    self._overlay(lower[path], path, self._find_writable(path))
        for name in _FOLDERS:
            self._make_folder(name)
        self._write_settings()
        self._keep_devices(devices)
        for path in order.hidden if image is None else ():
            is_system = path.startswith(tuple(f"{each}/" for each in _SYSTEM))
            if is_system and os.path.isdir(f"{self._root}{path}"):
                flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
                self._libc.mount("hidden", f"{self._root}{path}", "tmpfs", flags, _HIDDEN_LIMITS)

    def _make_folder(self, name: str) -> None:
        """Make one of ``_FOLDERS``. Links of an image are not followed, because the root is not
        entered yet: they may lead to the host's files."""
        path = self._root
        for part in name.split("/"):
            path = f"{path}/{part}"
            if os.path.islink(path):
                if name not in _REAL_FOLDERS:
                    return
                os.unlink(path)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
        if name in _MODES:
            os.chmod(path, _MODES[name])

    def _overlay(self, lower: int, path: str, writable: Sequence[str]) -> None:
        """Mount an overlay of the folder ``lower`` at ``path`` below the root.

        In a user namespace, folders of other users are read-only. Files can be made in those that
        exist in the upper layer already: the folders ``writable``.
        """
        self._layers += 1
        layer = f"{self._base}/layer{self._layers}"
        os.makedirs(f"{layer}/work")
        for name in ("", *writable):
            os.makedirs(f"{layer}/upper/{name}", exist_ok=True)
        options = f"lowerdir=/proc/self/fd/{lower},upperdir={layer}/upper,workdir={layer}/work"
        kind = "overlay"
        self._libc.mount(kind, f"{self._root}{path}", kind, _MS_NODEV, f"{options},userxattr")

    def _find_writable(self, path: str) -> list[str]:
        """Return the folders of a system folder in which files can be made, relative to it."""
        lower = Path(path)
        names = [name for name in _WRITABLE if (lower / name).is_dir() or path == "/usr"]
        for pattern in _PACKAGES:
            names += [str(found.relative_to(lower)) for found in lower.glob(pattern)]
        return [name for name in names if not (lower / name).is_symlink()]

    def _write_settings(self) -> None:
        """Fill /etc: from the host's for its userland, and always the users and hosts."""
        etc = Path(self._root, "etc")
        names = (_SETTINGS if not self._order.image else ()) + (
            _NETWORK_SETTINGS if self._order.network else ()
        )
        for name in names:
            source, target = Path("/etc", name), etc / name
            try:
                if source.is_dir():
                    _copy_folder(source, target)
                elif source.is_file():
                    target.unlink(missing_ok=True)
                    shutil.copyfile(source, target)
            except (OSError, shutil.Error):
                continue  # a file that this user may not read is not in the container
        texts = {"hostname": "container\n"}
        if not self._order.image:
            texts |= {"passwd": _PASSWD, "group": _GROUP}
        if not self._order.network:
            texts |= {"hosts": _HOSTS}
        for name, text in texts.items():
            (etc / name).unlink(missing_ok=True)
            (etc / name).write_text(text)

    def _keep_devices(self, devices: Mapping[str, int]) -> None:
        """Mount the devices where a stage takes them from, outside of the root."""
        os.mkdir(f"{self._base}/devices")
        for name, descriptor in devices.items():
            path = f"{self._base}/devices/{name}"
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            self._libc.bind(f"/proc/self/fd/{descriptor}", path)
            os.close(descriptor)

    def _run_helper(self, keeper: int, channel: int, *, verifying: bool) -> None:
        """Run the process between the keeper and the first process of a stage, which dies with it.
        It exits on SIGTERM, once all processes of the stage are gone."""
        status = 1
        try:
            self._libc.call("prctl", "prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != keeper:
                return
            self._libc.call("making a PID namespace", "unshare", _CLONE_NEWPID)
            first = os.fork()
            if first == 0:
                self._run_stage(channel, verifying=verifying)
            os.close(channel)
            signal.sigwait({signal.SIGTERM, signal.SIGCHLD})
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
            status = 0
        except BaseException as error:
            _report(error)
        finally:
            os._exit(status)

    def _run_stage(self, channel: int, *, verifying: bool) -> None:
        """Run the first process of a stage: enter the root, give up privileges, and serve."""
        status = 1
        try:
            self._libc.call("prctl", "prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            Path("/proc/self/oom_score_adj").write_text("1000")
            connection = socket.socket(fileno=channel)
            try:
                # Before the root is entered, where a command may have removed /dev.
                null = os.open("/dev/null", os.O_RDWR)
                self._enter_root(verifying=verifying)
                # A module that is imported now would be one of the container's.
                sys.meta_path.clear()
                close_others(channel, null)
                give_up_privileges(self._libc, self._order)
            except OSError as error:
                connection.sendall(encode_frame({"error": error.strerror or str(error)}))
                return
            connection.sendall(encode_frame({}))
            Stage(connection, self._order).serve()
            status = 0
        except BaseException as error:
            _report(error)
        finally:
            os._exit(status)

    def _enter_root(self, *, verifying: bool) -> None:
        """Make the root this process's, with /proc of its PID namespace, a new /dev and, for a
        verifier, an empty /tests and /logs; nothing of the host stays mounted."""
        libc = self._libc
        libc.call("making a mount namespace", "unshare", _CLONE_NEWNS)
        safe = _MS_NOSUID | _MS_NODEV
        proc = f"{self._root}/proc"
        libc.mount("proc", proc, "proc", safe | _MS_NOEXEC)
        if not self._order.network:
            for name in ("tcp_rmem", "tcp_wmem"):
                Path(proc, "sys/net/ipv4", name).write_text(_TCP_BUFFERS)
        # The settings of the network namespace belong to its user 0.
        libc.bind(f"{proc}/sys", f"{proc}/sys")
        read_only = _MS_BIND | _MS_REMOUNT | _MS_RDONLY | safe | _MS_NOEXEC
        libc.mount("", f"{proc}/sys", "", read_only)
        self._mount_dev()
        if verifying:
            for name in ("tests", "logs"):
                limits = f"size={_VERIFIER_BYTES},nr_inodes={_VERIFIER_INODES}"
                libc.mount(name, f"{self._root}/{name}", "tmpfs", safe, limits)
            os.makedirs(f"{self._root}/logs/verifier")
            os.makedirs(f"{self._root}/logs/agent")
        os.chdir(self._root)
        libc.call("changing the root", "pivot_root", b".", b".")
        libc.call("leaving the host's files", "umount2", b".", _MNT_DETACH)
        os.chdir("/")

    def _mount_dev(self) -> None:
        """Mount a new /dev: what a command has made of the last one is not in it."""
        libc = self._libc
        folder = f"{self._root}/dev"
        flags = _MS_NOSUID | _MS_NOEXEC
        libc.mount("dev", folder, "tmpfs", flags | _MS_NODEV, _DEV_LIMITS)
        for name in _DEVICES:
            os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            libc.bind(f"{self._base}/devices/{name}", f"{folder}/{name}")
        for name, target in _LINKS.items():
            os.symlink(target, f"{folder}/{name}")
        for name in ("pts", "shm"):
            os.mkdir(f"{folder}/{name}")
        libc.mount("devpts", f"{folder}/pts", "devpts", flags, _PTS_LIMITS)
        libc.mount("shm", f"{folder}/shm", "tmpfs", flags | _MS_NODEV, _SHM_LIMITS)


def _report(error: BaseException) -> None:
    """Say why a process ends. A traceback would read files, which in a stage are the
    container's."""
    sys.stderr.write(f"container: {type(error).__name__}: {error}\n")


def _copy_folder(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=shutil.copy)


def _make_real_folder(root: str, name: str) -> None:
    """Make a folder directly below the root, instead of whatever else a command has put there."""
    path = f"{root}/{name}"
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
    os.makedirs(path, mode=0o755, exist_ok=True)
