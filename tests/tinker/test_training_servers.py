"""The client loop of ``benchmarks/training_servers.py`` against our server. SkyRL's server, with
which it compares ours, is not installed here: ``make bench-skyrl``."""

from __future__ import annotations

import httpx
import psutil
import pytest
from tinker import types

from benchmarks.training_servers import (
    ADAPTERS,
    Comparison,
    Server,
    TrainingClient,
    draw_batches,
)
from tests.tinker.conftest import KEY
from tests.tinker.conftest import Server as ServerProcess

BATCHES = [
    [[token % 256 for token in row] for row in batch]
    for batch in draw_batches(steps=3, count=3, shortest=4, longest=20)
]


@pytest.fixture(scope="module")
def alone(policy, tmp_path_factory):
    """A server on a folder that no other test writes."""
    running = ServerProcess(policy, tmp_path_factory.mktemp("compared") / "root")
    yield running
    assert running.stop() == 0, running.log.read_text()[-3000:]


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_the_loss_of_a_step_is_the_servers_own_and_a_mean(server, loss):
    """A server that sums gets inputs that make the sum a mean over sequences of the mean over
    tokens, which the client computes from log-probabilities."""
    client = TrainingClient(server.url, rank=4, averages=False)
    for batch in BATCHES:
        data = [types.Datum(**each) for each in client.inputs(batch, loss)]
        told = client.training.forward(data, loss).result().metrics["loss:sum"]
        assert client.step(batch, loss) == pytest.approx(told, rel=1e-5)


def test_a_server_that_averages_gets_inputs_without_a_scale(server):
    client = TrainingClient(server.url, rank=4, averages=True)
    given = [each["loss_fn_inputs"] for each in client.inputs(BATCHES[0], "cross_entropy")]
    assert [set(each["weights"]) for each in given] == [{1.0}] * 3
    assert [each["target_tokens"] for each in given] == [row[1:] for row in BATCHES[0]]
    given = [each["loss_fn_inputs"] for each in client.inputs(BATCHES[0], "importance_sampling")]
    assert [set(each["advantages"]) for each in given] == [{1.0}, {-0.5}, {1.0}]


def test_it_starts_from_the_adapters_of_another_and_tells_when_the_losses_differ(alone, capsys):
    """Adapters in PEFT's format, trained elsewhere, give the losses that they give there, and the
    next step, too, once they are loaded; before, the comparison ends with both numbers."""
    names = ("first", "second")
    clients = [TrainingClient(alone.url, rank=4, averages=False, seed=seed) for seed in (1, 2)]
    clients[1].step(BATCHES[0], "cross_entropy")
    family = psutil.Process(alone.process.pid)
    servers = [Server(name, alone.url, family, averages=False) for name in names]
    comparison = Comparison(servers, clients)
    with pytest.raises(SystemExit, match="cross_entropy: the first losses differ: "):
        comparison.run([BATCHES[0]], "cross_entropy")

    clients = [TrainingClient(alone.url, rank=4, averages=False, seed=seed) for seed in (3, 4)]
    clients[1].step(BATCHES[0], "cross_entropy")
    clients[1].save_state("trained")
    (file,) = alone.root.glob(f"checkpoints/*/weights/trained.*/adapter/{ADAPTERS}")
    clients[0].load_adapters(alone.root, file)
    capsys.readouterr()
    Comparison(servers, clients).run(BATCHES[1:2], "cross_entropy")
    assert "losses differ by 0.0e+00" in capsys.readouterr().out


def test_two_loops_on_one_server_have_the_same_losses_and_samples(alone, capsys):
    family = psutil.Process(alone.process.pid)
    servers = [Server(name, alone.url, family, averages=False) for name in ("first", "second")]
    clients = [TrainingClient(alone.url, rank=4, averages=False, seed=5) for _ in servers]
    comparison = Comparison(servers, clients)
    comparison.run(BATCHES, "importance_sampling")
    comparison.sample(BATCHES[0][0], tokens=4, repeats=1)
    told = capsys.readouterr().out
    assert told.count("losses differ by 0.0e+00") == len(BATCHES)
    assert "importance_sampling, CPU of a step: first " in told and "2 pairs" in told
    assert "4 tokens are the same" in told
    assert servers[0].mib("VmHWM") >= servers[0].mib("VmRSS") > 100
    assert servers[0].cpu_s() > 1


def test_clients_before_0_25_are_told_to_send_passes_as_protobuf(server):
    """They send JSON otherwise, which the server refuses; the benchmark's client is one."""
    answer = httpx.post(
        f"{server.url}/api/v1/client/config", json={}, headers={"X-API-Key": KEY}
    ).json()
    assert answer["proto_write_fwdbwd"] is True and answer["fwd_via_fwdbwd"] is True
