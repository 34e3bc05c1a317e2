"""Parts of a first hour that fail, hang or die. Their processes start quickly, since nothing here
imports torch."""

from __future__ import annotations

import os
import time

import psutil

from benchmarks.gpu_hour.recording import CheckFailed, Recorder, Setting
from realhf.base.installation import IMPORT_ROOT


def fail(record: Recorder, setting: Setting) -> None:
    with record.check("a first thing") as check:
        check.say("done", pid=os.getpid())
    with record.check("a wrong thing") as check:
        check.say("never mind", half=1)
        raise CheckFailed(f"{IMPORT_ROOT}/x is wrong")
    record.skip_on_cpu("a third thing", "it needs two GPUs")
    with record.check("a needed thing", needed=True):
        raise ValueError("two\nlines")
    raise AssertionError("the part goes on")


def hang(record: Recorder, setting: Setting) -> None:
    with record.check("a first thing") as check:
        child = psutil.Popen(["sleep", "1000"])
        check.say("started", pid=child.pid)
    time.sleep(1000)


def die(record: Recorder, setting: Setting) -> None:
    os.write(2, b"no kernel image is available\n")
    os._exit(3)
