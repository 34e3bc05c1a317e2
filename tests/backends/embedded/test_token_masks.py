"""Turns under a grammar: what they may sample, with which log-probabilities, and in which
company."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.embedded.continuous_batching import ContinuousGenerator
from realhf.backends.embedded.generation import EmbeddedGenerator
from realhf.backends.embedded.token_masks import (
    GrammarProblem,
    TokenMask,
    TokenMasks,
    mask_logits,
)
from tests.backends.embedded.test_continuous_batching import Client, running
from tests.rollout.black_box import chat

pytest.importorskip("llguidance", reason="make install installs it")

YES_OR_NO = 'start: "yes" | "no"'
DIGITS = "start: /[0-9]{3,40}/"
STOP = chat().stop_ids[0]
SHORT = GenConfig(max_new_tokens=60)


def vocabulary() -> int:
    """More logits than the tokenizer has tokens, as in most models."""
    return len(chat()._tokenizer) + 7


@cache
def masks() -> TokenMasks:
    return TokenMasks(chat()._tokenizer, chat().stop_ids, vocabulary())


@pytest.fixture
def model() -> Any:
    from tests.rollout.test_answer_rules import small_model

    return small_model(vocabulary())


def request(slot: int, grammar: str = "", **more: Any) -> GenRequest:
    return GenRequest(slot, [40 + slot, 50, 60], seed=slot, grammar=grammar, **more)


def submit(client: Client, asked: GenRequest, config: GenConfig = SHORT) -> None:
    client.submit(asked, config, chat().stop_ids)


def logits_after(model: Any, prefix: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Logits from which each of ``tokens`` was sampled, by a whole forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prefix, *tokens]])).logits[0].float()
    return logits[len(prefix) - 1 : -1]


def allowed_by(grammar: str, tokens: Sequence[int]) -> list[list[int]]:
    """Tokens that the grammar of single characters allows at each of ``tokens``, found by trying
    every token's text in a matcher of the package itself."""
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    tokenizer = from_tokenizer(
        chat()._tokenizer, n_vocab=vocabulary(), eos_token=list(chat().stop_ids)
    )
    found = []
    for place in range(len(tokens)):
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
        assert matcher.consume_tokens(list(tokens[:place]))
        found.append(
            [
                token
                for token in range(len(chat()._tokenizer))
                if (
                    matcher.is_accepting()
                    if token == STOP
                    else matcher.validate_tokens([token]) == 1
                )
            ]
        )
    return found


def test_both_log_probabilities_are_those_of_a_plain_computation(model: Any) -> None:
    """``logprobs`` under the softmax over the allowed tokens, ``unmasked_logprobs`` under that over
    all of them, at the sampling temperature."""
    config = GenConfig(max_new_tokens=60, temperature=0.7)
    with running(model, masks=masks()) as client:
        for slot, grammar in enumerate((DIGITS, YES_OR_NO, DIGITS)):
            submit(client, request(slot, grammar), config)
        for slot, grammar in enumerate((DIGITS, YES_OR_NO, DIGITS)):
            output = client.output(slot)
            assert output.finish_reason == "stop" and output.token_ids[-1] == STOP
            scaled = logits_after(model, request(slot).token_ids, output.token_ids) / 0.7
            ids = torch.tensor(output.token_ids)[:, None]
            plain = scaled.log_softmax(-1).gather(1, ids)[:, 0]
            torch.testing.assert_close(
                torch.tensor(output.unmasked_logprobs), plain, atol=1e-4, rtol=0
            )
            for place, allowed in enumerate(allowed_by(grammar, output.token_ids)):
                own = scaled[place, allowed].log_softmax(-1)[allowed.index(output.token_ids[place])]
                assert output.logprobs[place] == pytest.approx(float(own), abs=1e-4)
            assert any(
                a > b + 1
                for a, b in zip(output.logprobs, output.unmasked_logprobs or (), strict=True)
            )


def test_masked_samples_have_the_masked_frequencies(model: Any) -> None:
    """Of many turns as many begin with each digit as the softmax over digits says."""
    count = 400
    with running(model, masks=masks()) as client:
        for seed in range(count):
            asked = GenRequest(seed, [40, 50, 60], seed=seed, grammar="start: /[0-9]/")
            submit(client, asked, GenConfig(max_new_tokens=1))
        outputs = [client.output(seed) for seed in range(count)]
    digits = [chat().encode(str(digit))[0] for digit in range(10)]
    logits = logits_after(model, [40, 50, 60], [0])[0]
    expected = logits[digits].softmax(-1)
    seen = torch.tensor([sum(o.token_ids == [digit] for o in outputs) for digit in digits]) / count
    assert float((seen - expected).abs().max()) < 4 * (0.25 / count) ** 0.5


def test_free_turns_are_not_touched_by_the_masks_of_others(model: Any) -> None:
    """Their tokens are those that they get alone, and their log-probabilities are one."""
    with running(model, masks=masks()) as client:
        for slot in range(6):
            submit(client, request(slot, DIGITS if slot % 2 else ""))
        outputs = {slot: client.output(slot) for slot in range(6)}
    for slot in (0, 2, 4):
        alone = EmbeddedGenerator(model).generate(
            [request(slot)], SHORT, stop_ids=chat().stop_ids, seed=0
        )[0]
        assert outputs[slot].token_ids == alone.token_ids
        assert outputs[slot].unmasked_logprobs is None
        assert outputs[slot].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    for slot in (1, 3, 5):
        assert chat().decode(outputs[slot].token_ids).isdigit()


def test_an_interrupted_turn_goes_on_in_its_grammar(model: Any) -> None:
    with running(model, masks=masks()) as client:
        submit(client, request(0, DIGITS))
        whole = client.output(0)
        for made in range(1, len(whole.token_ids)):
            prefix = [*request(0).token_ids, *whole.token_ids[:made]]
            client.engine.free([0])
            submit(client, GenRequest(0, prefix, made, 0, grammar=DIGITS))
            rest = client.output(0)
            assert rest.token_ids == whole.token_ids[made:]
            assert rest.logprobs == pytest.approx(whole.logprobs[made:], abs=1e-4)
        submit(client, GenRequest(0, [5, 6], 1, 0, grammar=DIGITS))
        assert isinstance(client.result(0), GrammarProblem), "6 is no digit"


def test_a_grammar_that_fails_ends_its_own_turn_only(model: Any) -> None:
    """One that does not compile, that names a token which the model does not have, or that meets an
    option which bans the end of the turn. Their neighbour goes on."""
    with running(model, masks=masks()) as client:
        submit(client, request(0, DIGITS))
        submit(client, request(1, "start: nowhere"))
        submit(client, request(2, YES_OR_NO), GenConfig(max_new_tokens=9, min_new_tokens=2))
        submit(client, request(3, "start: <[9999]>"))
        problem = client.result(1)
        assert isinstance(problem, GrammarProblem) and "nowhere" in str(problem)
        assert "gen.min_new_tokens" in str(client.result(2))
        assert isinstance(client.result(3), GrammarProblem)
        assert chat().decode(client.output(0).token_ids).isdigit()
        submit(client, request(4, YES_OR_NO))
        assert chat().decode(client.output(4).token_ids) in ("yes", "no")


class Failing(TokenMask):
    """A mask that allows digits and fails at the n-th token, as it is filled or accepted."""

    def __init__(self, fills: int = 99, accepts: int = 99) -> None:
        super().__init__(masks().start("start: /[0-9]*/ /b/")._matcher)
        self._left = {"fill": fills, "accept": accepts}

    def fill(self, packed: Any) -> None:
        self._count("fill")
        super().fill(packed)

    def accept(self, token: int) -> None:
        self._count("accept")
        super().accept(token)

    def _count(self, name: str) -> None:
        self._left[name] -= 1
        if not self._left[name]:
            raise GrammarProblem("the token mask failed: too complex")


@pytest.mark.parametrize(
    ("failing", "tokens"),
    [({"fills": 1}, 1), ({"fills": 4}, 4), ({"accepts": 1}, 1), ({"accepts": 3}, 3)],
    ids=str,
)
def test_a_mask_that_fails_cuts_its_own_turn_off(
    model: Any, failing: dict[str, int], tokens: int
) -> None:
    """At any token, with the probabilities of what was sampled; its neighbours go on."""

    class SomeFail(TokenMasks):
        def start(self, grammar: str, sampled: Sequence[int] = ()) -> Any:
            return Failing(**failing) if grammar == "fails" else super().start(grammar, sampled)

    own = SomeFail(chat()._tokenizer, chat().stop_ids, vocabulary())
    with running(model, masks=own) as client:
        for slot, grammar in enumerate((DIGITS, "fails", "")):
            submit(client, request(slot, grammar))
        output = client.output(1)
        assert output.finish_reason == "length" and output.mask_failed
        assert len(output.token_ids) == len(output.logprobs) == len(output.versions) == tokens
        if "fills" in failing:
            unmasked = (output.unmasked_logprobs or [])[-1]
            assert output.logprobs[-1] == pytest.approx(unmasked, abs=1e-4), "sampled freely"
        beside = client.output(0)
        assert chat().decode(beside.token_ids).isdigit() and not beside.mask_failed
        assert client.output(2).token_ids
        submit(client, request(1, YES_OR_NO))
        assert client.output(1).finish_reason == "stop", "the row is free again"


def test_turns_of_one_grammar_do_not_use_up_the_limits_of_each_other() -> None:
    """The copies of a matcher share the states of its lexer. A turn that meets their limit goes on
    with a matcher of its own; one that reaches it alone fails, also when it is continued."""

    class Limited:
        """Matcher whose copies fail together after ``left`` tokens."""

        def __init__(self, matcher: Any, left: list[int]) -> None:
            self._matcher = matcher
            self._left = left

        def deep_copy(self) -> Limited:
            return Limited(self._matcher.deep_copy(), self._left)

        def consume_tokens(self, tokens: list[int]) -> bool:
            self._left[0] -= len(tokens)
            return not self.is_error() and self._matcher.consume_tokens(tokens)

        def consume_token(self, token: int) -> bool:
            return self.consume_tokens([token])

        def is_error(self) -> bool:
            return self._left[0] < 0

        def get_error(self) -> str:
            return "lexer error: too many states" if self.is_error() else ""

        def unsafe_compute_mask_ptr(self, *target: int) -> None:
            self._matcher.unsafe_compute_mask_ptr(*target)

    class Limits(TokenMasks):
        def _compile(self, grammar: str) -> Any:
            return Limited(super()._compile(grammar), [5])

    own = Limits(chat()._tokenizer, chat().stop_ids, vocabulary())
    digit = chat().encode("7")[0]
    turns = [own.start(DIGITS), own.start(DIGITS)]
    for _ in range(4):
        for turn in turns:
            turn.fill(own.allocate(1)[0])
            turn.accept(digit)
    turns = [own.start(DIGITS, [digit] * 4), own.start(DIGITS, [digit] * 4)]
    for turn in turns:
        turn.fill(own.allocate(1)[0])
    with pytest.raises(GrammarProblem, match="too many states"):
        own.start(DIGITS, [digit] * 6).fill(own.allocate(1)[0])


def test_grammars_are_compiled_at_the_same_time() -> None:
    """One that takes long holds up nobody."""
    both = threading.Barrier(2, timeout=20)

    class Slow(TokenMasks):
        def _compile(self, grammar: str) -> Any:
            both.wait()
            return super()._compile(grammar)

    own = Slow(chat()._tokenizer, chat().stop_ids, vocabulary())
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(own.start, (DIGITS, YES_OR_NO)))


def test_an_engine_without_masks_refuses_grammars(model: Any) -> None:
    with running(model) as client:
        submit(client, request(0, DIGITS))
        assert "agent_structured" in str(client.result(0))
    with pytest.raises(ValueError, match="continuous batching"):
        EmbeddedGenerator(model).generate([request(0, DIGITS)], SHORT, stop_ids=(), seed=0)


def test_a_replica_keeps_the_masks(model: Any) -> None:
    """Pinned evaluations play on one."""
    engine = ContinuousGenerator(model, masks=masks())
    replica = engine.replica()
    engine.close()
    assert replica is not None
    client = Client(replica)
    submit(client, request(0, YES_OR_NO), GenConfig(max_new_tokens=9, temperature=0.0))
    output = client.output(0)
    replica.close()
    assert isinstance(output, GenOutput) and chat().decode(output.token_ids) in ("yes", "no")


def test_packed_masks_are_unpacked_bit_by_bit() -> None:
    rng = random.Random(0)
    width = 75
    allowed = [sorted(rng.sample(range(width), rng.randrange(1, width))) for _ in range(3)]
    packed = masks().allocate(3)[:, :3]
    for row, tokens in enumerate(allowed):
        for token in tokens:
            packed.view("u4")[row, token // 32] |= 1 << token % 32
    logits = torch.randn(5, width)
    masked = mask_logits(logits, [4, 0, 3], packed.copy())
    for row, place in enumerate([4, 0, 3]):
        assert torch.isfinite(masked[place]).nonzero()[:, 0].tolist() == allowed[row]
        assert torch.equal(masked[place, allowed[row]], logits[place, allowed[row]])
    assert torch.equal(masked[[1, 2]], logits[[1, 2]]) and bool(torch.isfinite(logits).all())


def test_a_tokenizer_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"agent_structured=constrain: the tokenizer has \d+ tokens"
    ):
        TokenMasks(chat()._tokenizer, chat().stop_ids, 20)
    with pytest.raises(ValueError, match="llguidance cannot read the tokenizer"):
        TokenMasks([], (0,), 20)
