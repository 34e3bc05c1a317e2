"""Clients that mean harm, or are gone in the middle, and a disk that is full: each is refused by
itself, and the others go on."""

from __future__ import annotations

import json
import resource
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import tinker
import torch
from starlette.responses import Response
from starlette.testclient import TestClient
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from realhf.backends.training.torch_backend import load_causal_lm
from realhf.tinker.access import guard_rules
from realhf.tinker.channel import Drop, Job, Update
from realhf.tinker.compute import Computer
from realhf.tinker.options import ServerOptions
from realhf.tinker.sampling import Sampler
from realhf.tinker.training import TrainedModel, WeightsId
from realhf.tinker.wire import BadRequest, read_head, read_json, read_json_seq, read_pass
from realhf.web.guard import RequestGuard
from tests.tinker.conftest import KEY, Server
from tests.tinker.test_client import ADAM, TEXT, datum, steps

OWN = KEY + "-hostile"
PROTO = {"Content-Type": "application/x-protobuf"}
JSON = {"Content-Type": "application/json"}


def body(model, seq, data=None) -> bytes:
    data = data or [datum(tokens) for tokens in TEXT]
    request = types.ForwardBackwardRequest(
        types.ForwardBackwardInput(data=data, loss_fn="cross_entropy"), model_id=model, seq_id=seq
    )
    return forward_backward_request_to_proto(request).SerializeToString()


def raw(server, key=OWN) -> httpx.Client:
    return httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": key}, timeout=60)


def wait_for_result(http, name) -> httpx.Response:
    deadline = time.monotonic() + 60
    while (answer := http.post("/retrieve_future", json={"request_id": name})).status_code == 408:
        assert time.monotonic() < deadline
    return answer


@pytest.fixture(scope="module")
def service(server):
    return tinker.ServiceClient(base_url=server.url, api_key=OWN)


@pytest.fixture
def trainer(service, policy):
    return service.create_lora_training_client(str(policy), rank=4, seed=7).result()


@pytest.fixture(scope="module")
def strict(policy, tmp_path_factory):
    """A server with little room."""
    running = Server(
        policy,
        tmp_path_factory.mktemp("strict") / "root",
        "--max-pending",
        "3",
        "--max-saved-gib",
        "1e-3",
    )
    yield running
    running.kill()


# ---- quotas


def test_requests_in_their_order_have_a_quota_too(strict, policy):
    """A client that sends and never waits used to fill the memory: every request was the one that
    was expected next."""
    client = (
        tinker.ServiceClient(base_url=strict.url, api_key=KEY)
        .create_lora_training_client(str(policy))
        .result()
    )
    many = [datum(list(np.random.default_rng(0).integers(0, 250, 250))) for _ in range(40)]
    with raw(strict, KEY) as http:
        codes = [
            http.post(
                "/forward_backward", content=body(client.model_id, seq, many), headers=PROTO
            ).status_code
            for seq in range(1, 9)
        ]
        assert codes[:3] == [200] * 3 and 429 in codes[3:]


def test_the_first_of_a_batch_is_taken_when_the_others_have_filled_the_quota(strict, policy):
    """They wait for it; refused, all of them would wait for ever."""
    key = KEY + "-parts"
    client = (
        tinker.ServiceClient(base_url=strict.url, api_key=key)
        .create_lora_training_client(str(policy))
        .result()
    )
    with raw(strict, key) as http:
        later = [
            http.post("/forward_backward", content=body(client.model_id, seq), headers=PROTO)
            for seq in (2, 3, 4, 5)
        ]
        assert [each.status_code for each in later] == [200, 200, 200, 429]
        first = http.post("/forward_backward", content=body(client.model_id, 1), headers=PROTO)
        assert first.status_code == 200
        assert wait_for_result(http, later[2].json()["request_id"]).status_code == 200


def test_saved_weights_have_a_quota(strict, policy):
    service = tinker.ServiceClient(base_url=strict.url, api_key=KEY + "-saves")
    client = service.create_lora_training_client(str(policy), rank=64).result()
    steps(client, 1)
    with pytest.raises(tinker.BadRequestError, match=r"\(--max-saved-gib\): delete some"):
        for number in range(20):
            client.save_state(f"number-{number}").result()
    rest = service.create_rest_client()
    for each in rest.list_checkpoints(client.model_id).result().checkpoints:
        rest.delete_checkpoint_from_tinker_path(each.tinker_path).result()
    assert client.save_state("again").result().path == f"tinker://{client.model_id}/weights/again"


def test_a_gap_that_a_client_has_left_keeps_no_room(service, server, policy):
    """Three models of a key fit. Each of three waits for a request that never comes: the fourth is
    made all the same, and when the request comes after all, those behind it are done."""
    gone = [
        service.create_lora_training_client(str(policy), rank=4, seed=7).result() for _ in range(3)
    ]
    with raw(server) as http:
        late = [
            http.post("/forward_backward", content=body(each.model_id, 2), headers=PROTO)
            for each in gone
        ]
        assert [each.status_code for each in late] == [200] * 3
        fourth = service.create_lora_training_client(str(policy), rank=4, seed=7).result()
        assert steps(fourth, 1)
        assert (
            http.post(
                "/forward_backward", content=body(gone[0].model_id, 1), headers=PROTO
            ).status_code
            == 200
        )
        output = pb.ForwardBackwardOutput()
        output.ParseFromString(wait_for_result(http, late[0].json()["request_id"]).content)
        assert output.metrics["loss:sum"] > 0


def test_a_request_that_is_refused_holds_up_nothing_behind_it(trainer, service):
    """The client had given it a number, and goes on with the next: all that came behind it waited
    for ever."""
    expected = steps(trainer, 2)
    other = service.create_lora_training_client(
        trainer.get_info().model_name, rank=4, seed=7
    ).result()
    behind = []
    with pytest.raises(tinker.BadRequestError):
        sent = other.save_state("../../etc")
        behind.append(
            (
                other.forward_backward([datum(tokens) for tokens in TEXT], "cross_entropy"),
                other.optim_step(ADAM),
            )
        )
        sent.result()
    assert behind[0][0].result(timeout=60).metrics["loss:sum"] == expected[0][0]
    with pytest.raises(tinker.NotFoundError):
        other.load_state("tinker://s-nobody:train:0/weights/none").result()
    assert other.forward([datum(TEXT[0])], "cross_entropy").result(timeout=60)
    assert behind[0][1].result(timeout=60).metrics["grad_norm"] == expected[0][1]


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large_holds_up_nothing_behind_it(trainer, server, declared):
    """Its number stands at its beginning; what was sent behind it waited for ever."""
    parts = 5 * [body(trainer.model_id, 1) + b"\0" * (1 << 20)]
    with raw(server) as http:
        late = http.post(
            "/forward_backward", content=body(trainer.model_id, 2), headers=PROTO
        ).json()["request_id"]
        large = b"".join(parts) if declared else iter(parts)
        told = http.post("/forward_backward", content=large, headers=PROTO)
        assert told.status_code == 413
        assert wait_for_result(http, late).status_code == 200
        told = wait_for_result(http, f"{trainer.model_id}:1").json()
        assert "MiB" in told["error"] or "bytes" in told["error"]


# ---- what is kept


def test_weights_saved_again_under_a_name_are_the_new_ones(trainer, service):
    """The folder had the name of the weights, and the sampler kept what it had loaded from it."""
    prompt, rest = types.ModelInput.from_ints(TEXT[0]), service.create_rest_client()

    def scored():
        path = trainer.save_weights_for_sampler("same-name").result().path
        values = (
            service.create_sampling_client(model_path=path)
            .result()
            .compute_logprobs(prompt)
            .result()
        )
        rest.delete_checkpoint_from_tinker_path(path).result()
        return values

    before = scored()
    steps(trainer, 6)
    after = scored()
    trained = (
        trainer.forward([datum(TEXT[0])], "cross_entropy")
        .result()
        .loss_fn_outputs[0]["logprobs"]
        .to_numpy()
    )
    np.testing.assert_allclose(after[1:], trained, atol=1e-4)
    assert np.abs(np.subtract(after[1:], before[1:])).max() > 1e-2


def test_a_step_or_load_whose_state_cannot_be_kept_has_been_made(policy, tmp_path):
    """Reported as a failure, a client would make the step twice, and a load that had failed was one
    all the same. The server that is killed then goes on from an earlier state."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "state").write_text("no folder can be made here")
    server = Server(policy, root, "--state-every-s", "0")
    try:
        client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        client = client.create_lora_training_client(str(policy), rank=4, seed=7).result()
        first = steps(client, 3)
        assert first[2][0] < first[0][0]
        client.load_state(client.save_state("named").result().path).result()
        server.kill()
        server.start()
        assert steps(client, 1)[0][0] < first[2][0]
    finally:
        server.kill()


def test_a_load_that_fails_half_way_leaves_no_digest_behind():
    """The digest was that of the weights before."""
    model = TrainedModel.__new__(TrainedModel)
    model._weights_id = WeightsId(1, "before")

    def load_checkpoint(folder):
        raise ValueError("half of it")

    model._engine = SimpleNamespace(load_checkpoint=load_checkpoint)
    with pytest.raises(ValueError, match="half of it"):
        model.load(Path("folder"), moments=True)
    assert model._weights_id is None


def test_a_step_that_fails_drops_the_gradients():
    """It left them, and they came into the next one."""

    def step(options):
        raise RuntimeError("no room")

    dropped = []
    model = TrainedModel.__new__(TrainedModel)
    model._engine = SimpleNamespace(forget_gradients=lambda: dropped.append(1), step=step)
    model.missing = ""
    for params, error, said in (
        ({"beta1": 2.0}, BadRequest, "beta1=2"),
        ({}, RuntimeError, "no room"),
    ):
        with pytest.raises(error, match=said):
            model.update(params)
    assert len(dropped) == 2


def test_a_model_is_gone_where_something_is_not_done_again():
    """What stood behind it was done with other weights."""

    def fails(params):
        raise MemoryError("no more")

    computer = Computer.__new__(Computer)
    told = []
    computer._heap = SimpleNamespace(trim=lambda: None)
    computer._reply = lambda done, *body: told.append(done)
    computer._round_robin = deque()
    for again in (False, True):
        computer._models = {"m": SimpleNamespace(update=fails)}
        computer._queues = {"m": deque([(Job(1, Update("m", {}), again), b"")])}
        computer._run_next("m")
        assert ("m" not in computer._models) == again
    computer._run(Drop("m"), b"")  # nothing was accumulated by a model that is not there


@pytest.mark.parametrize(
    ("rate", "status"), [("null", 400), ('"fast"', 400), ("NaN", 200), ("Infinity", 200)]
)
def test_a_step_that_cannot_be_read_holds_up_nothing_behind_it(trainer, server, rate, status):
    """The client writes NaN as null. It was refused outside of the numbering: all that came behind
    it waited for ever."""
    head = f'{{"model_id": "{trainer.model_id}", "seq_id": 1, "type": "optim_step"'
    with raw(server) as http:
        late = http.post(
            "/forward_backward", content=body(trainer.model_id, 2), headers=PROTO
        ).json()["request_id"]
        step = f'{head}, "adam_params": {{"learning_rate": {rate}}}}}'
        assert http.post("/optim_step", content=step, headers=JSON).status_code == status
        assert wait_for_result(http, late).status_code == 200
        told = http.post(
            "/optim_step", content=head.replace('"seq_id": 1', '"seq_id": 3') + "}", headers=JSON
        )
        assert told.status_code == 400


def test_the_client_goes_on_behind_a_step_that_is_no_number(trainer):
    with pytest.raises((tinker.TinkerError, ValueError)):
        trainer.optim_step(types.AdamParams(learning_rate=float("nan"))).result(timeout=60)
    assert steps(trainer, 1)[0][0] > 0


@pytest.mark.parametrize(
    "content",
    ["whole", "declared", "chunked", "no JSON", "path", "proto", "late"],
)
def test_whatever_is_refused_counts_its_number(trainer, server, content):
    """All 4xx: a body that is too large, unreadable, without a known path, or of another type."""
    model = trainer.model_id
    path = "/save_weights"
    headers = JSON
    status = 413
    large = "x" * (2 << 20)
    given = f'{{"model_id": "{model}", "seq_id": 1, "path": "{large}"}}'.encode()
    if content == "chunked":
        given = iter([given[: 1 << 19], given[1 << 19 :]])
    elif content == "late":
        given = (
            f'{{"path": "{large}", "user_metadata": {{"seq_id": "7"}}, "model_id": "{model}", '
            f'"seq_id": 1}}'.encode()
        )
    elif content == "no JSON":
        given = f'{{"model_id": "{model}", "seq_id": 1, "path": ,,,'.encode()
        status = 400
    elif content == "path":
        given = f'{{"model_id": "{model}", "seq_id": 1}}'.encode()
        path = "/from_another_version"
        status = 404
    elif content == "proto":
        given = body(model, 1)[:-3]
        path = "/forward_backward"
        headers = PROTO
        status = 400
    elif content == "whole":
        given = f'{{"model_id": "{model}", "seq_id": 1}}'.encode()
        path = "/forward_backward"
        status = 415
    with raw(server) as http:
        late = http.post("/forward_backward", content=body(model, 2), headers=PROTO).json()[
            "request_id"
        ]
        assert http.post(path, content=given, headers=headers).status_code == status
        assert wait_for_result(http, late).status_code == 200


def test_a_body_of_another_type_is_not_read_as_far_as_data(server):
    """64 MiB of JSON were parsed, into twenty times the memory, to find the number of what was
    refused. Here a body may have 4 MiB where it has data."""
    with raw(server) as http:
        parts = iter([b"[", *[b"{}," * (1 << 18)] * 6, b"{}]"])
        assert http.post("/forward_backward", content=parts, headers=JSON).status_code == 415


def test_a_body_names_few_models():
    """Every name of a body was looked up, one after another: a million of them kept everybody
    waiting."""
    names = [f'{{"model_id": "{number % 5000}"}},'.encode() for number in range(20_000)]
    models, seq = read_json_seq(b"[" + b"".join(names))
    assert (models, seq) == ([str(number) for number in range(8)], None)


@pytest.mark.parametrize("path", ["healthz", "download/a/b/c"])
def test_who_has_no_key_sends_no_bodies(policy, tmp_path, path):
    """Paths that are open to read were open to write, too: a stranger filled the room for
    bodies."""
    (tmp_path / "keys").write_text(f"{KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    options = ServerOptions(
        model=str(policy), root=str(tmp_path / "root"), token_file=str(tmp_path / "keys")
    )
    asked = []

    async def app(scope, receive, send):
        asked.append(scope["method"])
        await Response()(scope, receive, send)

    http = TestClient(RequestGuard(app, guard_rules(options)), base_url="http://127.0.0.1")
    assert http.get(f"/api/v1/{path}").status_code == 200
    assert http.post(f"/api/v1/{path}", content=b"x").status_code == 401
    assert http.post(f"/api/v1/{path}", content=b"x", headers={"X-API-Key": KEY}).status_code == 200
    assert asked == ["GET", "POST"]


def test_a_pass_that_fails_fails_the_next_step(trainer, service, policy):
    """A call of more than 1,024 data is several requests: the step behind it was made with the
    gradient of some."""
    good = [datum(tokens) for tokens in TEXT]
    n = len(TEXT[1]) - 1
    inputs = {"target_tokens": TEXT[1][1:], "logprobs": [-1e30] * n, "advantages": [0.0] * n}
    bad = types.Datum(model_input=types.ModelInput.from_ints(TEXT[1][:-1]), loss_fn_inputs=inputs)
    trainer.forward_backward(good, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="nothing of this was added"):
        trainer.forward_backward([bad], "importance_sampling").result()
    with pytest.raises(
        tinker.RequestFailedError, match=r"dropped, send the whole batch again: a forward_backward"
    ):
        trainer.optim_step(ADAM).result()
    with pytest.raises(tinker.RequestFailedError):
        trainer.forward([bad], "importance_sampling").result()
    trainer.forward_backward(good, "cross_entropy").result()
    norm = trainer.optim_step(ADAM).result().metrics["grad_norm"]
    other = service.create_lora_training_client(str(policy), rank=4, seed=7).result()
    assert norm == steps(other, 1)[0][1]


def test_one_bad_datum_of_many_fails_the_whole_call(trainer):
    """The client sends 1,024 data in a request: those of the others had been added."""
    many = [datum([1, 2])] * 1025 + [datum([1, 999])]
    failed = trainer.forward_backward(many, "cross_entropy")
    step = trainer.optim_step(ADAM)
    with pytest.raises(tinker.RequestFailedError):
        failed.result(timeout=60)
    with pytest.raises(tinker.RequestFailedError, match="no step was made"):
        step.result(timeout=60)
    first = trainer.save_weights_for_sampler("unchanged").result()
    assert first.path and steps(trainer, 1)[0][0] > 0


def test_a_full_disk_loses_no_promise(policy, tmp_path):
    """What was computed cannot be written down: the server says so and ends, and the next one has
    the result."""
    server = Server(policy, tmp_path / "root", "--max-sequence", "256")
    try:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        client = service.create_lora_training_client(str(policy), rank=4, seed=7).result()
        steps(client, 5)
        with raw(server, KEY) as http:
            many = [datum(list(range(200))) for _ in range(60)]
            sent = http.post(
                "/forward_backward", content=body(client.model_id, 11, many), headers=PROTO
            )
            most = (tmp_path / "root" / "server.sqlite-wal").stat().st_size
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (most, most))
            server.process.wait(60)
        assert server.process.returncode == 1
        assert "what was computed cannot be written down" in server.log.read_text()
        server.start()
        with raw(server, KEY) as http:
            output = pb.ForwardBackwardOutput()
            output.ParseFromString(wait_for_result(http, sent.json()["request_id"]).content)
            assert output.metrics["tokens:sum"] == 60 * 199
    finally:
        server.kill()


def test_a_model_is_unloaded_once_however_often_it_is_asked(trainer, server):
    steps(trainer, 1)
    with raw(server) as http:
        told = [
            http.post("/unload_model", json={"model_id": trainer.model_id}).json()["request_id"]
            for _ in range(3)
        ]
        assert len({*told}) == 1 and wait_for_result(http, told[0]).json()["type"] == "unload_model"
        assert (
            http.post("/unload_model", json={"model_id": trainer.model_id}).json()["request_id"]
            == told[0]
        )
        assert (
            http.post(
                "/forward_backward", content=body(trainer.model_id, 9), headers=PROTO
            ).status_code
            == 400
        )


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"eps": 0.0}, "eps=0.0 must be 1e-16 or more"),
        ({"learning_rate": 1e39}, "must be 1000 or less"),
        ({"learning_rate": 1e3, "weight_decay": 1.0}, "times the learning_rate is more than 1"),
    ],
)
def test_a_step_that_makes_weights_without_values_is_refused(trainer, params, said):
    """It was answered as done, and every pass behind it failed. The next one begins with
    nothing."""
    given = {"learning_rate": 1e-3} | params
    zero = [datum(tokens, 0.0) for tokens in TEXT]
    trainer.forward_backward(zero, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match=said):
        trainer.optim_step(types.AdamParams(**given)).result()
    assert all(np.isfinite(each).all() for each in steps(trainer, 2))


def test_weights_that_are_not_finite_are_no_success():
    model = TrainedModel.__new__(TrainedModel)
    model.missing = ""
    model._weights_id = None
    result = SimpleNamespace(skipped=False, grad_norm=1.0, stats={"lr": 1.0})
    tensors = {"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])}
    model._engine = SimpleNamespace(
        step=lambda options: result, version=1, adapters=None, weights=lambda: tensors
    )
    with pytest.raises(FloatingPointError, match="load a saved state"):
        model.update({})
    tensors["b"] = torch.ones(1)
    assert model.update({})["grad_norm"] == 1.0


# ---- bodies


def parsed(given: bytes):
    return read_pass(given, vocabulary=260, longest=256)


def test_a_message_of_very_many_parts_is_refused_before_it_is_parsed():
    """Two bytes of a body took a hundred of memory, at any depth."""
    head = pb.ForwardBackwardRequest(
        model_id="m", seq_id=3, loss_fn="cross_entropy"
    ).SerializeToString()
    number = pb.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number
    empty = bytes([number << 3 | 2, 0])
    with pytest.raises(BadRequest, match="more than 262144 parts"):
        parsed(head + empty * 300_000)
    with pytest.raises(BadRequest, match="more than 262144 parts"):
        read_head(head + empty * 300_000)
    inner = bytes([pb.Datum.DESCRIPTOR.fields_by_name["model_input"].number << 3 | 2, 0]) * 300_000
    datum = pb.ForwardBackwardRequest()
    datum.data.add().ParseFromString(inner)
    deep = head + datum.SerializeToString()
    assert read_head(deep).seq == 3  # nobody looks into the data on the way
    with pytest.raises(BadRequest, match="more than 262144 parts"):
        parsed(deep)


@pytest.mark.parametrize("cut", [1, 2, 7, 40])
def test_a_message_that_ends_too_early_is_refused(cut):
    whole = body("m", 1)
    assert read_head(whole).model == "m" and len(parsed(whole).data) == len(TEXT)
    for read in (read_head, parsed):
        with pytest.raises(BadRequest):
            read(whole[:-cut])


def test_a_sparse_tensor_stands_for_no_more_than_the_tokens():
    """Twenty bytes stood for half a GiB."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    message.ParseFromString(body("m", 1))
    tensor = message.data[0].loss_fn_inputs["weights"]
    rows = len(TEXT[0]) - 1
    tensor.Clear()
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.shape.extend([rows, 1 << 26])
    tensor.sparse_csr.crow_indices = np.zeros(rows + 1, np.int64).tobytes()
    with pytest.raises(BadRequest, match=r"weights has the shape \(18, 67108864\), for 18 tokens"):
        parsed(message.SerializeToString())


def test_targets_of_a_request_are_bounded_as_they_are_padded():
    """One wide datum made all others as wide."""
    wide = np.zeros((250, 1024), np.int64)
    one = types.Datum(
        model_input=types.ModelInput.from_ints([1] * 250),
        loss_fn_inputs={"target_tokens": wide, "weights": np.zeros((250, 1024), np.float32)},
    )
    with pytest.raises(
        BadRequest, match="positions with up to 1024 targets each are too many at once"
    ):
        parsed(body("m", 1, [one, *[datum([1] * 250)] * 70]))


def test_json_of_very_many_values_is_told_in_one_line():
    given = json.dumps(
        {"prompt": {"chunks": [{}] * 5000}, "sampling_params": {}, "num_samples": 1}
    ).encode()
    with pytest.raises(BadRequest, match="most of the body is no SampleRequest"):
        read_json(types.SampleRequest, given)
    with pytest.raises(BadRequest, match="more than 1048576 values"):
        read_json(types.SampleRequest, b"[" + b"0," * (1 << 20) + b"0,0]")


def test_small_requests_have_small_bodies_and_numbers_their_range(server, trainer):
    with raw(server) as http:
        assert http.post("/create_session", content=b" " * (2 << 20)).status_code == 413
        step = {"model_id": trainer.model_id, "seq_id": 10**30, "adam_params": {}}
        assert http.post("/optim_step", json=step).status_code == 400
        session = trainer.model_id.partition(":")[0]
        for number in (-1, 10**30):
            given = {"session_id": session, "sampling_session_seq_id": number, "base_model": "x"}
            assert http.post("/create_sampling_session", json=given).status_code == 400


# ---- sampling


def test_a_temperature_near_0_disturbs_nobody(service, policy):
    """Its logits left the range of fp32, and everybody who sampled from the same weights failed
    with it."""
    sampler = service.create_sampling_client(base_model=str(policy)).result()
    prompt = types.ModelInput.from_ints(TEXT[0])
    long = sampler.sample(prompt, 4, types.SamplingParams(max_tokens=200, seed=1, stop=[]))
    with pytest.raises(tinker.RequestFailedError, match=r"must be 0, or 0\.001 or more"):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, temperature=1e-40)).result()
    assert [len(each.tokens) for each in long.result().sequences] == [200] * 4
    with pytest.raises(tinker.RequestFailedError, match="strings, of 1 to 256 letters"):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, stop="x" * 300)).result()


@pytest.mark.slow
def test_a_prompt_as_long_as_the_context_is_scored(policy):
    """The client asks for a token behind it, and drops that; there was no room, so that it was
    refused."""
    sampler = sampler_of(policy)
    answers = {}
    params = types.SamplingParams(max_tokens=1)
    for number, length in enumerate((256, 255)):
        prompt = types.ModelInput.from_ints(([5, 7] * 128)[:length])
        request = asked(prompt=prompt, sampling_params=params, prompt_logprobs=True)
        sampler.submit(
            number, "", request, lambda number, answer, held: answers.update({number: answer})
        )
    while sampler.busy:
        sampler.step()
    found = []
    for number in range(2):
        response = pb.SampleResponse()
        response.ParseFromString(answers[number])
        found.append(
            (np.frombuffer(response.prompt_logprobs, np.float32), len(response.sequences[0].tokens))
        )
    (whole, drawn), (most, one) = found
    assert (len(whole), drawn, one) == (256, 0, 4)
    np.testing.assert_allclose(whole[1:255], most[1:], atol=1e-4)
    assert np.isfinite(whole[1:]).all()
    with pytest.raises(BadRequest, match="there is room for 0"):
        full = types.ModelInput.from_ints([5, 7] * 128)
        sampler.submit(2, "", asked(prompt=full, sampling_params=params), lambda *answer: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1.0), ("top_p", 0.0), ("top_k", -5), ("max_tokens", 0)]
)
def test_what_is_out_of_range_is_named_as_the_client_names_it(policy, name, value):
    given = {"max_tokens": 2} | {name: value}
    with pytest.raises(BadRequest, match=rf"sampling_params\.{name}"):
        sampler_of(policy).submit(1, "", asked(sampling_params=given), lambda *answer: None)


def test_a_stop_string_is_found_whose_letters_have_several_bytes(policy):
    """A letter may be as many tokens."""
    from transformers import AutoTokenizer

    sampler = Sampler.__new__(Sampler)
    tokenizer = sampler._tokenizer = AutoTokenizer.from_pretrained(policy)
    for text in ("日本語", "né", "abc"):
        ids = [
            *tokenizer.encode("so: ", add_special_tokens=False),
            *tokenizer.encode(text, add_special_tokens=False),
        ]
        assert sampler._ends_with_stop(SimpleNamespace(token_ids=ids), (text,))
        assert not sampler._ends_with_stop(SimpleNamespace(token_ids=ids[:-1]), (text,))


def sampler_of(policy, **more) -> Sampler:
    base = load_causal_lm(str(policy), "tinker", torch.float32)
    return Sampler(base, None, end_tokens=frozenset(), longest=256, **more)


def asked(**more):
    prompt = types.ModelInput.from_ints([1, 2, 3])
    params = types.SamplingParams(max_tokens=2, seed=1, stop=[])
    return types.SampleRequest.model_validate({"prompt": prompt, "sampling_params": params} | more)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"shape": [2, 1_500_000_000]},
            r"has the shape \(2, 1500000000\), for a prompt of 3 tokens",
        ),
        ({"shape": [5, 2]}, r"has the shape \(5, 2\)"),
        ({"shape": [2, 0]}, r"has the shape \(2, 0\)"),
        ({"shape": [2]}, r"has the shape \(2,\)"),
        ({"shape": None}, r"has the shape \(0,\)"),
        ({"sparse_col_indices": None}, "sparse_col_indices are missing"),
    ],
)
def test_a_sparse_tensor_of_a_prompt_is_looked_at_before_it_is_spread(policy, change, said):
    """Two hundred bytes took 12 GB, and the process that computes with them; without columns it was
    a fault of the server."""
    tensor = {
        "data": [],
        "dtype": "int64",
        "shape": [2, 3],
        "sparse_crow_indices": [0, 0, 0],
        "sparse_col_indices": [],
    }
    sampler = sampler_of(policy)
    sampler.submit(1, "", asked(target_prompt_logprobs=tensor), lambda *answer: None)
    with pytest.raises(BadRequest, match=said):
        sampler.submit(2, "", asked(target_prompt_logprobs=tensor | change), lambda *answer: None)


def test_samples_that_only_wait_have_not_begun(policy):
    """All that had come were blamed when the process that computes died: the second time, all of
    them had failed."""
    began = []
    ended = []
    # room for a single row
    sampler = sampler_of(policy, max_bytes=lambda: 1, on_start=began.append)
    for number in range(3):
        sampler.submit(
            number, "", asked(num_samples=2), lambda number, *answer: ended.append(number)
        )
    sampler.step()
    assert began == [0]
    while sampler.busy:
        sampler.step()
        assert began in (ended, [*ended, len(ended)])
    assert began == ended == [0, 1, 2]


def test_waiting_requests_are_not_all_unfolded_at_once(policy):
    """Each sequence of each of them had a copy of its prompt, before the first could begin."""
    sampler = sampler_of(policy, max_bytes=lambda: 1)
    for number in range(5):
        sampler.submit(number, "", asked(num_samples=600), lambda *answer: None)
    sampler.step()
    assert len(sampler._joining) == 2 * 600 - 1 and len(sampler._waiting) == 3
    assert len({id(turn.request.token_ids) for _, turn in sampler._joining}) == 2


@pytest.mark.parametrize("fails", ["step", "join"])
def test_an_error_of_those_in_play_is_none_of_those_that_wait(policy, monkeypatch, fails):
    """All had failed that had come. Where there is no room, it is the one with the longest rows
    that wants it."""
    ended = {}
    done = lambda number, answer, held: ended.update({number: answer})
    sampler = sampler_of(policy, max_bytes=lambda: 1)
    params = [types.SamplingParams(max_tokens=n, seed=1, stop=[]) for n in (2, 4, 2)]
    for number, each in enumerate(params):
        sampler.submit(number, "", asked(sampling_params=each), done)

    def failing(*given):
        monkeypatch.undo()
        raise RuntimeError("no more memory")

    monkeypatch.setattr(sampler._weights.core, fails, failing)
    while sampler.busy:
        sampler.step()
    assert [isinstance(ended[number], bytes) for number in range(3)] == (
        [False, True, True] if fails == "step" else [True, False, True]
    )


def test_lists_of_likeliest_tokens_hold_up_nobody(service, policy):
    """Each of many sequences is looked at once more when it has ended: between the tokens of the
    others, with the lists that a pass over the whole makes. An answer of gigabytes is refused."""
    sampler = service.create_sampling_client(base_model=str(policy)).result()
    prompt = types.ModelInput.from_ints(TEXT[0])
    params = types.SamplingParams(max_tokens=3, temperature=0.7, seed=3, stop=[])
    many = sampler.sample(prompt, 200, params, topk_sample_logprobs=2)
    other = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, seed=1, stop=[]))
    assert len(other.result().sequences[0].tokens) == 4
    assert not many.future().done(), "the other one waited for 200 passes"
    for each in many.result().sequences:
        assert len(each.tokens) == len(each.topk_logprobs) == 3
        for token, logprob, likeliest in zip(
            each.tokens, each.logprobs, each.topk_logprobs, strict=True
        ):
            (first, best), (_, second) = likeliest
            assert best >= second and best >= logprob - 1e-4
            assert token != first or best == pytest.approx(logprob, abs=1e-4)
    with pytest.raises(
        tinker.RequestFailedError, match="places in all; an answer has at most 4194304"
    ):
        sampler.sample(
            prompt, 1000, types.SamplingParams(max_tokens=100), topk_sample_logprobs=50
        ).result()
