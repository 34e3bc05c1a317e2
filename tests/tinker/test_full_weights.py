"""A server that trains all weights, of a copy of the base for each client."""

from __future__ import annotations

import os
import signal

import httpx
import msgspec
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from realhf.tinker.channel import ComputeOptions, Create
from realhf.tinker.compute import Computer
from realhf.tinker.wire import BadRequest
from tests.tinker.conftest import KEY, LIMITS, Server
from tests.tinker.test_client import TEXT, datum, steps
from tests.tinker.test_kills import disturbed, kill_and_start, loop


@pytest.fixture(scope="module")
def full(policy, tmp_path_factory):
    """One server for all tests that do it no harm."""
    running = Server(policy, tmp_path_factory.mktemp("full") / "root", "--full-weights", *LIMITS)
    yield running
    assert running.stop() == 0, running.log.read_text()[-3000:]


@pytest.fixture
def service(full):
    return tinker.ServiceClient(base_url=full.url, api_key=KEY)


@pytest.fixture
def trainer(service, policy):
    return service.create_lora_training_client(str(policy), rank=4).result()


def plain_loop(policy, n):
    """The same by transformers alone, one sequence at a time; norms have no decay."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    wide, narrow = ([p for p in model.parameters() if (p.ndim > 1) == yes] for yes in (True, False))
    groups = [{"params": wide, "weight_decay": 0.01}, {"params": narrow, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    found = []
    for _ in range(n):
        total = 0.0
        for tokens in TEXT:
            ids = torch.tensor([tokens])
            log_p = model(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
            loss = -log_p.sum()
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        found.append((total, float(norm)))
    return model, found


def scored(model, tokens):
    """Log-probabilities of all tokens but the first."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens[:-1]])).logits
    return logits.log_softmax(-1)[0].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def test_steps_are_those_of_a_plain_loop_and_so_is_what_samples(trainer, policy):
    model, expected = plain_loop(policy, 6)
    found = np.array(steps(trainer, 6))
    np.testing.assert_allclose(found[:, 0], np.array(expected)[:, 0], rtol=1e-4)
    np.testing.assert_allclose(found[:, 1], np.array(expected)[:, 1], rtol=1e-3)
    assert found[-1, 0] < 0.9 * found[0, 0]
    sampler = trainer.save_weights_and_get_sampling_client().result()
    own = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT[0])).result()[1:]
    np.testing.assert_allclose(own, scored(model, TEXT[0]), atol=2e-3)
    params = types.SamplingParams(max_tokens=8, seed=1, stop=[])
    (drawn,) = sampler.sample(types.ModelInput.from_ints(TEXT[0]), 1, params).result().sequences
    np.testing.assert_allclose(
        drawn.logprobs, scored(model, [*TEXT[0], *drawn.tokens])[-8:], atol=2e-3
    )


def test_clients_train_copies_of_their_own(service, trainer, policy):
    steps(trainer, 2)
    other = service.create_lora_training_client(str(policy), rank=4).result()
    assert steps(other, 1) == steps(
        service.create_lora_training_client(str(policy), rank=8).result(), 1
    )
    base = service.create_sampling_client(base_model=str(policy)).result()
    from transformers import AutoModelForCausalLM

    untrained = scored(AutoModelForCausalLM.from_pretrained(policy), TEXT[1])
    found = base.compute_logprobs(types.ModelInput.from_ints(TEXT[1])).result()[1:]
    np.testing.assert_allclose(found, untrained, atol=1e-4)


def test_saved_weights_go_on_with_and_without_the_moments(service, trainer):
    steps(trainer, 3)
    path = trainer.save_state("three").result().path
    after = steps(trainer, 2)
    assert (
        steps(service.create_training_client_from_state_with_optimizer(path).result(), 2) == after
    )
    anew = service.create_training_client_from_state(path).result()
    first, second = steps(anew, 2)
    assert first[0] == after[0][0] and second[0] != after[1][0]
    named = trainer.save_weights_for_sampler("named").result().path
    anew.load_state(named).result()
    losses = [
        each.forward([datum(TEXT[0])], "cross_entropy").result().metrics["loss:sum"]
        for each in (anew, trainer)
    ]
    assert losses[0] == losses[1]


def test_a_whole_model_is_downloaded(service, trainer, tmp_path):
    from transformers import AutoModelForCausalLM

    steps(trainer, 2)
    rest = service.create_rest_client()
    path = trainer.save_weights_external("whole").result().path
    for name, url in rest.get_external_weights_urls(path).result().urls.items():
        (tmp_path / name).write_bytes(httpx.get(url).raise_for_status().content)
    served = (
        trainer.forward([datum(TEXT[0])], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    )
    own = scored(AutoModelForCausalLM.from_pretrained(tmp_path), TEXT[0])
    np.testing.assert_allclose(own, served.to_numpy(), atol=1e-4)


def test_it_is_told_that_there_are_no_adapters(service, trainer, policy):
    info = trainer.get_info()
    rest = service.create_rest_client()
    assert info.is_lora is False and info.lora_rank is None
    path = trainer.save_state("none").result().path
    assert rest.get_weights_info_by_tinker_path(path).result().is_lora is False
    with pytest.raises(tinker.BadRequestError, match="all weights train here"):
        service.create_lora_training_client(str(policy), rank=4, train_mlp=False).result()


def test_a_killed_server_goes_on_to_the_bit(full, policy, tmp_path):
    whole: list = []
    loop(full.url, policy, whole)
    server = Server(policy, tmp_path / "root", "--full-weights", "--state-every-s", "0")
    kills = iter(
        [lambda: kill_and_start(server), lambda: os.kill(server.compute_pid(), signal.SIGKILL)]
    )
    try:
        assert disturbed(server, policy, (3, 9), lambda: next(kills)()) == whole
    finally:
        server.kill()


def test_a_folder_belongs_to_the_one_or_the_other(policy, tmp_path):
    Server(policy, tmp_path / "root").stop()
    with pytest.raises(AssertionError, match="belongs to a server without --full-weights"):
        Server(policy, tmp_path / "root", "--full-weights")


def test_a_model_that_the_memory_cannot_hold_is_refused(policy):
    """Before it takes what it will need: the others have not taken all of theirs yet."""
    options = ComputeOptions(str(policy), "float32", 1, 256, 0, 0.01, full_weights=True)
    computer = Computer(options, lambda *message: None)
    create = Create("m", 0, 0, True, True, True)
    computer._free_at_start = int(5.5 * computer.nbytes)
    computer._create(create)
    assert computer._models["m"].weights_id.digest == computer.digest
    computer._create(create)
    other = msgspec.structs.replace(create, model="other")
    with pytest.raises(
        BadRequest, match=r"all weights of a model takes .* GiB; 1 are in memory.*--max-adapters"
    ):
        computer._create(other)
    computer._remove("m")
    computer._create(other)


def test_weights_for_others_are_refused_and_harm_nothing(service, trainer):
    """The moments stay: a step after it is that of a client who never asked."""
    steps(trainer, 2)
    sampled = trainer.save_weights_for_sampler("sampled").result().path
    whole = trainer.save_weights_external("downloaded").result().path
    path = trainer.save_state("state").result().path
    with pytest.raises(tinker.BadRequestError, match="has no state of the optimizer"):
        trainer.load_state_with_optimizer(sampled).result()
    with pytest.raises(tinker.RequestFailedError, match="was saved to be downloaded"):
        trainer.load_state(whole).result()
    assert steps(trainer, 2) == steps(
        service.create_training_client_from_state_with_optimizer(path).result(), 2
    )
