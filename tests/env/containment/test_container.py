"""What a command in a container can do, and what it cannot."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.env.containment.container import CommandResult, Container, ContainerError
from realhf.env.containment.container_stage import Order

pytestmark = pytest.mark.slow
MIB = 1 << 20
HIDDEN = "/usr/share"


def order(**changes: object) -> Order:
    return Order(
        **{"storage_bytes": 16 * MIB, "memory_bytes": 128 * MIB, "processes": 32, **changes}
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    container = Container(order(hidden=(HIDDEN,)))
    try:
        try:
            container.start()
        except ContainerError as error:
            pytest.skip(f"no container can be made here: {error}")
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
    "command",
    [
        "mount -t tmpfs none /mnt",
        "umount /usr",
        "mount -o remount,size=1G /",
        "unshare --user --map-root-user true",
        "unshare --net true",
        "chroot / true",
        "mknod /tmp/disk b 8 0",
        "hostname other",
        "kill -KILL 1 && sleep 0.2 && kill -0 1 && false",
        "echo x > /proc/sys/kernel/core_pattern",
        "cat /proc/1/mem",
        "ls /proc/1/root/",
        "renice -n -5 $$",
        "ls /home/*/ /root/.[a-z]* /work",
        f"ls {HIDDEN} | grep .",
    ],
)
def test_user_0_of_the_container_is_not_root(container: Container, command: str) -> None:
    assert run(container, command).code != 0
    assert run(container, "true").code == 0


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
    """Four processes take less than the limit each, but more together; one takes shared memory,
    which no limit of a process counts."""
    code = (
        "import os, time\nchildren = []\nfor _ in range(4):\n    child = os.fork()\n"
        "    if child == 0:\n        memory = bytearray(60 << 20)\n        time.sleep(1)\n"
        "        os._exit(0)\n    children.append(child)\n"
        "print([os.waitpid(child, 0)[1] for child in children].count(9) >= 2)"
    )
    assert python(container, code).output == "True\n"
    code = "import mmap, time\nm = mmap.mmap(-1, 400 << 20)\nfor at in range(0, len(m), 4096): m[at] = 1"
    assert python(container, f"{code}\ntime.sleep(5)").code == 137
    assert run(container, "true").code == 0


def test_dropped_pages_of_shared_memory_count(container: Container) -> None:
    """They stay in memory, and no counter of the process shows them."""
    code = (
        "import mmap, time\nkept = []\nfor _ in range(30):\n    m = mmap.mmap(-1, 10 << 20)\n"
        "    for at in range(0, len(m), 4096): m[at] = 1\n    m.madvise(mmap.MADV_DONTNEED)\n"
        "    kept.append(m)\n    time.sleep(0.02)\ntime.sleep(2)\nprint('all')"
    )
    assert python(container, code).code == 137


def test_processes_that_have_ended_count_no_longer(container: Container) -> None:
    """A command that starts daemons one after another has as many as it likes."""
    code = (
        "import os, time\nfor _ in range(300):\n    child = os.fork()\n    if child == 0:\n"
        "        os.fork() or os._exit(0)\n        os._exit(0)\n    os.waitpid(child, 0)\n"
        "    time.sleep(0.005)\nprint('done')"
    )
    assert python(container, code).output == "done\n"


def test_a_stage_begins_where_a_command_has_moved_dev(container: Container) -> None:
    own = Container(order())
    try:
        own.start()
        own.begin()
        assert run(own, "mv /dev /gone").code == 0
        own.end()
        own.begin(verifying=True)
        assert run(own, "echo there").output == "there\n"
    finally:
        own.close()


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
    container = Container(order())
    try:
        try:
            container.start()
        except ContainerError as error:
            pytest.skip(f"no container can be made here: {error}")
        container.begin()
        run(container, "setsid sleep 4242 > /dev/null 2>&1 & echo kept > /srv/file")
        assert is_running("sleep 4242")
        container.end()
        assert not is_running("sleep 4242")
        container.begin()
        assert run(container, "cat /srv/file; pgrep sleep").output == "kept\n"
        container.end()
        with pytest.raises(ContainerError, match="no stage runs"):
            run(container, "true")
    finally:
        container.close()


def is_running(command: str) -> bool:
    return subprocess.run(["pgrep", "-fx", command], capture_output=True).returncode == 0


@pytest.mark.nightly
def test_an_interrupted_container_ends(container: Container) -> None:
    own = Container(order())
    own.start()
    own.begin()
    timer = threading.Timer(0.3, own.interrupt)
    timer.start()
    began = time.monotonic()
    with pytest.raises(ContainerError, match="ended"):
        run(own, "sleep 4343", timeout_s=60)
    assert time.monotonic() - began < 10
    own.close()
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
    own = Container(order(image=str(image)))
    try:
        own.start()
        own.begin()
        result = run(own, "cat /etc/motd; ls /usr/bin; echo changed > /etc/motd || echo kept")
        assert result.output.startswith("an image\nbash\ncat\nls\n")
    finally:
        own.close()
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
