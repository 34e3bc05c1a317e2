"""A trainer that is started again in the middle of a run goes on with the queue it had.

Source: docs/reference/trajectory.md 2.3, 3.2.
"""

from __future__ import annotations

import httpx
import pytest

from realhf.trajectory.state import registry
from realhf.web.refusal import Refusal
from tests.trajectory.conftest import ENV, REGISTRATION, STOCK, running_server, start
from tests.trajectory.driver import Driver
from tests.trajectory.groups import group
from tests.trajectory.http.test_stock_clients import ask


def names(batch: list[dict]) -> list[str]:  # type: ignore[type-arg]
    return [item["group_overrides"]["name"] for item in batch]


def push(url: str, env_id: int, numbers: range) -> None:
    for number in numbers:
        assert ask(
            url,
            "POST",
            "/scored_data",
            group(4, env_id=env_id, group_overrides={"name": str(number)}),
        )


@pytest.mark.slow
def test_a_stock_trainer_goes_on_where_it_was_and_environments_notice_nothing(tmp_path):
    """Also where the server was started again in between. The batch that the trainer held when it
    died comes again: its first pull used to acknowledge it."""
    with running_server(store=f"sqlite:{tmp_path}") as url:
        ask(url, "POST", "/register", STOCK)
        assert ask(url, "GET", "/batch") == {"batch": None}
        env_id = ask(url, "POST", "/register-env", ENV)["env_id"]
        push(url, env_id, range(6))
        assert names(ask(url, "GET", "/batch")["batch"]) == ["0", "1"]
        assert set(ask(url, "POST", "/register", STOCK)) == {"uuid"}
        assert ask(url, "GET", "/status-env", {"env_id": env_id})["self_queue_size"] == 4, "no 404"
        assert ask(url, "GET", "/status") == {"current_step": 1, "queue_size": 4}
        assert ask(url, "POST", "/register-env", ENV)["env_id"] == 1, "nobody has to wait"
    with running_server(store=f"sqlite:{tmp_path}") as url:
        ask(url, "POST", "/register", STOCK)
        push(url, env_id, range(6, 8))
        batches = [names(ask(url, "GET", "/batch")["batch"]) for _ in range(4)]
        assert batches == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
        assert ask(url, "GET", "/batch") == {"batch": None}
        assert ask(url, "GET", "/status")["current_step"] == 4


@pytest.mark.slow
def test_every_rank_of_a_stock_trainer_may_register():
    with running_server() as url:
        for rank in range(4):
            ask(url, "POST", "/register", STOCK)
            if not rank:
                ask(url, "GET", "/batch")
            assert ask(url, "POST", "/scored_data", group(4)) == {"status": "received"}
        assert ask(url, "GET", "/status")["queue_size"] == 4


@pytest.mark.slow
def test_another_run_or_a_wish_to_begin_anew_resets():
    with running_server() as url, httpx.Client(base_url=url) as api:
        for changed, header in (
            ({}, {"X-Reset": "1"}),
            ({"wandb_group": "other"}, {}),
            ({"wandb_project": "other"}, {}),
            ({"batch_size": 16}, {}),
        ):
            start(api, batch_size=8)
            api.post("/scored_data", json=group(4))
            epoch = int(api.get("/status").headers["x-epoch"])
            again = api.post(
                "/register", json=REGISTRATION | {"batch_size": 8} | changed, headers=header
            )
            assert int(again.headers["x-epoch"]) == epoch + 1
            assert "x-run-continued" not in again.headers
            assert api.get("/status").json()["queue_size"] == 0
            api.get("/reset_data")
        both = api.post("/register", json=REGISTRATION, headers={"X-Reset": "1", "X-Join": "1"})
        assert both.status_code == 422


def test_what_a_trainer_that_goes_on_may_change():
    driver = Driver()
    driver.start(num_steps=10, starting_step=3)
    driver.push(4, 4)
    driver.batch()
    env = driver.env()
    wanted = {
        "num_steps": 20,
        "checkpoint_dir": "d",
        "max_token_len": 128,
        "starting_step": 0,
        "max_staleness": 2,
    }
    body, headers = registry.register(driver.state, driver.now, REGISTRATION | wanted, False)
    run = driver.state.run
    assert (run.num_steps, run.checkpoint_dir, run.max_token_len, run.max_staleness) == (
        20,
        "d",
        128,
        2,
    )
    assert (run.step, run.epoch, run.started, env in driver.state.envs) == (4, 0, True, True)
    assert headers["X-Run-Continued"] == "1"
    assert body["uuid"].bit_length() > 64
    driver.register(starting_step=50)
    assert driver.state.run.step == 50, "a trainer that is ahead is followed"
    assert driver.state.run.max_staleness == 2, (
        "another rank does not lift the bound by keeping silent"
    )


def test_an_option_resets_in_any_case():
    driver = Driver(reregister="reset")
    driver.start()
    driver.push(4)
    driver.register()
    assert (driver.state.run.epoch, driver.state.waiting_groups) == (1, 0)
    with pytest.raises(ValueError, match="reregister"):
        Driver(reregister="maybe")


def test_who_may_not_reset_may_go_on():
    driver = Driver()
    driver.start()
    driver.push(4)
    registry.register(driver.state, driver.now, REGISTRATION, False, may_reset=False)
    for request, anew in ((REGISTRATION | {"batch_size": 16}, False), (REGISTRATION, True)):
        with pytest.raises(Refusal, match="admin token"):
            registry.register(
                driver.state, driver.now, request, False, may_reset=False, force_new=anew
            )
    assert driver.state.waiting_groups == 1
