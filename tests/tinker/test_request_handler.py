"""What is asked over HTTP of a service in this process, where a stand-in computes."""

from __future__ import annotations

import httpx
import pytest

from realhf.tinker.routes import build_app
from tests.tinker.conftest import KEY


@pytest.fixture
def post():
    """Sends one request to a service."""

    def send(service, path, /, **given) -> httpx.Response:
        async def answered() -> httpx.Response:
            transport = httpx.ASGITransport(build_app(service))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1/api/v1"
            ) as http:
                return await http.post(path, json=given, headers={"X-API-Key": KEY})

        return service._loop.run_until_complete(answered())

    return send


SESSION = {"tags": [], "user_metadata": None, "sdk_version": "0"}


def test_nothing_new_is_taken_while_the_disk_is_nearly_full(opened, post):
    """Sessions and samplers were, and a model was written down that had been refused."""
    service = opened()
    session = post(service, "/create_session", **SESSION).json()["session_id"]
    base = {"session_id": session, "base_model": service.options.public_name}
    service = opened(min_free_gib=1e9)
    for path, given in (
        ("/create_session", SESSION),
        ("/create_model", base | {"model_seq_id": 0, "lora_config": {"rank": 4}}),
        ("/create_sampling_session", base | {"sampling_session_seq_id": 0}),
    ):
        told = post(service, path, **given)
        assert told.status_code == 507 and "--min-free-gib" in told.json()["detail"]
    assert len(service.store.models()) == 0 == len(service.store.samplers(session))


def test_options_that_are_not_carried_are_refused_by_name(opened, post):
    """They were left aside."""
    service = opened()
    told = post(service, "/create_session", **SESSION, project_id="mine").json()["detail"]
    assert told == "project_id is not carried by this server"
    session = post(service, "/create_session", **SESSION).json()["session_id"]
    given = {
        "session_id": session,
        "model_seq_id": 0,
        "path": "tinker://m/weights/a",
        "optimizer": False,
    }
    for change, said in (
        ({"base_model": "another"}, "base_model 'another' is not served here"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config 'dimuon' is not carried"),
        (
            {"base_model": service.options.public_name, "optimizer_config": {"type": "adamw"}},
            "there are no weights",
        ),
    ):
        assert said in post(service, "/load_weights", **given, **change).json()["detail"]
