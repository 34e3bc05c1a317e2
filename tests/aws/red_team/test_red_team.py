"""Attacks, really attempted: the table of ``red_team_attacks`` row by row, then what needs a closer
look.

Each attack goes through the agent's door and, where that refuses it, once more past the policy at
the worker itself; every test looks for the effect, not for the message alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.aws.cli.command_text import read_command
from realhf.aws.episode.episode import Episode
from realhf.aws.simulator.pool import MiniStackPool, Slot
from realhf.aws.tasks.loader import instantiate
from tests.aws.red_team.attacks import ATTACKS, HARMLESS, NO_CREDIT, ROWS
from tests.aws.red_team.firing_range import FiringRange
from tests.aws.red_team.inside import INSIDE_ROWS, play_inside
from tests.aws.red_team.web import WEB_ATTACKS, WebRange

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module")
def firing_range(
    pool: MiniStackPool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FiringRange]:
    target = FiringRange(pool, tmp_path_factory.mktemp("host"))
    yield target
    target.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.nightly, id="all"), pytest.param(4, id="sample")]
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row}-{ROWS[row].replace(' ', '-')}")
def test_spellings_of_a_row(firing_range: FiringRange, row: int, every: int) -> None:
    attacks = [attack for attack in ATTACKS if attack.row == row][::every]
    assert attacks
    for attack in attacks:
        tried = firing_range.attempt(attack)
        assert tried.held, tried


@pytest.mark.nightly
def test_what_is_left_to_an_agent_that_has_won_somewhere(pool: MiniStackPool) -> None:
    """Its worker, the interpreter's guards, or a real account to play on."""
    tried = list(play_inside(pool))
    assert {one.row for one in tried} == set(INSIDE_ROWS)
    assert not [one for one in tried if not one.held]


def test_what_web_pages_send(pool: MiniStackPool) -> None:
    """To the environment server and to the port of a simulator: nothing is leased, played or
    changed."""
    target = WebRange(pool)
    try:
        for attack in WEB_ATTACKS:
            tried = target.attempt(attack)
            assert tried.held, tried
    finally:
        target.close()


def test_the_range_sees_effects(firing_range: FiringRange) -> None:
    """Everything that must not happen is noticed when it does."""
    firing_range.marker.write_text("x")
    socket.create_connection(("127.0.0.1", int(firing_range.url.rpartition(":")[2]))).close()
    firing_range.sibling.state.call("s3", "CreateBucket", {"Bucket": "second"})
    firing_range.slot.reset()
    found = firing_range._effects(
        [f"canary-content-7f3a from {os.path.realpath(os.__file__)} site-packages"]
    )
    assert len(found) == 6, found
    firing_range.marker.unlink()
    firing_range._listener.accept()[0].close()
    firing_range.sibling.state.call("s3", "DeleteBucket", {"Bucket": "second"})


def test_a_refused_step_earns_nothing_and_the_episode_goes_on(pool: MiniStackPool) -> None:
    slot = pool.acquire()
    try:
        episode = Episode(slot, max_steps=100)
        episode.reset(instantiate(1, 1), seed=1)
        refused = {
            attack.row: attack for attack in ATTACKS if attack.expected not in (HARMLESS, NO_CREDIT)
        }
        for number, attack in enumerate(refused.values(), 1):
            command = attack.command.replace("{url}", "http://127.0.0.1:1").replace(
                "{secret}", "/etc/passwd"
            )
            step = episode.step(read_command(command))
            assert (
                step.observation["refusal"] == attack.expected
                and not step.observation["command_success"]
            )
            assert attack.expected in step.observation["error"]
            assert step.reward <= 0 and not step.done and step.observation["step_count"] == number
    finally:
        pool.release(slot)


def test_symbolic_link_in_the_virtual_folder(slot: Slot, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("canary-content")
    (slot.files.path / "link").symlink_to(secret)
    result = slot.executor.run(
        "aws ssm put-parameter --name leak --type String --value file://link"
    )
    assert result.refusal == "local-file" and not result.requests
    assert "/root" not in result.stderr and "Traceback" not in result.stderr


def test_environment_of_the_children_is_ours_alone(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REALHF_CANARY", "secret")
    slot.respawn()
    for pid in (slot.ministack.pid, slot.worker_pid):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"REALHF_CANARY" not in environment and b"TOKEN" not in environment


def test_simulator_listens_on_loopback_only(slot: Slot) -> None:
    inodes = {
        os.readlink(path)
        for path in Path(f"/proc/{slot.ministack.pid}/fd").iterdir()
        if path.is_symlink()
    }
    lines = (
        Path("/proc/net/tcp").read_text().splitlines()[1:]
        + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    )
    addresses = {
        line.split()[1]
        for line in lines
        if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes
    }
    assert addresses == {f"0100007F:{slot.port:04X}"}
