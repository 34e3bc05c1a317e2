"""What a command in a container can do, and what it cannot."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from realhf.env.containment.container import (
    CommandResult,
    Container,
    ContainerError,
    UnreadableFile,
)
from realhf.env.containment.container_stage import Order
from tests.env.containment.obstacle import skip_without_containers

pytestmark = pytest.mark.slow
MIB = 1 << 20
HIDDEN = "/usr/share"


def order(**changes: object) -> Order:
    return Order(
        **{"storage_bytes": 16 * MIB, "memory_bytes": 128 * MIB, "processes": 32, **changes}
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    """A container for tests that leave it as it was."""
    with started(hidden=(HIDDEN,)) as container:
        yield container


@contextmanager
def started(**changes: object) -> Iterator[Container]:
    """A container of its own, in its first stage."""
    skip_without_containers()
    container = Container(order(**changes))
    try:
        container.start()
        container.begin()
        yield container
    finally:
        container.close()


def run(container: Container, command: str, timeout_s: float = 10.0) -> CommandResult:
    return container.run(
        command,
        folder="/tmp",
        variables={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
        timeout_s=timeout_s,
        output_bytes=2000,
    )


def python(container: Container, code: str, timeout_s: float = 10.0) -> CommandResult:
    return run(container, f"python3 - <<'END'\n{code}\nEND", timeout_s)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("mount -t tmpfs none /mnt", "ermission denied|not permitted"),
        ("umount /usr", "ermission denied|must be superuser|not permitted"),
        ("mount -o remount,size=1G /", "ermission denied|not permitted"),
        ("unshare --user --map-root-user true", "not permitted"),
        ("unshare --net true", "not permitted"),
        ("chroot / true", "not permitted"),
        ("mknod /tmp/disk b 8 0", "not permitted"),
        ("hostname other", "must be root|not permitted"),
        ("echo x > /proc/sys/kernel/core_pattern", "Read-only"),
        ("echo 4096 > /proc/sys/net/ipv4/tcp_wmem", "Read-only"),
        ("cat /proc/1/mem", "Permission denied"),
        ("ls /proc/1/root/", "Permission denied"),
        ("renice -n -5 $$", "Permission denied"),
        ("renice -n 5 1", "Operation not permitted"),
        (f"touch {HIDDEN}/file", "Read-only"),
    ],
)
def test_user_0_of_the_container_is_not_root(
    container: Container, command: str, reason: str
) -> None:
    result = run(container, command)
    assert result.code not in (0, 127), result.output
    assert re.search(reason, result.output), result.output
    assert run(container, "true").code == 0


def test_signals_do_not_reach_the_first_process(container: Container) -> None:
    assert run(container, "kill -KILL 1; kill -STOP 1; kill -0 1 && echo there").output == "there\n"
    assert run(container, "echo works").output == "works\n"


def test_folders_of_the_host_are_not_there(container: Container) -> None:
    listed = run(container, f"ls -A {HIDDEN} /home /usr").output
    assert "/home:\n\n/usr:\n" in listed
    assert listed.endswith(f"\n{HIDDEN}:\n")
    checkout = Path(__file__).resolve().parents[3]
    assert "No such file" in run(container, f"ls {checkout}").output


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.memfd_create('x')", "Operation not permitted"),
        ("import socket; socket.socket(40, 1)", "Address family not supported"),
        ("import ctypes, os; l = ctypes.CDLL(None, use_errno=True); "
         "l.ptrace(16, 1, 0, 0) == -1 and exit(os.strerror(ctypes.get_errno()))", "not permitted"),
        ("open('/etc/shadow')", "No such file"),
        ("import ctypes, os; l = ctypes.CDLL(None, use_errno=True); "
         "l.semget(0, 32000, 0o1600) == -1 and exit(os.strerror(ctypes.get_errno()))", "not permitted"),
        ("import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))", "not permitted"),
        ("b = bytearray(1 << 30)", "MemoryError"),
        ("open('/tmp/large', 'wb').write(bytes(40 << 20))", "No space left|File too large"),
    ],
)  # fmt: skip
def test_the_kernel_refuses(container: Container, code: str, reason: str) -> None:
    result = python(container, code)
    assert result.code != 0
    assert any(each in result.output for each in reason.split("|")), result.output
    run(container, "rm -f /tmp/large")


@pytest.mark.nightly
def test_memory_is_limited_over_all_processes(container: Container) -> None:
    """Four processes take less than the limit each, but more together."""
    code = (
        "import os, time\nchildren = []\nfor _ in range(4):\n    child = os.fork()\n"
        "    if child == 0:\n        memory = bytearray(60 << 20)\n        time.sleep(1)\n"
        "        os._exit(0)\n    children.append(child)\n"
        "print([os.waitpid(child, 0)[1] for child in children].count(9) >= 2)"
    )
    assert python(container, code).output == "True\n"
    assert run(container, "true").code == 0


SHARED = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 4, ctypes.c_long]
libc.munmap.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
kept = 0
for _ in range(COUNT):
    at = libc.mmap(None, SIZE, 3, 0x21, DESCRIPTOR, 0)
    if at == 2**64 - 1:
        print("refused:", os.strerror(ctypes.get_errno()))
        break
    ctypes.memset(at, 1, SIZE)
    DROP
    kept += 1
    time.sleep(0.002)
time.sleep(1)
print("kept", kept)
"""
"""Takes shared memory in pieces, and drops all pages of a piece, or all but one, without giving
them back: they stay in memory, and no counter of the process shows them."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("size", "drop", "ended"),
    [
        (1 << 20, "libc.munmap(at + 4096, SIZE - 4096, 0)", True),
        (1 << 20, "libc.madvise(at, SIZE, 4)", True),
        (1 << 20, "libc.prctl(0x53564d41, 0, at, SIZE, b'name')", True),
        (10 << 20, "libc.munmap(at + 4096, SIZE - 4096, 0)", False),
    ],
)
def test_shared_memory_cannot_hide(size: int, drop: str, ended: bool) -> None:
    """Small shared maps count whole, and large ones are refused."""
    code = SHARED.replace("DROP", drop).replace("SIZE", str(size)).replace("COUNT", "400")
    code = code.replace("DESCRIPTOR", "2**64 - 1")
    with started() as container:
        result = python(container, f"{code}\n")
        if ended:
            assert result.code == 137, result.output
        else:
            assert result.output == "refused: Cannot allocate memory\nkept 0\n"
        assert run(container, "echo works").output == "works\n"


def test_dev_zero_is_no_shared_memory(container: Container) -> None:
    code = "import mmap, os\nmmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20)"
    assert "No such device" in python(container, code).output
    assert run(container, "head -c 3 /dev/zero | od -An -tx1").output == " 00 00 00\n"


def test_a_process_cannot_hide_its_memory() -> None:
    """A process whose first thread has ended shows its memory in its other threads only; its name
    need not be text."""
    code = (
        "import ctypes, os, threading, time\nlibc = ctypes.CDLL(None)\n"
        "libc.prctl(15, b'\\xff\\x0b\\xfe', 0, 0, 0)\n"
        "print('hidden' if libc.prctl(4, 0, 0, 0, 0) == 0 else 'visible', flush=True)\n"
        "def hold():\n    memory = bytearray(50 << 20)\n    time.sleep(2)\n"
        "    os.write(1, b'kept\\n')\n"
        "for _ in range(6):\n    if os.fork() == 0:\n"
        "        threading.Thread(target=hold).start()\n"
        "        libc.syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)\n"
        "time.sleep(4)"
    )
    with started() as container:
        lines = python(container, code, timeout_s=20).output.split("\n")
        assert lines[0] == "visible"
        assert lines.count("kept") <= 2
        assert run(container, "echo works").output == "works\n"


@pytest.mark.nightly
def test_the_number_of_sockets_is_limited() -> None:
    """The memory of their buffers counts for no process."""
    code = (
        "import os, socket, time\nfor _ in range(6):\n    if os.fork() == 0:\n        kept = []\n"
        "        try:\n            while True: kept.append(socket.socketpair())\n"
        "        except OSError: time.sleep(2)\n        os._exit(0)\n"
        "time.sleep(1)\nprint(open('/proc/net/sockstat').readline().split()[2])"
    )
    with started(memory_bytes=512 * MIB) as container:
        assert int(python(container, code).output) <= 1024


def test_processes_that_have_ended_count_no_longer(container: Container) -> None:
    """A command that starts daemons one after another has as many as it likes."""
    code = (
        "import os, time\nfor _ in range(300):\n    child = os.fork()\n    if child == 0:\n"
        "        os.fork() or os._exit(0)\n        os._exit(0)\n    os.waitpid(child, 0)\n"
        "    time.sleep(0.005)\nprint('done')"
    )
    assert python(container, code).output == "done\n"


def test_a_stage_has_a_dev_of_its_own() -> None:
    with started() as container:
        spoil = (
            "mv /dev /gone; rm -f /dev/null /dev/urandom; echo seven > /dev/urandom; ls /dev/shm"
        )
        assert run(container, f"touch /dev/shm/left; {spoil}").output.endswith("left\n")
        container.end()
        container.begin(verifying=True)
        look = "ls -A /dev/shm; test -c /dev/urandom && echo kept > /dev/null && echo there"
        assert run(container, look).output == "there\n"


def test_a_stage_begins_on_a_ruined_root() -> None:
    """Nothing that a command can do to its files keeps the next stage from beginning."""
    ruin = (
        "rm -rf /logs /tests /tmp/* /etc /var; ln -s / /logs; ln -s /proc /tests; mkfifo /etc; "
        "rm -f /bin/bash /bin/sh /usr/bin/bash /usr/bin/sh; chmod 0 /; cat /dev/zero > /root/full"
    )
    with started() as container:
        run(container, ruin)
        assert run(container, "true").code != 0, "a shell is left"
        container.end()
        container.begin(verifying=True)
        assert container.read("/logs/verifier/reward.txt") is None
        container.make_folder("/tests/deep")


def test_what_a_command_leaves_running_is_ended(container: Container) -> None:
    left = "setsid sleep 5151 > /dev/null 2>&1 & (trap '' TERM; sleep 5151) &"
    assert run(container, left).code == 0
    assert is_running("sleep 5151")
    container.clear()
    assert not is_running("sleep 5151")
    assert run(container, "echo works").output == "works\n"


@pytest.mark.nightly
def test_any_number_of_commands_may_leave_their_output_open() -> None:
    with started(processes=100) as container:
        for _ in range(80):
            assert run(container, "sleep 60 & true").code == 0


def test_only_regular_files_are_read_and_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("text")
    with started() as container:
        run(container, "mkfifo /tmp/pipe; ln -s /etc/passwd /tmp/link; mkdir /tmp/folder")
        for name in ("pipe", "link", "folder"):
            with pytest.raises(UnreadableFile, match=name):
                container.read(f"/tmp/{name}")
        with pytest.raises(ContainerError, match="neither a file"):
            container.copy_in(tmp_path / "pipe", "/tmp/copy")
        with pytest.raises(ContainerError, match="/tmp/pipe"):
            container.copy_in(tmp_path / "file", "/tmp/pipe")


def test_the_network_is_the_containers_own(container: Container) -> None:
    code = (
        "import socket\ns = socket.create_server(('127.0.0.1', 8000))\n"
        "c = socket.create_connection(('127.0.0.1', 8000))\nprint('connected')"
    )
    assert python(container, code).output == "connected\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        refused = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        assert "Connection refused" in python(container, refused).output
    assert "unreachable" in python(
        container, "import socket\nsocket.create_connection(('192.0.2.1', 80), 2)"
    ).output  # fmt: skip


def test_output_is_bounded_and_shows_both_ends(container: Container) -> None:
    result = run(container, "echo first; head -c 1000000 /dev/zero | tr '\\0' x; echo last")
    assert result.output.startswith("first\n")
    assert result.output.endswith("last\n")
    assert len(result.output) < 2100
    assert result.omitted == 1_000_011 - 2000


def test_a_flood_of_output_ends_the_command(container: Container) -> None:
    result = run(container, "yes", timeout_s=60)
    assert (result.code, result.ended) == (None, "it wrote more than 16 MiB")


def test_a_command_is_ended_with_its_group(container: Container) -> None:
    result = run(container, "sleep 77 & echo begun; sleep 77", timeout_s=0.3)
    assert (result.code, result.output) == (None, "begun\n")
    assert run(container, "pgrep -x sleep").code == 1


def test_background_processes_stay_and_their_output_is_read(container: Container) -> None:
    """More than a pipe holds is written after the command's end, which would block or end a
    process whose output is not read."""
    writer = "(sleep 0.3; head -c 300000 /dev/zero; touch /tmp/written) &"
    assert run(container, writer).code == 0
    assert run(container, "sleep 1; test -e /tmp/written").code == 0


def test_a_stage_ends_all_of_its_processes_and_keeps_its_files() -> None:
    with started() as container:
        run(container, "setsid sleep 4242 > /dev/null 2>&1 & echo kept > /srv/file")
        run(container, "until pgrep -fx 'sleep 4242'; do sleep 0.05; done")
        assert is_running("sleep 4242")
        container.end()
        assert not is_running("sleep 4242")
        container.begin()
        assert run(container, "cat /srv/file; pgrep sleep").output == "kept\n"
        container.end()
        with pytest.raises(ContainerError, match="no stage runs"):
            run(container, "true")


def is_running(command: str) -> bool:
    return subprocess.run(["pgrep", "-fx", command], capture_output=True).returncode == 0


@pytest.mark.nightly
def test_an_interrupted_container_ends() -> None:
    with started() as own:
        timer = threading.Timer(0.3, own.interrupt)
        timer.start()
        began = time.monotonic()
        with pytest.raises(ContainerError, match="the container ended") as error:
            run(own, "sleep 4343", timeout_s=60)
        assert type(error.value) is ContainerError
        assert time.monotonic() - began < 10
    assert not is_running("sleep 4343")


@pytest.mark.nightly
def test_an_unpacked_image_is_the_root(container: Container, tmp_path: Path) -> None:
    """The image has the tools of a static shell only where one is installed; here it borrows those
    of the container, copied with what they are linked to."""
    image = tmp_path / "image"
    for name in ("bash", "cat", "ls"):
        copy_program(f"/bin/{name}", image)
    (image / "etc").mkdir()
    (image / "etc" / "motd").write_text("an image\n")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    with started(image=str(image)) as own:
        result = run(own, "cat /etc/motd; ls /usr/bin; echo changed > /etc/motd || echo kept")
        assert result.output.startswith("an image\nbash\ncat\nls\n")
    assert (image / "etc" / "motd").read_text() == "an image\n"


def copy_program(path: str, image: Path) -> None:
    """Copy a program with its libraries into the folder of an image."""
    listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    libraries = [word for line in listed.splitlines() for word in line.split() if word[0] == "/"]
    for source in (path, *libraries):
        place = source if source.startswith("/usr") else f"/usr{source}"
        target = image / place.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(source).read_bytes())
        target.chmod(0o755)
    for name in ("bin", "lib", "lib64"):
        (image / "usr" / name).mkdir(exist_ok=True)
        if not (image / name).is_symlink():
            (image / name).symlink_to(f"usr/{name}")


@pytest.mark.nightly
def test_what_cannot_be_built_is_refused(container: Container) -> None:
    with pytest.raises(ContainerError, match="No such file"):
        Container(order(image="/nonexistent")).start()
