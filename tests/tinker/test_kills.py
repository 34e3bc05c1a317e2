"""Servers that are killed in the middle of training: the client waits, and gets what it would have
got."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import tinker
from tinker import types

from realhf.base.process import start_time
from tests.tinker.conftest import KEY, Server, wait_for
from tests.tinker.test_client import ADAM, TEXT, datum

STEPS = 12


def loop(url, policy, losses, n=STEPS):
    """A training loop that knows nothing of kills: steps ahead, a sample now and then, and a
    checkpoint."""
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    client = service.create_lora_training_client(str(policy), rank=4, seed=7).result()
    data = [datum(tokens) for tokens in TEXT]
    for number in range(n):
        first = client.forward_backward(data, "cross_entropy")
        second = client.optim_step(ADAM)
        losses.append(
            (first.result().metrics["loss:sum"], second.result().metrics["weights_version"])
        )
        if number % 4 == 3:
            sampler = client.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=8, seed=number, stop=[])
            sampled = sampler.sample(types.ModelInput.from_ints(TEXT[0]), 2, params).result()
            losses.append([each.tokens for each in sampled.sequences])
    losses.append(client.save_state("end").result().path.rpartition("/")[2])


@pytest.fixture(scope="module")
def undisturbed(server, policy):
    losses: list = []
    loop(server.url, policy, losses)
    return losses


def disturbed(server, policy, places, kill, n=STEPS):
    """The losses of a loop during which ``kill`` strikes as soon as so many are there as each of
    ``places`` says."""
    losses: list = []
    training = threading.Thread(target=loop, args=(server.url, policy, losses, n))
    training.start()
    for at in places:
        wait_for(lambda at=at: len(losses) >= at or not training.is_alive(), f"{at} steps", 120)
        kill()
    training.join(240)
    assert not training.is_alive()
    return losses


def kill_and_start(server):
    server.kill()
    server.start()


@pytest.mark.parametrize("options", [("--state-every-s", "0"), ("--state-every-s", "3600")])
def test_a_killed_server_goes_on_to_the_bit(policy, tmp_path, undisturbed, options):
    """Killed three times with all that it started, between and within requests: with a kept state
    after every step, and with one after the first only, so that all steps behind it are done
    again."""
    server = Server(policy, tmp_path / "root", *options)
    try:
        assert disturbed(server, policy, (2, 6, 9), lambda: kill_and_start(server)) == undisturbed
    finally:
        server.kill()


def test_two_hundred_steps_outlive_five_kills(server, policy, tmp_path):
    """As above, with the states that a server keeps where nobody says how often."""
    whole: list = []
    loop(server.url, policy, whole, 200)
    killed = Server(policy, tmp_path / "root")
    try:
        assert (
            disturbed(killed, policy, (11, 60, 111, 177, 240), lambda: kill_and_start(killed), 200)
            == whole
        )
    finally:
        killed.kill()


def test_the_process_that_computes_may_die_alone(policy, tmp_path, undisturbed):
    """The server starts another one, which does the rest."""
    server = Server(policy, tmp_path / "root")
    try:
        assert (
            disturbed(server, policy, (2, 7), lambda: os.kill(server.compute_pid(), signal.SIGKILL))
            == undisturbed
        )
        assert server.stop() == 0
    finally:
        if server.process.poll() is None:
            server.kill()


def test_nothing_outlives_a_killed_server(policy, tmp_path):
    server = Server(policy, tmp_path / "root")
    compute = server.compute_pid()
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    wait_for(lambda: start_time(compute) == 0, "its end", 20)
