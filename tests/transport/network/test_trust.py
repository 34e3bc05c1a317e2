"""Sockets with keys: they serve their run as ever, and refuse everybody else by name, each at its
deadline at the latest."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from dataclasses import replace

import msgpack
import pytest
import zmq

from realhf.transport import envelope
from realhf.transport.errors import NetworkError, PeerLost, ProtocolError, RpcTimeout
from realhf.transport.network import LOOPBACK, Network, RunKeys
from realhf.transport.push_stream import StreamFailed, StreamProducer, StreamReceiver
from realhf.transport.rpc_master import RpcMaster
from realhf.transport.rpc_worker import RpcWorker
from realhf.transport.service import ServiceClient, ServiceServer
from realhf.transport.sockets import LoopDealer

KEYS, OTHERS = RunKeys.make(), RunKeys.make()
OURS = Network(keys=KEYS)
STRANGERS = {
    "another client key": replace(
        KEYS, client_public=OTHERS.client_public, client_secret=OTHERS.client_secret
    ),
    "another server key": replace(
        KEYS, server_public=OTHERS.server_public, server_secret=OTHERS.server_secret
    ),
    "other keys": OTHERS,
}
DEADLINE_S = 30.0


def worker_of(
    master: RpcMaster, network: Network, timeout_s: float = DEADLINE_S, name: str = "w"
) -> RpcWorker:
    echo = {"echo": lambda value: value}
    return RpcWorker(
        name,
        "model",
        0,
        "run",
        master.endpoint,
        ordered=echo,
        network=network,
        connect_timeout_s=timeout_s,
    )


async def test_a_worker_with_the_keys_of_the_run_is_called():
    master = RpcMaster("run", network=OURS)
    await master.start()
    worker = worker_of(master, OURS)
    running = asyncio.create_task(asyncio.to_thread(worker.run))
    await master.wait_for(["w"], DEADLINE_S)
    assert await master.call("w", "echo", [1, "a"], timeout_s=DEADLINE_S) == [1, "a"]
    await master.close()
    await running


@pytest.mark.slow
@pytest.mark.parametrize("stranger", STRANGERS)
async def test_a_worker_with_another_key_is_refused_by_name(stranger):
    master = RpcMaster("run", network=OURS)
    await master.start()
    worker = worker_of(master, Network(keys=STRANGERS[stranger]))
    with pytest.raises(NetworkError, match=f"worker 'w': the master at {master.endpoint} .*key"):
        await asyncio.to_thread(worker.run)
    assert master.roster == {}
    await master.close()


@pytest.mark.nightly
@pytest.mark.parametrize(("there", "here"), [(OURS, LOOPBACK), (LOOPBACK, OURS)])
async def test_keys_at_one_end_only_are_named_where_they_are_and_refused_where_they_are_not(
    there, here
):
    master = RpcMaster("run", network=there)
    await master.start()
    worker = worker_of(master, here, timeout_s=2.0)
    refused = f"{master.endpoint} (wants other keys|did not answer|broke off the handshake)"
    with pytest.raises((NetworkError, RpcTimeout), match=refused):
        await asyncio.to_thread(worker.run)
    assert master.roster == {}
    await master.close()


async def test_a_service_refuses_the_key_of_a_stranger():
    server = ServiceServer(
        "answers", "run", lambda request: request.reply(request.payload), network=OURS
    )
    client = ServiceClient(server.endpoint, "answers", "me", "run", OURS)
    stranger = ServiceClient(server.endpoint, "answers", "me", "run", Network(keys=OTHERS))
    try:
        assert await client.request("echo", "here", timeout_s=DEADLINE_S) == "here"
        with pytest.raises(PeerLost, match=r"answers at .* key"):
            await stranger.request("echo", "there", timeout_s=DEADLINE_S)
    finally:
        client.close()
        stranger.close()
        server.close()


async def test_the_stream_takes_samples_of_its_run_only():
    arrived = []
    receiver = StreamReceiver("run", arrived.extend, credits=4, network=OURS)
    ours = StreamProducer([receiver.endpoint], "w0", "run", network=OURS)
    stranger = StreamProducer([receiver.endpoint], "w1", "run", network=Network(keys=OTHERS))
    try:
        await ours.push("a", 0, [b"frame"], timeout_s=DEADLINE_S)
        with pytest.raises(StreamFailed, match=f"the stream receiver at {receiver.endpoint} .*key"):
            await stranger.push("b", 0, [b"frame"], timeout_s=DEADLINE_S)
        until = time.monotonic() + DEADLINE_S
        while not arrived and time.monotonic() < until:
            await asyncio.sleep(0.01)
        assert [message.id for message in arrived] == ["a"]
        receiver.ack(arrived)
        assert await ours.drain(DEADLINE_S)
    finally:
        ours.close()
        stranger.close()
        receiver.close()


async def test_other_versions_are_refused_with_both_names(monkeypatch):
    master = RpcMaster("run")
    await master.start()
    monkeypatch.setattr(
        "realhf.transport.rpc_worker.collect_versions",
        lambda: {"realhf": "9.9", "Python": "3.10", "protocol": "1"},
    )
    with pytest.raises(
        ProtocolError, match=r"versions differ: realhf 9.9 on .*, .* on .*; Python 3.10 on"
    ):
        await asyncio.to_thread(worker_of(master, LOOPBACK).run)
    await master.close()


@pytest.mark.slow
async def test_a_greeting_that_cannot_be_refused_keeps_nothing_else_from_being_read():
    """The refusal repeats the session, and would be larger than any header may be."""
    master = RpcMaster("run")
    await master.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(master.endpoint)
        for size in (envelope.MAX_HEADER_BYTES - 120, 16):
            stranger.send(
                of_protocol(99, envelope.pack_header("hello", "", bytes(size), versions={}))
            )
        time.sleep(0.3)  # both have come before the loop takes the first
        async with asyncio.timeout(DEADLINE_S):
            while not await asyncio.to_thread(stranger.poll, 100):
                pass
        answer = stranger.recv()
        stranger.setsockopt(zmq.LINGER, 0)
    assert envelope.unpack_header(answer)["kind"] == "refused"
    assert master.dropped_messages == 2
    await master.close()


@pytest.mark.slow
async def test_what_waits_behind_an_answer_over_which_its_reader_fails_is_read():
    read: list[int] = []

    def take(header, frames):
        read.append(header["number"])
        if len(read) == 1:
            raise KeyError("the reader's own mistake")

    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        told = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, about: told.append(about["exception"])
        )
        dealer = LoopDealer(f"tcp://127.0.0.1:{port}", LOOPBACK, take, told.append)
        dealer.send(b"hello")
        who, _ = await asyncio.to_thread(listener.recv_multipart)
        for number in (1, 2):
            listener.send_multipart(
                [who, envelope.pack_header("answer", "run", b"", number=number)]
            )
        time.sleep(0.3)  # both have come before the loop takes the first
        async with asyncio.timeout(DEADLINE_S):
            while len(read) < 2:
                await asyncio.sleep(0.01)
        dealer.close()
    assert read == [1, 2] and [type(error) for error in told] == [KeyError]


async def test_another_protocol_is_refused_at_once(monkeypatch):
    """A worker of another version reads at least that the master has another one."""
    master = RpcMaster("run")
    await master.start()
    worker = worker_of(master, LOOPBACK)
    pack = envelope.pack_header
    monkeypatch.setattr(
        "realhf.transport.rpc_worker.pack_header", lambda *a, **k: of_protocol(99, pack(*a, **k))
    )
    with pytest.raises(
        ProtocolError, match=r"refused worker 'w': versions differ: protocol 99 on .*, 3 on"
    ):
        await asyncio.to_thread(worker.run)
    assert master.dropped_messages == 1
    await master.close()


def of_protocol(version: int, header: bytes) -> bytes:
    fields = msgpack.unpackb(header)
    return msgpack.packb(
        {**fields, "v": version, "versions": {**fields["versions"], "protocol": str(version)}}
    )


def test_keys_are_in_no_text_of_theirs(tmp_path):
    path = tmp_path / "keys"
    KEYS.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert RunKeys.read(path) == KEYS
    shown = repr(KEYS) + repr(OURS) + str(OURS)
    secrets = (
        KEYS.server_secret,
        KEYS.client_secret,
        KEYS.server_public,
        KEYS.client_public,
        KEYS.token,
    )
    assert not [secret for secret in secrets if secret in shown]
    with pytest.raises(FileExistsError):
        KEYS.write(path)


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        ("{}", 0o600, "is not a file of keys"),
        ("no json", 0o600, "is not a file of keys"),
        ("\xff", 0o600, "is not a file of keys"),
        ("[" * 9000, 0o600, "is not a file of keys"),
        (" " * 20000, 0o600, "has more than 16384 bytes"),
        ('{"server_public": 3}', 0o600, "is not a file of keys"),
        ("{}", 0o640, "others may read"),
    ],
    ids=["empty", "no json", "no text", "deep", "large", "a number", "readable"],
)
def test_a_file_that_holds_no_keys_is_named(tmp_path, text, mode, reason):
    path = tmp_path / "keys"
    path.write_text(text, encoding="latin-1")
    path.chmod(mode)
    with pytest.raises(NetworkError, match=f"{path}.*{reason}|{reason} {path}"):
        RunKeys.read(path)
    with pytest.raises(NetworkError, match="cannot read"):
        RunKeys.read(tmp_path / "none")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"server_public": "\\" * 40}, "a key server_public that is not Z85"),
        ({"client_secret": "~" * 40}, "a key client_secret that is not Z85"),
        (
            {"server_secret": KEYS.server_secret[1:]},
            "a key server_secret of another length than 40",
        ),
        (
            {"client_public": OTHERS.client_public},
            "keys client_public and client_secret that do not belong together",
        ),
        (
            {"token": "a b\r\nHost: elsewhere ok"},
            "a token with other characters than letters, digits, - and _",
        ),
        ({"certificate": "none"}, "a certificate that is no PEM"),
        ({"certificate_key": KEYS.certificate}, "a certificate_key that is no PEM"),
    ],
)
def test_keys_that_cannot_be_keys_are_refused_where_they_are_read(tmp_path, changed, reason):
    """Forty characters of any kind were keys, and a socket failed with them later, without the name
    of the file. What a value is wrong with is told, the value is not."""
    path = tmp_path / "keys"
    replace(KEYS, **changed).write(path)
    with pytest.raises(NetworkError, match=f"keys of the run: {path} holds {reason}; ") as refused:
        RunKeys.read(path)
    assert not [value for value in changed.values() if value in str(refused.value)]


def test_keys_that_cannot_be_written_leave_no_half_file(tmp_path):
    """It would be refused by every later launcher. The limit fails a write in its middle, as a full
    disk does."""
    path = tmp_path / "keys"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            KEYS.write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to a pipe"])
def test_keys_come_from_an_ordinary_file_and_a_pipe_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "keys"
    if kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path if kind == "pipe" else tmp_path / "pipe", 0o600)
        if kind != "pipe":
            path.symlink_to(tmp_path / "pipe")
    with pytest.raises(NetworkError, match=f"{path} is not an ordinary file"):
        RunKeys.read(path)


def test_keys_of_another_user_are_refused_though_the_mode_is_right(tmp_path, monkeypatch):
    """Root may read every file; whoever owns it has the keys, too."""
    path = tmp_path / "keys"
    KEYS.write(path)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(
        NetworkError, match=f"{path} belongs to user {own}, and this process runs as user {own + 1}"
    ):
        RunKeys.read(path)
