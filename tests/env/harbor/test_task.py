"""A Harbor task folder is read whole, and what cannot be played is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realhf.env.harbor.dockerfile import read_dockerfile, stands_in
from realhf.env.harbor.task import InvalidReward, parse_reward, read_task
from realhf.env.loader.load import build_environment
from tests.env.harbor.conftest import WriteTask


@pytest.mark.parametrize(
    ("toml", "name"),
    [
        ("[environment]\ngpus = 1\n", "GPUs"),
        ('[environment]\nos = "windows"\n', "windows"),
        ('[[steps]]\nname = "first"\n', "several steps"),
        ('[verifier]\nuser = "tester"\n', "the user 'tester'"),
        ('[verifier]\nenvironment_mode = "separate"\n', "a verifier in an environment of its own"),
        ('[[environment.mcp_servers]]\nname = "x"\n', "MCP servers"),
        ('[verifier.env]\nKEY = "${OPENAI_API_KEY}"\n', "variables of the host"),
        ("[agent]\ntimeout_sec = -1\n", "agent.timeout_sec"),
        ("[environment]\nmemory_gb = 2\n", "the unknown key environment.memory_gb"),
        ("[sandbox]\nstrict = true\n", "the unknown key sandbox"),
        ("[environment]\ncpus = 0\n", "environment.cpus"),
        ('[environment]\nallowed_hosts = ["a.org"]\n', "a list of hosts"),
        ('[agent]\nnetwork_mode = "allowlist"\n', "the network mode 'allowlist'"),
        ('[metadata.realhf]\nroot = "/usr"\n', "outside of the task"),
        ('[metadata.realhf]\nroot = "../one/../../root"\n', "outside of the task"),
        ("[agent\n", "task.toml"),
    ],
)
def test_what_is_not_played_is_refused_by_name(toml: str, name: str, write_task: WriteTask) -> None:
    folder = write_task(toml=toml)
    with pytest.raises(ValueError, match=name) as error:
        read_task(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("dockerfile", "reason"),
    [
        ("FROM node:20\n", "plain debian, ubuntu and python images"),
        ("FROM ghcr.io/someone/python:3\n", "plain debian, ubuntu and python images"),
        ("FROM debian\nUSER agent\n", "line 2: USER is not followed"),
        ("FROM debian\nCOPY --from=base /x /x\n", "line 2: the option --from of COPY"),
        ("FROM debian AS one\n\nFROM debian\n", "line 3: a second FROM"),
        ("FROM debian\nRUN --mount=type=cache,target=/x true\n", "line 2: the option --mount"),
        ("FROM debian\nRUN <<END\ntrue\nEND\n", "line 2: a here-document"),
        ("FROM debian\nCOPY missing /x\n", "line 2: COPY missing: there is no such file"),
        ("FROM debian\nCOPY ../tests /x\n", "line 2: COPY ../tests: leaves the folder"),
        ("FROM debian\nENV A=${B:-c}\n", r"line 2: \$\{B:-c\} is not followed"),
        ("# escape=`\nFROM debian\n", "the directive escape"),
        ("ARG X\nFROM debian\n", "ARG before FROM"),
        ("", "has no FROM"),
    ],
)
def test_a_dockerfile_that_cannot_be_followed_is_refused(
    dockerfile: str, reason: str, write_task: WriteTask
) -> None:
    with pytest.raises(ValueError, match=reason):
        read_task(write_task(dockerfile=dockerfile))


def test_compose_is_refused(write_task: WriteTask) -> None:
    folder = write_task()
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(ValueError, match="compose"):
        read_task(folder)


def test_a_link_does_not_copy_what_is_outside(write_task: WriteTask, tmp_path: Path) -> None:
    folder = write_task(dockerfile="FROM debian\nCOPY link /x\n")
    (tmp_path / "secret").write_text("secret")
    (folder / "environment" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="leaves the folder"):
        read_task(folder)


@pytest.mark.parametrize("name", ["instruction.md", "task.toml", "tests/test.sh", "tests"])
def test_links_out_of_the_folder_are_refused(
    name: str, write_task: WriteTask, tmp_path: Path
) -> None:
    """They might show a file of the host to the policy."""
    folder = write_task()
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=r"leaves the folder|is a link"):
        read_task(folder)


@pytest.mark.parametrize("name", ["environment/pipe", "tests/deep/pipe", "solution/pipe"])
def test_pipes_are_refused(name: str, write_task: WriteTask) -> None:
    folder = write_task()
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=f"{name}: is neither"):
        read_task(folder)


@pytest.mark.parametrize("name", ["instruction.md", "environment/Dockerfile"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name: str, write_task: WriteTask) -> None:
    folder = write_task()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=name):
        read_task(folder)


def test_what_a_task_does_not_get_is_said(write_task: WriteTask) -> None:
    task = read_task(write_task(toml='[environment]\nmemory = "4G"\nstorage_mb = 16\ncpus = 2\n'))
    _, *warnings = task.find_warnings(memory_mb=2048, storage_mb=512)
    assert warnings == [
        "the task asks for memory_mb=4096 and gets env.memory_mb=2048",
        "cpus=2 is not enforced: the host's CPUs are shared",
    ]
    (only,) = read_task(write_task("plain")).find_warnings(memory_mb=64, storage_mb=16)
    assert only.startswith("the host's userland")


def test_the_longest_call_is_a_build_or_the_last_message(write_task: WriteTask) -> None:
    toml = "[verifier]\ntimeout_sec = 40\n[environment]\nbuild_timeout_sec = 500\n"
    folder = write_task(toml=toml)
    assert build_environment(f"harbor:{folder}", {}).longest_call_s == 30 + 40 + 30
    folder = write_task("runs", toml=toml, dockerfile="FROM debian\nRUN true\n")
    assert build_environment(f"harbor:{folder}", {}).longest_call_s == 500 + 20


@pytest.mark.parametrize("image", ["debian", "ubuntu:24.04", "docker.io/library/python:3.12-slim"])
def test_the_userland_stands_in_for_plain_images(image: str) -> None:
    assert stands_in(image)


def test_lines_are_joined_and_comments_left_out(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("# syntax=docker/dockerfile:1\nFROM debian\nRUN a \\\n  # no\n  b\nWORKDIR x\n")
    build = read_dockerfile(file)
    assert getattr(build.steps[0], "words", "") == "a b"
    assert build.folder == "/x"


def test_older_sizes_are_read(write_task: WriteTask) -> None:
    task = read_task(write_task(toml='[environment]\nmemory = "2G"\nstorage = "512M"\n'))
    assert (task.memory_mb, task.storage_mb) == (2048, 512)


def test_one_bad_folder_refuses_all_unless_it_is_skipped(write_task: WriteTask) -> None:
    folder = write_task("good").parent
    write_task("other")
    write_task("bad", toml="[environment]\ngpus = 2\n")
    with pytest.raises(ValueError, match=r"bad.*GPUs.*env\.unplayable=skip"):
        build_environment(f"harbor:{folder}", {})
    spec = build_environment(f"harbor:{folder}", {"unplayable": "skip"})
    names = {name for split in ("train", "heldout") for name in spec.tasks(split).group_of}
    assert names == {"good", "other"}
    with pytest.raises(ValueError, match=r"env\.folder has no effect"):
        build_environment(f"harbor:{folder}", {"folder": "elsewhere"})


def test_the_reward_is_read_as_in_harbor() -> None:
    assert parse_reward(b" 0.5\n", b"garbage") == {"reward": 0.5}
    assert parse_reward(None, b'{"score": 1}') == {"score": 1.0, "reward": 1.0}
    assert parse_reward(None, b'{"a": 1, "reward": 0}') == {"a": 1.0, "reward": 0.0}


@pytest.mark.parametrize(
    ("text", "mapping"),
    [
        (b"", None),
        (b"1 2", None),
        (b"inf", None),
        (b"\xff", None),
        (None, b"{}"),
        (None, b'{"a": 1, "b": 2}'),
        (None, b'{"reward": "high"}'),
        (None, b'{"reward": true}'),
        (None, b"1"),
        (None, None),
    ],
)
def test_what_is_no_reward_is_an_error(text: bytes | None, mapping: bytes | None) -> None:
    with pytest.raises(InvalidReward):
        parse_reward(text, mapping)
