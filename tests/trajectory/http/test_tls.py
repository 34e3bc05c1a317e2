"""The trajectory server behind a certificate: tokens and rollouts go encrypted, to clients that
know it."""

from __future__ import annotations

import logging
import socket

import httpx
import pytest

from realhf.base.tls import context_trusting
from realhf.trajectory.client import AsyncTrajectoryClient, TrajectoryClient, Unreachable
from realhf.trajectory.http.cli import uvicorn_config
from realhf.trajectory.http.config import TrajectoryConfig
from realhf.web.settings import SettingError
from tests.certificates import self_signed
from tests.trajectory.conftest import REGISTRATION, running_server, start, wait_until
from tests.trajectory.groups import encoded, group

pytestmark = pytest.mark.slow


async def test_clients_with_the_certificate_push_and_pull(tmp_path):
    cert, key = self_signed(tmp_path)
    with running_server(token="sesame", tls_cert=cert, tls_key=key) as url:
        assert url.startswith("https://")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/info")
        with (
            TrajectoryClient(url, retry_for_s=0) as doubter,
            pytest.raises(Unreachable, match="VERIFY_FAILED"),
        ):
            doubter.info()
        async with AsyncTrajectoryClient(url, token="sesame", ca_file=cert) as client:
            await client.register(batch_size=2, max_token_len=64, num_steps=3)
        with TrajectoryClient(url, token="sesame", ca_file=cert) as client:
            with httpx.Client(
                verify=context_trusting(cert), headers={"Authorization": "Bearer sesame"}
            ) as asking:
                asking.get(
                    f"{url}/batch"
                ).raise_for_status()  # from then on environments may register
            client.register_env("e", group_size=2, max_token_length=64, wait_s=60)
            client.push(group(2))
            assert client.pull(60).n_sequences == 2
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{url.replace('https', 'http')}/register", json=REGISTRATION)


@pytest.mark.nightly
def test_a_batch_that_waits_to_be_encrypted_or_sent_was_not_sent(tmp_path):
    """As without TLS, a client that leaves in the middle loses nothing."""
    cert, key = self_signed(tmp_path)
    large = group(4, 200_000)
    with (
        running_server(tls_cert=cert, tls_key=key) as url,
        httpx.Client(base_url=url, verify=context_trusting(cert)) as api,
    ):
        start(api, batch_size=4)
        assert api.post("/scored_data", content=encoded(large)).status_code == 200
        with (
            socket.create_connection((api.base_url.host, api.base_url.port or 0)) as plain,
            context_trusting(cert).wrap_socket(plain, server_hostname="127.0.0.1") as deaf,
        ):
            deaf.sendall(b"GET /batch HTTP/1.1\r\nHost: x\r\nAccept-Encoding: identity\r\n\r\n")
            assert deaf.recv(12) == b"HTTP/1.1 200"
            assert [lease["state"] for lease in api.get("/leases").json()["leases"]] == ["sending"]
        wait_until(
            lambda: (
                [lease["state"] for lease in api.get("/leases").json()["leases"]] == ["returned"]
            )
        )
        assert api.get("/batch").json()["batch"][0]["tokens"] == large["tokens"]
        wait_until(
            lambda: [lease["state"] for lease in api.get("/leases").json()["leases"]] == ["sent"]
        )


def test_a_server_that_others_may_overhear_says_so(tmp_path, caplog):
    """It is served all the same, as networks of one's own are."""
    cert, key = self_signed(tmp_path)
    uvicorn_config(TrajectoryConfig(host="0.0.0.0", token="t", tls_cert=cert, tls_key=key), None)
    uvicorn_config(TrajectoryConfig(), None)
    assert caplog.messages == []
    uvicorn_config(TrajectoryConfig(host="0.0.0.0", token="t"), None)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "listening on 0.0.0.0 without TLS" in caplog.text and "--tls-cert" in caplog.text
    with pytest.raises(SettingError, match=r"\(--tls-cert\) is given without .*\(--tls-key\)"):
        TrajectoryConfig(tls_cert=cert)
