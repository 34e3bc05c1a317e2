"""Tokens, resets, strict mode, metrics and the status page: docs/reference/trajectory.md 3.11,
3.12."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from realhf.trajectory.http.auth import OPEN_PATHS, needed_roles
from realhf.trajectory.http.cli import command_line, main
from realhf.trajectory.http.config import TrajectoryConfig
from realhf.trajectory.http.server import create_app
from realhf.trajectory.records import STRICT_ROWS
from realhf.web.settings import SettingError
from tests.trajectory.conftest import REGISTRATION, register_env, running_server, start
from tests.trajectory.groups import group


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.slow
def test_tokens_and_their_roles():
    tokens = {"producer_token": "p", "trainer_token": "t", "admin_token": "a"}
    with running_server(**tokens) as url, httpx.Client(base_url=url) as api:
        assert api.get("/").status_code == api.get("/healthz").status_code == 200
        for headers in ({}, bearer("x"), {"Authorization": "Basic p"}, {"Authorization": "Bearer"}):
            answer = api.get("/status", headers=headers)
            assert answer.status_code == 401
            assert "www-authenticate" in answer.headers
        allowed = [
            ("GET", "/status", None, "pta"), ("GET", "/batch", None, "ta"), ("POST", "/scored_data", group(), "pa"),
            ("POST", "/status-env", {"env_id": 0}, "pa"), ("DELETE", "/quarantine", None, "a"),
            ("GET", "/quarantine", None, "pta"), ("GET", "/metrics", None, "pta"),
            ("POST", "/policy_version", {"version": 1}, "ta"), ("POST", "/register", REGISTRATION, "ta"),
        ]  # fmt: skip
        for method, path, body, roles in allowed:
            for token in "pta":
                join = {"X-Join": "1"} if path == "/register" else {}
                status = api.request(
                    method, path, json=body, headers=bearer(token) | join
                ).status_code
                assert (status != 403) == (token in roles), (method, path, token)


@pytest.mark.slow
def test_one_token_for_both_and_guarded_resets():
    with running_server(token="s", admin_token="a") as url, httpx.Client(base_url=url) as api:
        assert api.post("/register", json=REGISTRATION, headers=bearer("s")).status_code == 200
        assert api.post("/scored_data", json=group(), headers=bearer("s")).status_code == 200
        assert api.get("/reset_data", headers=bearer("s")).status_code == 403
        again = api.post("/register", json=REGISTRATION, headers=bearer("s") | {"X-Reset": "1"})
        assert again.status_code == 403, "it would reset"
        other = api.post(
            "/register", json=REGISTRATION | {"wandb_group": "other"}, headers=bearer("s")
        )
        assert other.status_code == 403, "another run"
        assert api.post("/register", json=REGISTRATION, headers=bearer("s")).status_code == 200, (
            "the same run"
        )
        assert (
            api.post(
                "/register", json=REGISTRATION, headers=bearer("s") | {"X-Join": "1"}
            ).status_code
            == 200
        )
        assert api.get("/status", headers=bearer("s")).json()["queue_size"] == 1
        assert api.get("/reset_data", headers=bearer("a")).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "status"), [("open", 200), ("off", 403), ("token", 403)])
def test_reset_policies_without_tokens(policy, status):
    with (
        running_server(reset_policy=policy, token="s") as url,
        httpx.Client(base_url=url, headers=bearer("s")) as api,
    ):
        assert api.get("/reset_data").status_code == status


def test_other_than_loopback_needs_a_token_or_insecure():
    with pytest.raises(SettingError, match="--insecure"):
        TrajectoryConfig(host="0.0.0.0")
    assert (
        TrajectoryConfig(host="0.0.0.0", token="x").host
        == TrajectoryConfig(host="0.0.0.0", insecure=True).host
    )
    for host in ("127.0.0.1", "::1", "localhost"):
        TrajectoryConfig(host=host)


@pytest.mark.parametrize(("name", "value"), [
    ("port", 70000), ("gzip_level", 9), ("delivery", "x"), ("reset_policy", "x"), ("lease_timeout_s", 0.0),
    ("max_body_bytes", 3), ("max_bodies_bytes", 5000),
])  # fmt: skip
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(SettingError, match=name.replace("_", "[-_]")):
        TrajectoryConfig(**{name: value})


@pytest.mark.slow
def test_tokens_come_from_files(tmp_path):
    """A flag is seen by everybody who lists processes."""
    for name in ("producer", "admin"):
        (tmp_path / name).write_text(f"{name}-secret\n")
    files = {f"{name}_token_file": str(tmp_path / name) for name in ("producer", "admin")}
    environment = TrajectoryConfig(**files).to_environment()
    assert "secret" not in str(environment)
    assert TrajectoryConfig.resolve(None, environment).has_tokens
    assert TrajectoryConfig(host="0.0.0.0", **files).has_tokens, "as good as a flag"
    with running_server(**files) as url, httpx.Client(base_url=url) as api:
        assert (
            api.post("/scored_data", json=group(), headers=bearer("producer-secret")).status_code
            == 200
        )
        assert api.get("/reset_data", headers=bearer("producer-secret")).status_code == 403
        assert api.get("/reset_data", headers=bearer("admin-secret")).status_code == 200
        assert api.get("/status").status_code == 401


def test_token_files_that_hold_no_token(tmp_path):
    for name, text in (("empty", " \n"), ("two", "a\nb\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(SettingError, match="one line"):
            TrajectoryConfig(token_file=str(tmp_path / name))
    with pytest.raises(SettingError, match=r"--token-file .*No such file"):
        TrajectoryConfig(token_file=str(tmp_path / "missing"))
    (tmp_path / "good").write_text("a")
    with pytest.raises(SettingError, match="--token and --token-file"):
        TrajectoryConfig(token="b", token_file=str(tmp_path / "good"))


def test_flags_win_over_variables_and_unknown_ones_are_refused():
    environment = {
        "REALHF_TRAJ_PORT": "9",
        "REALHF_TRAJ_STRICT": "1",
        "REALHF_TRAJ_HEARTBEAT_TIMEOUT_S": "7",
    }
    config = TrajectoryConfig.resolve(command_line().parse_args(["--port", "11"]), environment)
    assert (config.port, config.heartbeat_timeout_s, config.reregister) == (11, 7.0, "ignore")
    assert config.is_strict(*STRICT_ROWS)
    assert TrajectoryConfig.resolve(None, config.to_environment()) == config
    for name, value, said in (
        ("REALHF_TRAJ_NONSENSE", "1", "REALHF_TRAJ_NONSENSE"),
        ("REALHF_TRAJ_PORT", "x", "REALHF_TRAJ_PORT"),
        ("REALHF_TRAJ_STRICT", "maybe", "no row 'maybe'"),
    ):
        with pytest.raises(SettingError, match=said):
            TrajectoryConfig.resolve(None, {name: value})


@pytest.mark.parametrize(("flags", "rows", "reregister", "heartbeat_timeout_s"), [
    ([], "", "continue", 300.0), (["--strict"], ",".join(STRICT_ROWS), "ignore", math.inf),
    (["--strict", "--reregister", "reset", "--heartbeat-timeout-s", "300"], ",".join(STRICT_ROWS), "reset", 300.0),
    (["--strict=weighted-fill, "
      "divisor_packing"], "divisor_packing,weighted_fill", "continue", 300.0),
    (["--strict=heartbeat_timeout_s"], "heartbeat_timeout_s", "continue", math.inf),
    (["--strict=none"], "", "continue", 300.0),
])  # fmt: skip
def test_the_strict_switch_takes_names_of_rows(flags, rows, reregister, heartbeat_timeout_s):
    config = TrajectoryConfig.resolve(command_line().parse_args(flags), {"REALHF_TRAJ_STRICT": "0"})
    assert (config.strict, config.reregister, config.heartbeat_timeout_s) == (
        rows,
        reregister,
        heartbeat_timeout_s,
    )
    assert all(config.is_strict(row) == (row in rows.split(",")) for row in STRICT_ROWS)
    assert TrajectoryConfig.resolve(None, config.to_environment()) == config


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    """In a line, without a traceback."""
    (tmp_path / "file").touch()
    for flags, said in (
        (["--host", "0.0.0.0"], "(--host) is '0.0.0.0', not a loopback address; it needs --token"),
        (["--store", "/etc/passwd"], "run-api: --store is '/etc/passwd'; give sqlite:DIR"),
        (
            ["--store", f"sqlite:{tmp_path / 'file'}", "--port", "0"],
            "the store does not open: --store sqlite:",
        ),
        (["--store", "redis://[::"], "run-api: --store: no address of a Redis: Invalid IPv6 URL"),
        (
            ["--store", "redis://x?y=1"],
            "run-api: --store: no address of a Redis: unknown option 'y'; known is prefix",
        ),
        (
            ["--store", "redis://127.0.0.1:1", "--port", "0"],
            "the store does not open: --store redis://127.0.0.1:1",
        ),
    ):
        assert main(flags) == 2
        told = capsys.readouterr().err
        assert said in told
        assert "Traceback" not in told
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "--store" in text
    assert "REALHF_TRAJ_STRICT" in text


def test_the_queue_is_kept_where_programs_of_a_user_keep_theirs(tmp_path, monkeypatch):
    """Not in whatever folder the server was started in."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert TrajectoryConfig().store == f"sqlite:{tmp_path}/realhf/trajectory"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert TrajectoryConfig().store == f"sqlite:{Path.home()}/.local/state/realhf/trajectory"
    assert TrajectoryConfig.resolve(None, {"REALHF_TRAJ_STORE": "memory"}).store == "memory"


def test_every_route_says_who_may_use_it():
    """Also behind a proxy that puts something before the path; what has no route is nobody's."""
    app = create_app(TrajectoryConfig(store="memory", producer_token="p", admin_token="a"))
    paths = [path for path in app.openapi()["paths"] if path not in OPEN_PATHS]
    assert len(paths) > 20
    assert [path for path in paths if needed_roles("GET", path) is None] == []
    assert needed_roles("GET", "/batch/more") is None
    calls = [
        ("POST", "/register"),
        ("GET", "/batch"),
        ("DELETE", "/quarantine"),
        ("POST", "/quarantine/requeue"),
    ]

    async def asked(root_path: str) -> list[int]:
        transport = httpx.ASGITransport(app, root_path=root_path)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://x", headers=bearer("p")
        ) as client:
            statuses = [
                (await client.request(method, root_path + path)).status_code
                for method, path in calls
            ]
            unknown = [
                (await client.get(root_path + path)).status_code
                for path in ("/nothing", "/batch/more")
            ]
            slash = await client.get(root_path + "/status/")
            return [*statuses, *unknown, slash.status_code]

    for root_path in ("", "/traj"):
        assert asyncio.run(asked(root_path)) == [403, 403, 403, 403, 404, 404, 307], root_path


@pytest.mark.slow
def test_strict_mode_over_http():
    with running_server(strict="all") as url, httpx.Client(base_url=url) as api:
        api.post("/scored_data", json=group(4))
        assert api.get("/status").json() == {"current_step": 0, "queue_size": 0}, (
            "as the original, before a trainer"
        )
        start_uuid = api.post("/register", json=REGISTRATION).json()["uuid"]
        assert (
            api.post("/register", json=REGISTRATION | {"batch_size": 99}).json()["uuid"]
            != start_uuid
        )
        assert api.get("/info").json()["batch_size"] == 8, "the first registration wins"
        api.get("/batch")
        env = register_env(api, 2, weight=5.0)
        api.post("/scored_data", json=group(4))
        assert api.get("/batch").json()["batch"], (
            "what came before the registration is served, strict or not"
        )
        assert api.post("/scored_data", json=group(4, env_id=env)).json() == {
            "status": "buffered",
            "buffer_size": 4,
        }
        body = api.post("/scored_data", json=group(1) | {"tokens": [[2**70]]})
        assert body.status_code == 200, "any integer"
        assert api.post("/scored_data", json=group(4), headers={"X-Epoch": "77"}).status_code == 200
        assert (
            api.post(
                "/scored_data", content='{"tokens":[[1]],"masks":[[1]],"scores":[NaN]}'
            ).status_code
            == 422
        )


def test_metrics_parse_and_reconcile(api):
    def read() -> dict[str, float]:
        families = text_string_to_metric_families(api.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return {
            sample.name + str(sorted(sample.labels.items())): sample.value for sample in samples
        }

    before = read()
    start(api)
    env = register_env(api, 4, desired_name="cloud")
    for _ in range(3):
        api.post("/scored_data", json=group(4, env_id=env))
    api.post("/scored_data", json=group(16))
    api.post("/scored_data", json=group(3, env_id=env))
    assert api.get("/batch").json()["batch"]
    after = read()

    def grown(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert grown("trajectory_pushed_groups_total[]") == 5
    assert grown("trajectory_formed_total[]") == 1
    assert after["trajectory_queue_groups[('env', 'cloud_0')]"] == 1
    assert after["trajectory_quarantined_groups[('reason', 'larger_than_batch')]"] == 1
    assert after["trajectory_buffered_groups[('env', 'cloud_0')]"] == 1
    assert grown("trajectory_request_seconds_count[('kind', 'push')]") == 5
    assert after["trajectory_resident_bytes[]"] > 1e7


@pytest.mark.slow
def test_the_status_page_shows_the_latest_example_as_text(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "hello": 1, "cloud": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with running_server(tokenizer=str(tmp_path)) as url, httpx.Client(base_url=url) as api:
        page = api.get("/ui").text
        assert "<script" in page
        assert "http://" not in page.replace("http://www.w3.org", ""), "nothing from elsewhere"
        assert api.get("/ui/data").json()["example"] is None
        api.post(
            "/scored_data",
            json={"tokens": [[1, 2], [2]], "masks": [[1, 2], [2]], "scores": [1.0, 0.0]},
        )
        data = api.get("/ui/data").json()
    assert data["example"]["texts"] == ["hello cloud", "cloud"]
    assert data["example"]["lengths"] == [2, 1]
    assert data["queue_size"] == 1


@pytest.mark.slow
def test_a_server_for_development_is_started_anew_at_changes(monkeypatch, tmp_path):
    """uvicorn starts it in processes of its own, which read the settings from variables."""
    started: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr("uvicorn.run", lambda app, **more: started.append((app, more)))
    monkeypatch.setattr("os.environ", dict(os.environ))
    assert main(["--reload", "--port", "0", "--store", f"sqlite:{tmp_path / 'store'}"]) == 0
    assert [app for app, _ in started] == ["realhf.trajectory.http.server:app"] and started[0][1][
        "reload"
    ] is True
