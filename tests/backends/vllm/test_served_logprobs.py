"""A teacher behind a URL: a server with a real model answers as vLLM does, and as others do, or not
as it should."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.algorithms.inference import LogprobInterface
from realhf.api.model import Model
from realhf.api.sample import SequenceSample
from realhf.backends.vllm import served_logprobs
from realhf.backends.vllm.served_logprobs import ServedLogprobInterface
from tests.algorithms.tiny_policy import context, tiny_actor

Answer = Callable[[dict[str, Any], list[float]], Any]


class Words:
    """A tokenizer of which the tests need to know what each id reads as."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return f" w{ids[0]}"


def rows(asked: dict[str, Any], values: list[float]) -> dict[str, Any]:
    """As vLLM says it: nothing of the first token, and of each other one by its id."""
    said = [
        {str(token): {"logprob": value, "rank": 1, "decoded_token": f" w{token}"}}
        for token, value in zip(asked["prompt"][1:], values, strict=True)
    ]
    return {"choices": [{"prompt_logprobs": [None, *said]}]}


def echo(asked: dict[str, Any], values: list[float]) -> dict[str, Any]:
    """As the OpenAI API says it, with a sampled token at the end."""
    tokens = [*(f"\u0120w{token}" for token in asked["prompt"]), "more"]
    return {"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": [None, *values, -0.5]}}]}


@cache
def model() -> Model:
    """The same for all tests: none trains it."""
    return tiny_actor()


class Quiet(ThreadingHTTPServer):
    """Says nothing of a client that hung up."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextmanager
def served(
    answer: Answer, *, refusals: int = 0, status: int = 503
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on the loopback, and what it was asked; the first ``refusals`` requests are turned
    away."""
    network = model().engine.model
    asked = []
    left = [refusals]
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def _send(self, body: Any, code: int = 200) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._send({"data": [{"id": "big"}]})

        @torch.no_grad()
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked.append(body | {"authorization": self.headers.get("Authorization")})
                left[0] -= 1
                if left[0] >= 0:
                    return self._send({"error": "busy"}, status)
                ids = torch.tensor([body["prompt"]])
                said = network(input_ids=ids).logits[0, :-1].log_softmax(-1)
            return self._send(answer(body, said.gather(1, ids[0, 1:, None]).flatten().tolist()))

        def log_message(self, *_: Any) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def batch() -> SequenceSample:
    """Sequences of several lengths; one trains nothing, one is a single token."""
    lengths = [[7, 1], [4, 9, 5]]
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(26, generator=generator) < 0.6
    mask[8:12] = False
    tensors = {
        "packed_input_ids": torch.randint(0, 50, (26,), generator=generator),
        "loss_mask": mask,
    }
    return SequenceSample.from_tensors(["a", "b"], tensors, dict.fromkeys(tensors, lengths))


def ask(url: str, **options: Any) -> tuple[SequenceSample, dict[str, float]]:
    reader = Model("actor", model().engine, Words())
    return ServedLogprobInterface(url, **options).inference(reader, batch(), context(Path()))


@pytest.mark.slow
@pytest.mark.parametrize("answer", [rows, echo])
def test_a_server_says_what_the_model_as_a_role_says(answer: Answer, tmp_path: Path) -> None:
    """Of the tokens that train; a sequence without one is not sent."""
    (tmp_path / "token").write_text("secret\n")
    with served(answer) as (url, asked):
        found, stats = ask(f"{url}/v1/", token_file=str(tmp_path / "token"))
    said, _ = LogprobInterface("teacher_logprobs").inference(model(), batch(), context(tmp_path))
    mask = torch.cat([part[1:] for part in batch()["loss_mask"].split([7, 1, 4, 9, 5])])
    assert found.seqlens == said.seqlens and not bool(found["teacher_logprobs"][~mask].any())
    torch.testing.assert_close(
        found["teacher_logprobs"][mask], said["teacher_logprobs"][mask], atol=1e-5, rtol=1e-5
    )
    assert sorted(len(each["prompt"]) for each in asked) == [5, 7, 9] and stats["n_tokens"] == 21
    assert {each["model"] for each in asked} == {"big"} and {
        each["authorization"] for each in asked
    } == {"Bearer secret"}


@pytest.mark.slow
def test_a_server_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_logprobs, "_PAUSES_S", (0.01, 0.01))
    with served(rows, refusals=2, status=429) as (url, asked):
        ask(url, served_model="mine", connections=1)
    assert len(asked) == 5 and {each["model"] for each in asked} == {"mine"}
    with (
        served(rows, refusals=99) as (url, _),
        pytest.raises(RuntimeError, match=r"teacher.url=.*answered 503: .*busy"),
    ):
        ask(url)
    with (
        served(rows, refusals=1, status=400) as (url, _),
        pytest.raises(RuntimeError, match="answered 400"),
    ):
        ask(url)
    with pytest.raises(
        RuntimeError, match=r"teacher.url=http://127.0.0.1:9/v1/models: ConnectError"
    ):
        ask("http://127.0.0.1:9")


def changed(change: Callable[[dict[str, Any]], Any]) -> Answer:
    """The answer of ``rows`` with its choice changed."""

    def answer(asked: dict[str, Any], values: list[float]) -> dict[str, Any]:
        found = rows(asked, values)
        change(found["choices"][0])
        return found

    return answer


WRONG: dict[str, tuple[Answer, str]] = {
    "no log-probabilities": (
        lambda asked, values: {"choices": [{"text": "hm"}]},
        "must support prompt_logprobs",
    ),
    "too few": (
        changed(lambda choice: choice["prompt_logprobs"].pop()),
        "has no log-probabilities of the",
    ),
    "of others": (
        changed(lambda choice: choice["prompt_logprobs"].__setitem__(1, {"51": {}})),
        "has no log-prob",
    ),
    "no choice": (lambda asked, values: [], "has no log-probabilities"),
    "another tokenizer": (
        lambda asked, values: json.loads(json.dumps(rows(asked, values)).replace(" w", " v")),
        r"is 'v\d+' there and 'w\d+' in the actor's tokenizer; .* must have the same tokenizer",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_an_answer_that_is_none_ends_the_call_with_its_cause(case: str) -> None:
    answer, told = WRONG[case]
    with served(answer) as (url, _), pytest.raises((RuntimeError, ValueError), match=told):
        ask(url)


@pytest.mark.slow
def test_a_silent_server_is_given_up_at_the_deadline() -> None:
    hold = threading.Event()

    def silent(asked: dict[str, Any], values: list[float]) -> Any:
        hold.wait(5)
        return {}

    with served(silent) as (url, _):
        with pytest.raises(
            TimeoutError,
            match=r"no answer about all 3 sequences within 0.2 s \(rpc.call_timeout_s\)",
        ):
            ask(url, timeout_s=0.2)
        hold.set()
