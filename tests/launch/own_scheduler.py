"""A scheduler outside the package: it writes down what it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from realhf.api.option import option
from realhf.scheduler.base import SchedulerDefinition, WorkerSpec
from realhf.scheduler.local import LocalScheduler


@dataclass
class DiaryOptions:
    """What is written down, and where."""

    file: str = option("", "Names of workers are written to this file.")
    copies: int = option(1, "Every name is written this many times.", at_least=1, at_most=3)


class Diary(LocalScheduler):
    """``LocalScheduler`` with a diary."""

    def __init__(self, options: DiaryOptions) -> None:
        super().__init__(adopts_orphans=True)
        self._options = options

    def start(self, spec: WorkerSpec) -> None:
        """See ``Scheduler``."""
        with Path(self._options.file).open("a", encoding="utf-8") as file:
            file.write(f"{spec.name}\n" * self._options.copies)
        super().start(spec)


DIARY = SchedulerDefinition(DiaryOptions, Diary)
NO_DIARY = SchedulerDefinition(DiaryOptions, lambda options: options)
BROKEN = SchedulerDefinition(DiaryOptions, lambda options: 1 // 0)
