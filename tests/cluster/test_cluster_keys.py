"""Each host has a key of its own: with it nobody is the launcher, another host or an operator, and
it can be taken away."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from realhf.cluster.__main__ import main
from realhf.cluster.cluster_keys import (
    HostKey,
    HostKeys,
    KnownHosts,
    LauncherKeys,
    add_hosts,
    make_keys,
)
from realhf.cluster.control_endpoint import ControlEndpoint, HostJoined, HostLost, OperatorRequest
from realhf.cluster.messages import HelloRefusal, NoContent, OperatorReport
from realhf.transport.errors import NetworkError
from realhf.transport.network import RunKeys, connect_encrypted
from realhf.transport.sockets import HandshakeWatch
from realhf.worker.__main__ import main as agent_main
from tests.cluster.key_ring import KeyRing
from tests.cluster.strange_agent import ANSWER_S, OpenEndpoint

AT = "tcp://127.0.0.1:0"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenEndpoint]:
    with OpenEndpoint(tmp_path) as made:
        yield made


def refused(door: ControlEndpoint, key: HostKey) -> str:
    """What the endpoint says to who connects with a key; "" when it lets them in."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    watch = HandshakeWatch(socket)
    end = time.monotonic() + ANSWER_S
    try:
        connect_encrypted(socket, door.endpoint, key.server_public, key.own)
        while not (watch.handshakes or watch.refusal):
            assert time.monotonic() < end
            watch.monitor.poll(100)
            watch.process_events()
        return watch.refusal
    finally:
        watch.close()
        socket.close(0)


def test_a_host_has_no_secret_of_the_launcher_and_none_of_another_host(tmp_path: Path):
    """All hosts used to have one file, with the secret key of the launcher's endpoint."""
    ring = KeyRing(tmp_path / "cluster.key")
    mine = ring.file_of("a").read_text()
    other = ring.of("b").own
    launcher = LauncherKeys.read(ring.file)
    assert launcher.server.public in mine
    for secret in (launcher.server.secret, launcher.operator.secret, other.secret):
        assert secret not in mine
    assert other.secret not in ring.file.read_text(), "the launcher needs no secret of a host"
    assert (ring.file.stat().st_mode & 0o777, ring.file_of("a").stat().st_mode & 0o777) == (
        0o600,
        0o600,
    )
    shown = f"{launcher!r} {ring.of('a')!r} {ring.keys_of('a')!r}"
    assert launcher.server.secret not in shown and ring.of("a").own.secret not in shown


@pytest.mark.nightly
def test_with_the_key_of_a_host_nobody_is_another_host_or_an_operator(opened: OpenEndpoint):
    pretender = opened.agent("b", opened.ring.of("a"))
    pretender.hello()
    assert pretender.hears(HelloRefusal).reason.startswith(
        "its key is that of a, and not of a host 'b'"
    )
    for kind in ("status", "remove"):
        pretender.say(kind, NoContent())
    said = pretender.hears(OperatorReport)
    assert said.failed and "the key of host a is not an operator's" in said.lines[0]
    victim = opened.agent("b").join()
    pretender.session = victim.session
    pretender.say("leave")
    pretender.hello()
    pretender.hears(HelloRefusal)
    assert not [
        event for event in opened.control.events() if isinstance(event, HostLost | OperatorRequest)
    ]


@pytest.mark.nightly
def test_a_key_that_was_taken_away_is_worth_nothing_also_on_a_connection_that_is_there(
    opened: OpenEndpoint,
):
    """And after a new one was drawn for the same name, the old one is not."""
    old = opened.ring.of("a")
    there = opened.agent("a", old).join()
    opened.known.begin_removal("a")
    assert refused(opened.control, old) == "refused the key of this process", "before it has left"
    opened.control.dismiss("a")
    assert "a" not in LauncherKeys.read(opened.ring.file).hosts
    opened.control.events()
    there.say("ping")
    there.hello()
    assert refused(opened.control, old) == "refused the key of this process"
    fresh = add_hosts(opened.ring.file, ["a"]).key_of("a")
    assert not refused(opened.control, fresh)
    opened.agent("a", fresh).join()
    there.hello()
    assert refused(opened.control, old), "the old one, also beside a new one of the same name"
    assert [type(event) for event in opened.control.events()] == [HostJoined]


@pytest.mark.nightly
def test_a_host_that_gets_its_key_while_the_launcher_waits_may_join(opened: OpenEndpoint):
    agent = opened.agent("late", add_hosts(opened.ring.file, ["late"]).key_of("late"))
    assert agent.join()


def test_hosts_of_an_engine_have_keys_in_memory_and_one_that_was_removed_gets_no_other(
    tmp_path: Path,
):
    known = KnownHosts(None)
    drawn = known.generate(["player-0", "player-1"])
    assert {*drawn.hosts} == {"player-0", "player-1"}
    assert known.name_of(drawn.hosts["player-0"].public) == "player-0"
    known.revoke("player-0")
    assert not known.accepts(drawn.hosts["player-0"].public)
    again = known.generate(["player-0", "player-1"])
    assert [*again.hosts] == ["player-1"], "not when the run begins again either"
    assert not known.accepts(drawn.hosts["player-1"].public), (
        "and what the other had before is not taken any more"
    )
    assert not [*tmp_path.iterdir()]


def test_a_host_that_is_about_to_leave_gets_no_other_key_when_its_engine_starts_again(
    tmp_path: Path,
):
    """A run may begin again before a host that was removed has said how its workers ended."""
    known = KnownHosts(KeyRing(tmp_path / "cluster.key").file)
    assert set(known.generate(["node-0", "node-1"]).hosts) == {"node-0", "node-1"}
    known.begin_removal("node-1")
    assert set(known.generate(["node-0", "node-1"]).hosts) == {"node-0"}


@pytest.mark.slow
def test_a_key_that_is_taken_away_while_the_file_is_read_anew_stays_away():
    """The endpoint reads it on threads of its own."""
    known = KnownHosts(None)
    key = known.generate(["a"]).hosts["a"].public
    taking = threading.Thread(target=known.revoke, args=("a",))

    class Meanwhile(set[str]):
        """Is looked into, and has something new a moment later."""

        def __contains__(self, one: object) -> bool:
            found = super().__contains__(one)
            if one == key and taking.ident is None:
                taking.start()
                taking.join(0.2)  # as long as the names are put together, it waits
            return found

    known._revoked = Meanwhile()
    known.generate(["b"])
    taking.join(20)
    assert not known.name_of(key)


def test_a_file_that_is_for_somebody_else_is_named_with_what_to_do(tmp_path: Path):
    make_keys(tmp_path / "cluster.key")
    (tmp_path / "a.key").write_text(add_hosts(tmp_path / "cluster.key", ["a"]).text())
    RunKeys.make().write(tmp_path / "old.key")
    (tmp_path / "a.key").chmod(0o600)
    for read, file, said in (
        (
            HostKeys.read,
            "cluster.key",
            "has the keys of the launcher; a host has one of its own: python -m",
        ),
        (
            LauncherKeys.read,
            "a.key",
            "has the keys of hosts; the launcher and its operators need the file",
        ),
        (
            LauncherKeys.read,
            "old.key",
            "has one key for all hosts, as before; move it away and make new ones",
        ),
        (HostKeys.read, "old.key", "has one key for all hosts, as before"),
    ):
        with pytest.raises(NetworkError, match=f"keys of the cluster: .*{file} {said}"):
            read(tmp_path / file)
    with pytest.raises(NetworkError, match="there is no key of host 'b', only of a"):
        HostKeys.read(tmp_path / "a.key").key_of("b")


def test_why_a_file_of_keys_cannot_be_read_is_said(tmp_path: Path):
    """It was called no file of keys where it was missing, or open to others."""
    path = tmp_path / "key"
    make_keys(path)
    path.chmod(0o644)
    for file, said in ((path, "chmod 600"), (tmp_path / "none", "No such file")):
        with pytest.raises(NetworkError, match=f"{file}.*{said}"):
            LauncherKeys.read(file)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"server_public": 3, "hosts": {}}', '{"server_public": "", "hosts": 3}'],
)
def test_what_is_no_file_of_keys_is_named(tmp_path: Path, text: str):
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    for read in (HostKeys.read, LauncherKeys.read):
        with pytest.raises(NetworkError, match=f"{path}"):
            read(path)


def test_the_command_makes_a_file_for_each_host_or_one_for_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "cluster.key"
    assert main(["keys", str(file), "--host", "a", "b"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"{file}: keys of a cluster; they stay on this machine",
        f"{tmp_path}/cluster-a.key: the key of host a; copy it there, mode 600",
        f"{tmp_path}/cluster-b.key: the key of host b; copy it there, mode 600",
    ]
    before = HostKeys.read(tmp_path / "cluster-a.key").key_of("a").own.public
    assert main(["keys", str(file), "--host", "a", "c", "--into", str(tmp_path / "both.key")]) == 0
    hosts = LauncherKeys.read(file).hosts
    assert {*hosts} == {"a", "b", "c"} and hosts["a"] != before, (
        "the key that it had is worth nothing any more"
    )
    assert {*HostKeys.read(tmp_path / "both.key").hosts} == {"a", "c"}
    assert main(["keys", str(file)]) == 1 and "is there already" in capsys.readouterr().err, (
        "it said nothing"
    )
    assert main(["keys", str(file), "--host", "launcher"]) == 1
    assert main(["keys", str(file), "--host", "d", "--into", str(tmp_path / "both.key")]) == 1
    assert "d" not in LauncherKeys.read(file).hosts
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("join", "name", "says"),
    [
        ("tcp://127.0.0.1:1", "nothing.key", "cannot read"),
        ("tcp://127.0.0.1:1", "wrong.key", "wrong.key"),
        ("127.0.0.1", "nothing.key", "tcp://HOST:PORT"),
    ],
)
def test_an_agent_without_its_key_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], join: str, name: str, says: str
) -> None:
    """A key file that was missing was a traceback."""
    (tmp_path / "wrong.key").write_text("no keys")
    (tmp_path / "wrong.key").chmod(0o600)
    assert agent_main(["--join", join, "--key-file", str(tmp_path / name), "--host-agent"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line and "--key-file" in line
