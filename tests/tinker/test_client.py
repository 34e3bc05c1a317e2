"""The package ``tinker`` itself against the server: what is computed, sampled, kept and refused."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
import tinker
import torch
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from tests.tinker.conftest import KEY

ADAM = types.AdamParams(
    learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0
)
TEXT = [list(b"the quick brown fox"), list(b"jumps over"), list(b"the lazy dog, and again the dog")]


def datum(tokens, weight=1.0):
    weights = [weight] * (len(tokens) - 1)
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


@pytest.fixture(scope="module")
def service(server):
    return tinker.ServiceClient(base_url=server.url, api_key=KEY)


@pytest.fixture
def trainer(service, policy):
    return service.create_lora_training_client(str(policy), rank=4, seed=7).result()


def steps(client, n, data=None):
    """Losses of some steps, sent without waiting in between."""
    data = data or [datum(tokens) for tokens in TEXT]
    sent = [
        (client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)) for _ in range(n)
    ]
    return [
        (first.result().metrics["loss:sum"], second.result().metrics["grad_norm"])
        for first, second in sent
    ]


def plain_loop(policy, n, *more):
    """The same by transformers and PEFT alone, one sequence at a time; adapters also on ``more``
    layers."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    torch.manual_seed(7)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", *more]
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=32, target_modules=names, lora_dropout=0.0)
    )
    own = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(own, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    found = []
    for _ in range(n):
        total = 0.0
        for tokens in TEXT:
            ids = torch.tensor([tokens])
            log_p = model(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
            loss = -log_p.sum()
            loss.backward()
            total += float(loss)
        norm = torch.nn.utils.clip_grad_norm_(own, 1.0)
        adam.step()
        adam.zero_grad()
        found.append((total, float(norm)))
    return found


@pytest.mark.parametrize("unembedding", [True, False])
def test_steps_are_those_of_a_plain_loop(service, policy, unembedding):
    """Losses and gradients, clipped, with decay, over several steps; sent without waiting for one
    another. The adapter of the unembedding is there as it was asked for."""
    create = service.create_lora_training_client
    trainer = create(str(policy), rank=4, seed=7, train_unembed=unembedding).result()
    more = ["lm_head"] if unembedding else []
    found = np.array(steps(trainer, 6))
    expected = np.array(plain_loop(policy, 6, *more))
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=1e-5)
    np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=1e-3)
    assert found[-1, 0] < 0.97 * found[0, 0]


def test_logprobs_come_back_for_every_position_also_forward_only(trainer):
    data = [datum(tokens) for tokens in TEXT]
    forward = trainer.forward(data, "cross_entropy").result()
    both = trainer.forward_backward(data, "cross_entropy").result()
    for tokens, one, other in zip(TEXT, forward.loss_fn_outputs, both.loss_fn_outputs, strict=True):
        assert one["logprobs"].to_numpy().shape == (len(tokens) - 1,)
        np.testing.assert_allclose(
            one["logprobs"].to_numpy(), other["logprobs"].to_numpy(), atol=1e-5
        )
        np.testing.assert_allclose(
            one["elementwise_loss"].to_numpy(), -one["logprobs"].to_numpy(), atol=1e-6
        )
        np.testing.assert_allclose(
            other["elementwise_loss"].to_numpy(), -other["logprobs"].to_numpy(), atol=1e-6
        )
    total = -sum(float(one["logprobs"].to_numpy().sum()) for one in forward.loss_fn_outputs)
    assert forward.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_a_custom_loss_of_the_client_is_the_named_one(service, policy):
    """The client computes the slope of its own function, and sends it as weights."""
    norms = []
    for custom in (False, True):
        client = service.create_lora_training_client(str(policy), rank=4, seed=7).result()
        data = [datum(tokens, 0.5) for tokens in TEXT]
        if custom:
            own = lambda data, logprobs: (
                -0.5 * sum(each.sum() for each in logprobs),
                {"mine": 1.0},
            )
            sent = client.forward_backward_custom(data, own)
        else:
            sent = client.forward_backward(data, "cross_entropy")
        norms.append(
            (
                sent.result().metrics["loss:sum"],
                client.optim_step(ADAM).result().metrics["grad_norm"],
            )
        )
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)


def test_targets_may_be_any_tokens_and_several(trainer):
    """Another token than the one that follows, and two for each position, of which one has no
    weight."""
    tokens = TEXT[0]
    one = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": [0] * (len(tokens) - 1),
            "weights": [1.0] * (len(tokens) - 1),
        },
    )
    two = np.stack([np.zeros(len(tokens) - 1, np.int64), np.array(tokens[1:])], -1)
    pair = types.Datum(
        model_input=one.model_input,
        loss_fn_inputs={
            "target_tokens": two,
            "weights": np.array([[0.0, 1.0]] * len(two), dtype=np.float32),
        },
    )
    found = trainer.forward([one, pair], "cross_entropy").result().loss_fn_outputs
    usual = trainer.forward([datum(tokens)], "cross_entropy").result()
    assert found[1]["logprobs"].to_numpy().shape == two.shape
    np.testing.assert_allclose(
        found[1]["logprobs"].to_numpy()[:, 0], found[0]["logprobs"].to_numpy(), atol=1e-5
    )
    np.testing.assert_allclose(
        found[1]["logprobs"].to_numpy()[:, 1],
        usual.loss_fn_outputs[0]["logprobs"].to_numpy(),
        atol=1e-5,
    )


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_policy_losses_go_backward(trainer, name):
    """On the policy itself the ratio is 1, so that the loss is that of its formula with the
    log-probabilities."""
    tokens = TEXT[2]
    log_q = (
        trainer.forward([datum(tokens)], "cross_entropy")
        .result()
        .loss_fn_outputs[0]["logprobs"]
        .to_numpy()
    )
    advantages = np.linspace(-1, 1, len(tokens) - 1).astype(np.float32)
    inputs = {"target_tokens": tokens[1:], "logprobs": log_q, "advantages": advantages}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = np.ones_like(advantages)
    given = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    loss = trainer.forward_backward([given], name).result().metrics["loss:sum"]
    expected = -(log_q * advantages).sum() if name in ("cispo", "dro") else -advantages.sum()
    assert loss == pytest.approx(float(expected), abs=1e-4)
    assert trainer.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_two_clients_do_not_disturb_each_other(service, policy):
    """Their requests come in turns; each gets what it gets alone."""
    data = [datum(tokens) for tokens in TEXT]
    clients = [
        service.create_lora_training_client(str(policy), rank=4, seed=7).result() for _ in range(2)
    ]
    sent = []
    for _ in range(3):
        for client in clients:
            sent.append((client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)))
    losses = [first.result().metrics["loss:sum"] for first, _ in sent]
    alone = [
        loss
        for loss, _ in steps(
            service.create_lora_training_client(str(policy), rank=4, seed=7).result(), 3
        )
    ]
    assert losses[0::2] == alone and losses[1::2] == alone


def test_more_clients_than_fit_into_memory_take_turns(service, policy):
    """Three models fit. Each of five comes back as it was, with gradients that wait for their
    step."""
    clients = [
        service.create_lora_training_client(str(policy), rank=4, seed=7).result() for _ in range(5)
    ]
    losses = [
        client.forward_backward([datum(TEXT[0])], "cross_entropy").result().metrics["loss:sum"]
        for client in clients
    ]
    norms = [client.optim_step(ADAM).result().metrics["grad_norm"] for client in clients]
    after = [steps(client, 1)[0] for client in clients]
    assert [len({*values}) for values in (losses, norms, after)] == [1, 1, 1]


def test_samples_come_from_the_weights_that_were_saved(trainer, service, policy):
    """Log-probabilities are those of the trained model, a seed gives the same tokens again, and
    training that goes on does not change what was saved."""
    steps(trainer, 8)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(TEXT[0][:8])
    params = types.SamplingParams(max_tokens=12, seed=5, stop=[])
    first = sampler.sample(prompt, 3, params).result()
    assert [len(each.tokens) for each in first.sequences] == [12] * 3
    assert len({tuple(each.tokens) for each in first.sequences}) == 3
    whole = [TEXT[0][:8] + each.tokens for each in first.sequences]
    trained = trainer.forward([datum(tokens) for tokens in whole], "cross_entropy").result()
    for each, scored in zip(first.sequences, trained.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(each.logprobs, scored["logprobs"].to_numpy()[7:], atol=1e-4)
    steps(trainer, 3)
    again = sampler.sample(prompt, 3, params).result()
    assert [each.tokens for each in again.sequences] == [each.tokens for each in first.sequences]
    base = service.create_sampling_client(base_model=str(policy)).result()
    other = base.compute_logprobs(types.ModelInput.from_ints(whole[0])).result()
    assert other[0] is None and abs(sum(other[8:]) - sum(first.sequences[0].logprobs)) > 0.1


def test_what_is_known_of_a_prompt(service, policy):
    """Log-probabilities, the likeliest tokens, those of given tokens, and of the end of the prompt
    only."""
    sampler = service.create_sampling_client(base_model=str(policy)).result()
    tokens = TEXT[0]
    prompt = types.ModelInput.from_ints(tokens)
    params = types.SamplingParams(max_tokens=1, temperature=1.0)
    ids = np.full((len(tokens) - 1, 2), -1)
    ids[:, 0], ids[3, 1] = tokens[1:], 9
    found = sampler.sample(
        prompt,
        1,
        params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=3,
        target_prompt_logprobs=types.TensorData.from_numpy(ids),
    ).result()
    assert found.prompt_logprobs[0] is None and found.topk_prompt_logprobs[0] is None
    np.testing.assert_allclose(
        found.target_prompt_logprobs.to_numpy()[:, 0], found.prompt_logprobs[1:], atol=1e-6
    )
    assert (
        found.target_prompt_logprobs.to_numpy()[2, 1]
        == 0.0
        > found.target_prompt_logprobs.to_numpy()[3, 1]
    )
    for own, likeliest in zip(
        found.prompt_logprobs[1:], found.topk_prompt_logprobs[1:], strict=True
    ):
        values = [value for _, value in likeliest]
        assert (
            values == sorted(values, reverse=True) and len(values) == 3 and values[0] >= own - 1e-6
        )
    assert len(found.sequences[0].topk_logprobs) == len(found.sequences[0].tokens) == 1
    end = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=4).result()
    assert end[:-4] == [None] * (len(tokens) - 4)
    np.testing.assert_allclose(end[-4:], found.prompt_logprobs[-4:], atol=1e-5)


def test_a_sequence_ends_at_tokens_and_strings(service, policy):
    """At the token itself, at the token that completes a string, and not at all where an empty list
    was given."""
    sampler = service.create_sampling_client(base_model=str(policy)).result()
    prompt = types.ModelInput.from_ints(TEXT[1])
    sample = lambda **given: (
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=40, seed=2, **given))
        .result()
        .sequences[0]
    )
    whole = sample(stop=[])
    assert len(whole.tokens) == 40 and whole.stop_reason == "length"
    stop = next(token for token in whole.tokens[5:] if whole.tokens.index(token) >= 5)
    at = whole.tokens.index(stop)
    cut = sample(stop=[stop])
    assert cut.tokens == whole.tokens[: at + 1] and cut.stop_reason == "stop"
    tokenizer = sampler.get_tokenizer()
    text = tokenizer.decode(whole.tokens)
    letters = [each for each in text if each.isascii() and each.isprintable()]
    end = sample(stop=letters[3])
    assert end.stop_reason == "stop" and tokenizer.decode(end.tokens).count(letters[3]) >= 1
    assert end.tokens == whole.tokens[: len(end.tokens)] and letters[3] not in tokenizer.decode(
        end.tokens[:-1]
    )


def test_a_saved_state_goes_on_where_it_was(trainer, service):
    """With the optimizer's state to the bit; without it the moments begin anew; lists and deletion
    know it."""
    steps(trainer, 3)
    path = trainer.save_state("three", ttl_seconds=7200).result().path
    with pytest.raises(tinker.RequestFailedError, match="pass overwrite, or choose another name"):
        trainer.save_state("three").result()
    trainer.save_state("three", overwrite=True).result()
    expected = steps(trainer, 2)
    assert (
        steps(service.create_training_client_from_state_with_optimizer(path).result(), 2)
        == expected
    )
    fresh = steps(service.create_training_client_from_state(path).result(), 2)
    assert fresh[0] == expected[0] and fresh[1] != expected[1]
    rest = service.create_rest_client()
    listed = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert [each.tinker_path for each in listed] == [path] and listed[0].size_bytes > 1000
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    assert trainer.model_id in [
        each.training_run_id for each in rest.list_training_runs().result().training_runs
    ]
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert not rest.list_checkpoints(trainer.model_id).result().checkpoints
    with pytest.raises(tinker.NotFoundError, match="there are no weights"):
        service.create_training_client_from_state(path).result()


def test_a_whole_model_is_downloaded_and_is_the_trained_one(
    trainer, service, server, policy, tmp_path
):
    """By addresses that need no key, and only as they were signed; kept for as long as is said. The
    adapter beside it is the same to PEFT; a head that shares the weight of the embedding has one of
    its own by then. A run on the same machine takes the folder itself."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    steps(trainer, 4)
    path = trainer.save_weights_external("whole").result().path
    rest = service.create_rest_client()
    urls = rest.get_external_weights_urls(path).result().urls
    for name, url in urls.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(httpx.get(url).raise_for_status().content)
    (folder,) = server.root.glob(
        f"checkpoints/{trainer.model_id.replace(':', '_')}/external_weights/whole.*"
    )
    assert {name: (folder / name).read_bytes() for name in urls} == {
        n: (tmp_path / n).read_bytes() for n in urls
    }
    logits = AutoModelForCausalLM.from_pretrained(tmp_path)(
        input_ids=torch.tensor([TEXT[0][:-1]])
    ).logits
    own = logits.log_softmax(-1)[0].gather(-1, torch.tensor(TEXT[0][1:])[:, None])[:, 0]
    served = (
        trainer.forward([datum(TEXT[0])], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    )
    np.testing.assert_allclose(own.detach().numpy(), served.to_numpy(), atol=1e-4)
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(policy), tmp_path / "adapter"
    )
    torch.testing.assert_close(
        adapted(input_ids=torch.tensor([TEXT[0][:-1]])).logits, logits, atol=1e-4, rtol=1e-4
    )
    url = urls["config.json"]
    for wrong in (
        url[:-1] + ("0" if url[-1] != "0" else "1"),
        url.replace("config.json", "model.safetensors"),
        url[:-90],
    ):
        assert httpx.get(wrong).status_code == 403
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    listed = {
        each.tinker_path: each
        for each in rest.list_checkpoints(trainer.model_id).result().checkpoints
    }
    assert listed[path].expires_at is not None and listed[path].checkpoint_type == "external"
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert httpx.get(url).status_code == 404


def test_weights_with_a_name_are_sampled_by_their_path(trainer, service):
    steps(trainer, 2)
    path = trainer.save_weights_for_sampler("named").result().path
    prompt = types.ModelInput.from_ints(TEXT[0])
    params = types.SamplingParams(max_tokens=6, seed=1, stop=[])
    by_path = (
        service.create_sampling_client(model_path=path).result().sample(prompt, 1, params).result()
    )
    at_once = (
        trainer.save_weights_and_get_sampling_client().result().sample(prompt, 1, params).result()
    )
    assert by_path.sequences[0].tokens == at_once.sequences[0].tokens


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target_tokens": [300]}, "target_tokens must be from 0 to 259"),
        ({"weights": [float("nan")]}, "weights has numbers that are not finite"),
        ({"advantages": [1.0]}, "advantages is not an input of the loss"),
        ({"weights": [1.0, 1.0]}, r"weights has the shape \(2,\)"),
    ],
)
def test_data_that_do_not_fit_are_told_with_their_number(trainer, change, said):
    good = datum(TEXT[1])
    bad = types.Datum(
        model_input=types.ModelInput.from_ints([1]),
        loss_fn_inputs={"target_tokens": [2], "weights": [1.0], **change},
    )
    with pytest.raises(tinker.RequestFailedError, match=f"datum 1: {said}"):
        trainer.forward_backward([good, bad], "cross_entropy").result()
    assert trainer.forward_backward([good], "cross_entropy").result().metrics["loss:sum"] > 0


def test_what_is_not_carried_is_refused_with_the_clients_own_errors(
    service, server, policy, trainer
):
    with pytest.raises(
        tinker.RequestFailedError, match="'stable_reinforce' is not carried by this server"
    ):
        trainer.forward_backward([datum(TEXT[0])], "stable_reinforce").result()
    with pytest.raises(tinker.BadRequestError, match="is not served here"):
        service.create_lora_training_client("meta/large", rank=4).result()
    with pytest.raises(tinker.BadRequestError, match="--max-rank"):
        service.create_lora_training_client(str(policy), rank=4096).result()
    with pytest.raises(tinker.RequestFailedError, match="the longest sequence here has 256"):
        trainer.forward([datum([1] * 300)], "cross_entropy").result()
    sampler = service.create_sampling_client(base_model=str(policy)).result()
    prompt = types.ModelInput.from_ints(TEXT[0])
    with pytest.raises(tinker.RequestFailedError, match="there is room for 237"):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4000)).result()
    with pytest.raises(tinker.RequestFailedError, match=r"sampling_params\.temperature"):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, temperature=-1.0)).result()
    with pytest.raises(tinker.BadRequestError, match="a name has at most 200 letters"):
        trainer.save_state("../../etc").result()


def test_a_key_sees_its_own_only(server, trainer):
    """Another key is another owner: of models, weights and promises."""
    path = trainer.save_state("mine").result().path
    other = tinker.ServiceClient(base_url=server.url, api_key=KEY + "-other")
    with pytest.raises(tinker.NotFoundError):
        other.create_training_client_from_state(path).result()
    headers = {"X-API-Key": KEY + "-other"}
    with httpx.Client(base_url=f"{server.url}/api/v1", headers=headers) as http:
        assert (
            http.post("/retrieve_future", json={"request_id": f"{trainer.model_id}:0"}).status_code
            == 410
        )
        assert http.get(f"/training_runs/{trainer.model_id}").status_code == 404
        assert (
            http.post(
                "/optim_step", json={"model_id": trainer.model_id, "seq_id": 9, "adam_params": {}}
            ).status_code
            == 404
        )


def test_foreign_pages_and_oversized_bodies_are_refused(server):
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY}) as http:
        assert (
            http.get(
                "/get_server_capabilities", headers={"Origin": "https://elsewhere.example"}
            ).status_code
            == 403
        )
        assert (
            http.get("/get_server_capabilities", headers={"Host": "elsewhere.example"}).status_code
            == 403
        )
        large = http.post(
            "/forward_backward",
            content=b"x" * (5 << 20),
            headers={"Content-Type": "application/x-protobuf"},
        )
        assert large.status_code == 413
        bomb = zstandard.ZstdCompressor().compress(b"\0" * (64 << 20))
        sent = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
        assert http.post("/forward_backward", content=bomb, headers=sent).status_code == 413
        assert (
            http.post(
                "/forward_backward", content=b"\xff\xff", headers=sent | {"Content-Encoding": ""}
            ).status_code
            == 400
        )
        assert http.post("/optim_step", content=b"{").status_code == 400


def test_a_request_that_comes_twice_is_done_once_and_parts_wait_for_their_turn(trainer, server):
    """As a client that lost the answer sends it; the second part of a batch before the first;
    compressed."""
    data = [datum(tokens) for tokens in TEXT]

    def body(seq):
        request = types.ForwardBackwardRequest(
            types.ForwardBackwardInput(data=data, loss_fn="cross_entropy"),
            model_id=trainer.model_id,
            seq_id=seq,
        )
        return zstandard.ZstdCompressor().compress(
            forward_backward_request_to_proto(request).SerializeToString()
        )

    sent = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
    with httpx.Client(
        base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY}, timeout=60
    ) as http:
        late = http.post("/forward_backward", content=body(2), headers=sent).json()["request_id"]
        step = {"model_id": trainer.model_id, "seq_id": 3, "adam_params": {"learning_rate": 0.01}}
        names = {http.post("/optim_step", json=step).json()["request_id"] for _ in range(3)}
        first = [
            http.post("/forward_backward", content=body(1), headers=sent).json()["request_id"]
            for _ in range(2)
        ]
        assert len(names) == 1 and first[0] == first[1]
        answers = [
            http.post("/retrieve_future", json={"request_id": name})
            for name in (first[0], late, *names)
        ]
        losses = []
        for answer in answers[:2]:
            output = pb.ForwardBackwardOutput()
            output.ParseFromString(answer.content)
            losses.append(output.metrics["loss:sum"])
            assert (
                answer.headers["X-Weights-Version"] == "0"
                and len(answer.headers["X-Weights-Digest"]) == 32
            )
        assert losses[0] == losses[1]
        assert answers[2].json()["metrics"]["weights_version"] == 1.0
        assert answers[2].json()["weights_digest"] != answers[0].headers["X-Weights-Digest"]
        assert http.post("/optim_step", json=step).json()["request_id"] in names
