"""Registers files, through the door for classes with tools: its options, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.api.config.option import option
from realhf.api.environment import TRAIN, EnvironmentDefinition, EnvironmentSpec
from realhf.env.doors.threads import Threads
from realhf.env.doors.tool_class import ToolClassEnvironment, read_class
from realhf.environments.files.demonstrations import demonstrations
from realhf.environments.files.task_set import FilesTasks
from realhf.environments.files.templates import GROUPS
from realhf.environments.files.workspace import FilesWorkspace

SYSTEM_PROMPT = (
    "You work on a folder of text files with tools. Call one tool at a time. "
    "Answer a question with the tool answer, and with nothing but the answer."
)


@dataclass
class FilesOptions:
    """Files: a scratch folder with tools, and tasks such as renaming, counting, editing and moving."""

    groups: list[str] = option([*GROUPS], "Tasks are drawn from the templates of these groups.", choices=GROUPS)


def build(options: FilesOptions) -> EnvironmentSpec:
    """Return the environment with these options. Raises ValueError for an unknown group."""
    about, threads = read_class(FilesWorkspace), Threads("files")
    training = FilesTasks(options.groups, TRAIN)
    return EnvironmentSpec(
        name="files",
        make=lambda _: ToolClassEnvironment(about, FilesWorkspace, threads),
        tasks=lambda split: FilesTasks(options.groups, split),
        system_prompt=SYSTEM_PROMPT,
        demonstrate=lambda request: demonstrations(training, request),
    )


DEFINITION = EnvironmentDefinition(FilesOptions, build)
