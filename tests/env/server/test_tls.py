"""The environment server behind a certificate: sessions, pages and cookies go encrypted, and to
whom it was given."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.aws.client.aws_env import AwsEnv
from realhf.base.tls import context_trusting, embed_certificate, split_certificate
from realhf.env.adapters.openenv import OpenEnvOptions, build
from realhf.env.openenv_client import ConnectError, OpenEnvClient, fetch_metadata, fetch_page
from realhf.env.server.process import ServerProcess
from tests.certificates import self_signed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return self_signed(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def server(pair: tuple[str, str]) -> Iterator[ServerProcess]:
    with ServerProcess(
        "--env", "sql", "--token", "sesame", "--tls-cert", pair[0], "--tls-key", pair[1]
    ) as process:
        yield process


@pytest.mark.nightly
async def test_clients_with_the_certificate_are_served_and_no_others(
    server: ServerProcess, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a file, by the variable of all programs, or by an address that names the certificate."""
    assert server.url.startswith("https://")
    with pytest.raises(ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        await OpenEnvClient(server.url, token="sesame").connect()
    metadata = await fetch_metadata(server.url, "sesame", tls=context_trusting(pair[0]))
    assert metadata["name"]
    async with AwsEnv(server.url, "sesame", ca_file=pair[0]) as env:
        assert env.metadata == metadata
    address, context = split_certificate(embed_certificate(server.url, Path(pair[0]).read_text()))
    pinned = OpenEnvClient(address, token="sesame", tls=context)
    await pinned.connect()
    await pinned.close()
    spec = build(
        OpenEnvOptions(url=server.url, token_file=_file(pair[0], "sesame"), ca_file=pair[0])
    )
    environment = spec.make("")
    assert (await environment.reset({"seed": 1}, seed=1)).messages
    await environment.close()
    monkeypatch.setenv("SSL_CERT_FILE", pair[0])
    client = OpenEnvClient(server.url, token="sesame")
    await client.connect()
    await client.close()


def _file(beside: str, text: str) -> str:
    path = Path(beside).with_name("token")
    path.write_text(text)
    return str(path)


async def test_who_speaks_no_tls_is_not_served_and_does_not_stop_it(
    server: ServerProcess, pair: tuple[str, str]
) -> None:
    plain = server.url.replace("https", "http")
    with pytest.raises((OSError, ValueError)):
        await fetch_page(plain, "health")
    port = int(server.url.rpartition(":")[2])
    strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    assert await fetch_page(server.url, "health", tls=context_trusting(pair[0])) == {
        "status": "healthy"
    }
    for _, writer in strangers:
        writer.close()


def test_a_certificate_without_its_key_is_one_line() -> None:
    command = [sys.executable, "-m", "workers.env_worker", "--env", "sql", "--tls-cert", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "REALHF_ENV_TLS_CERT (--tls-cert) is given without REALHF_ENV_TLS_KEY (--tls-key)"
    )
