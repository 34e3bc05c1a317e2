"""What the server is told, and refuses; and what it keeps on the disk. None of it needs the
client."""

from __future__ import annotations

import asyncio
import resource

import pytest

import realhf
from realhf.tinker import __main__ as command
from realhf.tinker.options import ServerOptions, command_line, read_options
from realhf.tinker.store import FAILED, FINISHED, WAITING, TrainingStore
from realhf.web.connections import HandshakeLoop
from realhf.web.settings import SettingError
from tests.certificates import self_signed

KEY = "tml-twenty-letters-or-more"


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--host", "0.0.0.0"], "not a loopback address; it needs --token-file"),
        (["--tls-cert", "cert.pem"], "--tls-cert is given without --tls-key"),
        (["--dtype", "int8"], "--dtype is 'int8'; allowed: float32, bfloat16"),
        (["--allowed-hosts", "a.example"], "--allowed-hosts has no effect on the loopback"),
        (["--max-rank", "0"], "--max-rank is 0; allowed: at least 1"),
        (["--state-every-s", "-1"], "--state-every-s is -1.0; allowed: at least 0"),
        (["--kv-cache-gib", "0"], "--kv-cache-gib is 0.0; allowed: at least 0.001"),
        (["--max-saved-gib", "nan"], "--max-saved-gib is 'nan'; give a number"),
        (["--full-weights", "--dtype", "bfloat16"], "--full-weights trains in float32"),
        (["--full-weights", "--max-rank", "4"], "--max-rank has no effect with --full-weights"),
    ],
)
def test_a_wrong_option_is_named(model, given, said):
    with pytest.raises(SettingError, match=said):
        read_options(["--model", model, *given])


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SettingError, match=r"there is no config\.json"):
        read_options(["--model", str(tmp_path)])
    with pytest.raises(SettingError, match=r"there is no such folder; run `make model`"):
        read_options(["--model", str(tmp_path / "none")])


def test_the_version_needs_no_model(capsys):
    with pytest.raises(SystemExit) as ended:
        read_options(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"train-api {realhf.__version__}\n"


def test_keys_come_from_a_file_that_nobody_else_reads(model, tmp_path):
    file = tmp_path / "keys"
    options = ServerOptions(model=model, host="0.0.0.0", token_file=str(file))
    with pytest.raises(SettingError, match="No such file"):
        options.api_keys()
    file.write_text(f"# mine\n{KEY}\n\n")
    file.chmod(0o644)
    with pytest.raises(SettingError, match="others may read it"):
        options.api_keys()
    file.chmod(0o600)
    assert options.api_keys() == {KEY} and ServerOptions(model=model).api_keys() == frozenset()
    file.write_text("tml-short\n")
    with pytest.raises(SettingError, match="20 letters"):
        options.api_keys()


@pytest.mark.parametrize("tls", [True, False])
def test_a_server_has_all_descriptors_and_ends_silent_handshakes(model, monkeypatch, tmp_path, tls):
    """The loop that does was named to uvicorn only, which does not start one here: who shook no
    hands held a connection for a minute."""

    async def serve(options):
        loops.append(isinstance(asyncio.get_running_loop(), HandshakeLoop))
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    loops: list[bool] = []
    monkeypatch.setattr(command, "serve", serve)
    monkeypatch.setattr(command, "require_modules", lambda *names: None)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
    try:
        cert, key = self_signed(tmp_path)
        given = ["--model", model, *(["--tls-cert", cert, "--tls-key", key] if tls else [])]
        assert command.main(given) == before[1] and loops == [tls]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_every_option_has_a_line_of_help():
    assert all(action.help for action in command_line()._actions)


def test_what_is_owed_is_found_again_and_bodies_go_when_a_state_holds_them(tmp_path):
    """A killed server leaves the file as it is; only one may have it open."""
    store = TrainingStore(tmp_path)
    with pytest.raises(ValueError, match="another server uses this folder"):
        TrainingStore(tmp_path)
    store.add_model("m", "me", "s", {"rank": 4})
    for seq in range(4):
        store.add_request(f"m:{seq}", "me", "forward_backward", "m", seq, b"body")
    store.finish("m:0", result=b"answer", info={"version": 1})
    store.finish("m:1", error="no", is_client_error=True, info={})
    store.finish("m:0", error="late", info={})
    store.close()
    store = TrainingStore(tmp_path)
    assert [(each.seq, each.body) for each in store.pending()] == [(2, b"body"), (3, b"body")]
    first = store.request("m:0")
    second = store.request("m:1")
    assert (first.state, first.result, first.info) == (FINISHED, b"answer", {"version": 1})
    assert (second.state, second.error, second.is_client_error) == (FAILED, "no", True)
    assert store.request("m:2").state == WAITING and store.request("m:9") is None
    store.update_model("m", state_seq=1)
    store.drop_bodies("m", 1)
    assert [each.seq for each in store.history("m", store.model("m").state_seq)] == [2, 3]
    assert [each.body for each in store.history("m", -1)] == [b"", b"", b"body", b"body"]
    store.add_request("m:4", "me", "forward", "m", 4, b"only looked at")
    store.finish("m:2", info={})
    store.finish("m:4", info={})
    assert [each.body for each in store.history("m", 1)] == [b"body", b"body", b""]
    store.mark_fetched("m:0")
    assert store.drop_results(fetched_before=0.0, finished_before=0.0) == 0
    assert store.drop_results(fetched_before=1e12, finished_before=0.0) == 1
    assert store.request("m:0").info["gone"] == 1 and store.request("m:0").result == b""
    assert (
        store.next_seq("m") == 5 and store.get_or_set("a", "1") == store.get_or_set("a", "2") == "1"
    )
    with pytest.raises(RuntimeError), store.transaction():
        store.add_request("m:7", "me", "sample", "m", 7, b"")
        raise RuntimeError
    assert store.request("m:7") is None
    store.close()
