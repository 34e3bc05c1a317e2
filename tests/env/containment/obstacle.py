"""Whether this machine allows what a container needs, found out without the code of containers: a
test that skipped on any of their errors would hide their faults."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)


def call(act, name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise SystemExit(f"{act}: {os.strerror(ctypes.get_errno())}")


if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    call("prctl", "prctl", 4, 1, 0, 0, 0)
user, group = os.geteuid(), os.getegid()
call("namespaces of an ordinary user", "unshare", 0x10000000 | 0x00020000 | 0x40000000)
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
call("a private mount", "mount", b"", b"/", b"", ctypes.c_ulong(0x44000), None)
call("a tmpfs", "mount", b"t", b"/tmp", b"tmpfs", ctypes.c_ulong(0), None)
for name in ("lower", "upper", "work", "all"):
    os.mkdir(f"/tmp/{name}")
options = b"lowerdir=/tmp/lower,upperdir=/tmp/upper,workdir=/tmp/work,userxattr"
call("an overlay", "mount", b"o", b"/tmp/all", b"overlay", ctypes.c_ulong(0), options)
"""


@functools.cache
def find_obstacle() -> str:
    """Return why no container can be made here; "" if one can be."""
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if sys.platform != "linux" or release < (5, 14):
        return f"no container can be made here: {sys.platform} {os.uname().release}"
    if os.uname().machine not in ("x86_64", "aarch64"):
        return f"no container can be made here: no filter for {os.uname().machine}"
    tried = subprocess.run([sys.executable, "-I", "-c", PROBE], capture_output=True, text=True)
    if tried.returncode == 0:
        return ""
    return f"no container can be made here: {tried.stderr.strip().splitlines()[-1]}"


def skip_without_containers() -> None:
    """Skip the test where no container can be made."""
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
