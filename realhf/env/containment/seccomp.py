"""Seccomp filters.

``install`` makes the kernel refuse new programs, new processes, new sockets, and signals to other
processes. The audit hook in ``sandbox`` restricts Python code; this filter also restricts C code
(connections made by uvloop, a fork or a signal sent by a library). Threads remain possible:
``clone`` is allowed only with CLONE_THREAD. ``clone3``, whose flags a filter cannot read, fails
with ENOSYS, so that the C library falls back to ``clone``.

``install_for_programs`` is for the commands of a container, which may start programs and use the
container's own network: it refuses namespaces, mounts, debugging, and memory that no limit counts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator
from typing import NamedTuple

_SET_MODE_FILTER = 1
"""SECCOMP_SET_MODE_FILTER, an operation of seccomp(2)."""
_FLAG_SPEC_ALLOW = 4
"""SECCOMP_FILTER_FLAG_SPEC_ALLOW: the filter does not switch on mitigations of speculative
execution, which would slow the process down."""
_ALLOW = 0x7FFF0000
"""SECCOMP_RET_ALLOW: the system call is executed."""
_ERRNO = 0x00050000
"""SECCOMP_RET_ERRNO: the system call fails with the error number in the lower 16 bits."""
_CLONE_THREAD = 0x00010000
"""Flag of ``clone`` that makes a thread."""
_LOAD = 0x20
"""BPF: load a 32-bit word of struct seccomp_data."""
_JUMP_EQUAL = 0x15
"""BPF: jump if the loaded word equals the operand."""
_JUMP_AT_LEAST = 0x35
"""BPF: jump if the loaded word is at least the operand."""
_JUMP_SET = 0x45
"""BPF: jump if the loaded word has a bit of the operand."""
_JUMP_ABOVE = 0x25
"""BPF: jump if the loaded word is larger than the operand."""
_AND = 0x54
"""BPF: keep the bits of the operand in the loaded word."""
_RETURN = 0x06
"""BPF: return the operand."""
_X32_CALLS = 0x40000000
"""Smallest number of a system call of the x32 ABI, all of which are refused."""
_NAMESPACES = 0x7E020000
"""Flags of ``clone`` that make a namespace."""
_FAMILIES = (1, 2, 10, 16)
"""Families of sockets of a container's commands: AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK, each of
which belongs to the network namespace."""
_CLONE_FILES = 0x00000400
"""Flag of ``clone`` that shares the descriptors."""
_MAP_SHARED_ANONYMOUS = 0x21
"""Flags of ``mmap``: MAP_SHARED, which MAP_SHARED_VALIDATE contains, and MAP_ANONYMOUS."""
_MAP_HUGETLB = 0x40000
"""Flag of ``mmap`` that takes memory from the host's pool of huge pages."""
SHARED_MAP_BYTES = 1 << 20
"""Maximum bytes of a shared anonymous map of a container's commands. Nothing shows how much of its
memory is in use, so a bound is counted for each."""
_DENIED_OPERATIONS = (4, 41)
"""Operations of ``prctl`` that are denied to programs: PR_SET_DUMPABLE, which would hide a process
from its accounting, and PR_SET_THP_DISABLE, which would allow huge pages again: one page of it in
use keeps all of a huge page in memory, which no counter shows."""
_PRIO_PROCESS = 0
_IOPRIO_PROCESS = 1
_OFFSET_NUMBER = 0
"""Offset of the system call number in struct seccomp_data."""
_OFFSET_ARCH = 4
"""Offset of the architecture in struct seccomp_data."""
_OFFSET_FIRST_ARGUMENT = 16
"""Offset of the lower half of the first argument in struct seccomp_data, on little-endian
machines."""
_OFFSET_SECOND_ARGUMENT = 24
_OFFSET_FOURTH_ARGUMENT = 40


class Machine(NamedTuple):
    """System call numbers of one machine architecture."""

    architecture: int
    """Value of AUDIT_ARCH for this architecture, as the filter sees it."""
    seccomp: int
    """Number of ``seccomp``."""
    clone: int
    """Number of ``clone``, which is allowed only for threads."""
    clone3: int
    """Number of ``clone3``, which fails with ENOSYS."""
    tgkill: int
    """Number of ``tgkill``, which may only signal this process itself."""
    prlimit64: int
    """Number of ``prlimit64``, which is allowed only with pid 0 (the calling process)."""
    denied_calls: tuple[int, ...]
    """Numbers of the system calls that always fail with EPERM."""
    socket: int
    """Number of ``socket``, which is allowed to programs only with some families."""
    denied_to_programs: tuple[int, ...]
    """Numbers of the system calls that fail with EPERM in the commands of a container."""
    mmap: int
    """Number of ``mmap``, whose shared anonymous maps are bounded in a container."""
    prctl: int
    """Number of ``prctl``, of which some operations are denied to programs."""
    scheduling: tuple[int, ...]
    """Numbers of sched_setparam, sched_setscheduler, sched_setaffinity and sched_setattr, which
    programs may not call for the first process of their stage."""
    priority: tuple[int, int]
    """Numbers of ``setpriority`` and ``ioprio_set``, which programs may call for one process only,
    and not for the first one of their stage."""


# Since Linux 5.1, system calls have the same number on all machines: io_uring_setup,
# io_uring_enter, io_uring_register, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick,
# pidfd_getfd, mount_setattr, memfd_secret, open_tree_attr
_NEW_CALLS = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447, 467)
"""Numbers on all machines of system calls that are denied to programs."""
# Denied to programs: mount, umount2, pivot_root, unshare, setns, ptrace, process_vm_readv,
# process_vm_writev, bpf, kexec_load, kexec_file_load, init_module, finit_module, delete_module,
# add_key, request_key, keyctl, userfaultfd, perf_event_open, open_by_handle_at, memfd_create,
# shmget, semget, msgget, mq_open, quotactl, swapon, swapoff, reboot, acct, vmsplice
_MACHINES = {
    # fork, vfork, execve, execveat, socket, connect, bind, ptrace, mount, umount2, chroot,
    # pivot_root, unshare, setns, bpf, kexec_load, init_module, finit_module, process_vm_readv,
    # process_vm_writev, keyctl, userfaultfd, open_by_handle_at, io_uring_setup, pidfd_getfd, kill,
    # pidfd_send_signal, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo
    "x86_64": Machine(0xC000003E, 317, 56, 435, 234, 302,
                      (57, 58, 59, 322, 41, 42, 49, 101, 165, 166, 161, 155, 272, 308, 321, 246, 175, 313, 310, 311,
                       250, 323, 304, 425, 438, 62, 424, 200, 129, 297), 41,
                      (165, 166, 155, 272, 308, 101, 310, 311, 321, 246, 320, 175, 313, 176, 248, 249, 250, 323, 298,
                       304, 319, 29, 64, 68, 240, 179, 167, 168, 169, 163, 278, *_NEW_CALLS),
                      9, 157, (142, 144, 203, 314), (141, 251)),
    "aarch64": Machine(0xC00000B7, 277, 220, 435, 131, 261,
                       (221, 281, 198, 203, 200, 117, 40, 39, 51, 41, 97, 268, 280, 104, 105, 273, 270, 271, 219, 282,
                        265, 425, 438, 129, 424, 130, 138, 240), 198,
                       (40, 39, 41, 97, 268, 117, 270, 271, 280, 104, 294, 105, 273, 106, 217, 218, 219, 282, 241,
                        265, 279, 194, 190, 186, 180, 60, 224, 225, 142, 89, 75, *_NEW_CALLS),
                       222, 167, (118, 119, 122, 274), (140, 30)),
}  # fmt: skip
"""Supported architectures, by the name of the machine in ``platform``."""


class _Program(ctypes.Structure):
    """struct sock_fprog: a classic BPF program."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def machine() -> Machine | None:
    """Return the system call numbers of this machine; None if its architecture is not supported."""
    return _MACHINES.get(platform.machine())


def available() -> bool:
    """Return whether the architecture of this machine is supported."""
    return machine() is not None


def install() -> bool:
    """Install the filter in this process for its whole life; requires no-new-privileges. Return
    False if the architecture or the kernel does not support it.

    Must be called with a single thread, and after the fork of the process to be filtered, because
    the filter contains the pid of the process.
    """
    machine_numbers = machine()
    return machine_numbers is not None and _install(
        _assemble_filter(machine_numbers, os.getpid()), machine_numbers
    )


def install_for_programs() -> bool:
    """Install the filter for a container's commands in this process and all that it starts;
    requires no-new-privileges. Return False if the architecture or the kernel does not support it.

    Must be called with a single thread.
    """
    machine_numbers = machine()
    return machine_numbers is not None and _install(
        _assemble_program_filter(machine_numbers), machine_numbers
    )


def _install(code: bytes, machine_numbers: Machine) -> bool:
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    return (
        libc.syscall(
            machine_numbers.seccomp, _SET_MODE_FILTER, _FLAG_SPEC_ALLOW, ctypes.byref(program)
        )
        == 0
    )


_Instruction = tuple[int, int, int, int]
"""A BPF instruction: code, jump if true, jump if false, operand."""
_EPERM = _ERRNO | errno.EPERM


def _begin_filter(machine_numbers: Machine, denied_calls: tuple[int, ...]) -> list[_Instruction]:
    """Return the begin of a filter: it refuses other ABIs, ``clone3`` and the denied calls, and
    leaves the number of the call loaded."""
    program = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQUAL, 1, 0, machine_numbers.architecture),
        (_RETURN, 0, 0, _EPERM),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
        (_JUMP_EQUAL, 0, 1, machine_numbers.clone3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_JUMP_AT_LEAST, 0, 1, _X32_CALLS),
        (_RETURN, 0, 0, _EPERM),
    ]
    for number in denied_calls:
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    return program


def _pack(program: list[_Instruction]) -> bytes:
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _assemble_program_filter(machine_numbers: Machine) -> bytes:
    """Assemble the classic BPF program for the commands of a container."""
    program = _begin_filter(machine_numbers, machine_numbers.denied_to_programs)
    set_priority, set_io_priority = machine_numbers.priority
    rules: list[tuple[int, list[_Instruction]]] = [
        # A command may limit itself, but not the first process of its stage.
        (machine_numbers.prlimit64, [*_return_unless_first(_JUMP_EQUAL, 0, _EPERM)]),
        (
            machine_numbers.clone,
            [
                *_return_if_first(_JUMP_SET, _NAMESPACES, _EPERM),
                # The descriptors of a thread that shares none are shown nowhere.
                (_JUMP_SET, 0, 2, _CLONE_THREAD),
                (_JUMP_SET, 1, 0, _CLONE_FILES),
                (_RETURN, 0, 0, _EPERM),
            ],
        ),
        (
            machine_numbers.mmap,
            [
                (_LOAD, 0, 0, _OFFSET_FOURTH_ARGUMENT),
                (_JUMP_SET, 0, 1, _MAP_HUGETLB),
                (_RETURN, 0, 0, _ERRNO | errno.ENOMEM),
                (_AND, 0, 0, _MAP_SHARED_ANONYMOUS),
                (_JUMP_EQUAL, 0, 5, _MAP_SHARED_ANONYMOUS),
                (_LOAD, 0, 0, _OFFSET_SECOND_ARGUMENT + 4),
                (_JUMP_EQUAL, 0, 2, 0),
                (_LOAD, 0, 0, _OFFSET_SECOND_ARGUMENT),
                (_JUMP_ABOVE, 0, 1, SHARED_MAP_BYTES),
                (_RETURN, 0, 0, _ERRNO | errno.ENOMEM),
            ],
        ),
        (
            machine_numbers.prctl,
            [
                (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
                *(
                    step
                    for operation in _DENIED_OPERATIONS
                    for step in ((_JUMP_EQUAL, 0, 1, operation), (_RETURN, 0, 0, _EPERM))
                ),
            ],
        ),
        *(
            (number, [*_return_if_first(_JUMP_EQUAL, 1, _EPERM)])
            for number in machine_numbers.scheduling
        ),
        *(
            (
                number,
                [
                    (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
                    (_JUMP_EQUAL, 0, 2, kind),
                    (_LOAD, 0, 0, _OFFSET_SECOND_ARGUMENT),
                    (_JUMP_EQUAL, 0, 1, 1),
                    (_RETURN, 0, 0, _EPERM),
                ],
            )
            for number, kind in ((set_priority, _PRIO_PROCESS), (set_io_priority, _IOPRIO_PROCESS))
        ),
        (
            machine_numbers.socket,
            [
                (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
                *(
                    step
                    for family in _FAMILIES
                    for step in ((_JUMP_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW))
                ),
                (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
            ],
        ),
    ]
    for number, steps in rules:
        program += [(_JUMP_EQUAL, 0, len(steps) + 1, number), *steps, (_RETURN, 0, 0, _ALLOW)]
    return _pack([*program, (_RETURN, 0, 0, _ALLOW)])


def _return_if_first(jump: int, operand: int, verdict: int) -> Iterator[_Instruction]:
    """Yield instructions that return ``verdict`` if the first argument passes a test."""
    yield (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT)
    yield (jump, 0, 1, operand)
    yield (_RETURN, 0, 0, verdict)


def _return_unless_first(jump: int, operand: int, verdict: int) -> Iterator[_Instruction]:
    """Yield instructions that return ``verdict`` unless the first argument passes a test."""
    yield (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT)
    yield (jump, 1, 0, operand)
    yield (_RETURN, 0, 0, verdict)


def _assemble_filter(machine_numbers: Machine, pid: int) -> bytes:
    """Assemble the classic BPF program for the process ``pid``; instructions are (code, jump if
    true, jump if false, operand).

    Arguments are compared by their lower 32 bits, which is all that the kernel reads of a pid.
    """
    program = _begin_filter(machine_numbers, machine_numbers.denied_calls)
    # The C library signals its own threads (raise, abort, pthread_kill), and limits its own process
    # (setrlimit).
    for number, allowed in ((machine_numbers.tgkill, pid), (machine_numbers.prlimit64, 0)):
        program += [
            (_JUMP_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
            (_JUMP_EQUAL, 0, 1, allowed),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _EPERM),
        ]
    program += [
        (_JUMP_EQUAL, 1, 0, machine_numbers.clone),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
        (_JUMP_SET, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _EPERM),
    ]
    return _pack(program)
