"""The OpenAI-compatible endpoint, through the real ``openai`` package and over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from realhf.api.environment import Task
from realhf.api.rollout import RolloutOutcome
from realhf.rollout.episode import EpisodeLimits
from realhf.rollout.openai_server import build_app
from realhf.rollout.openai_sessions import Ending, OpenAiSession
from tests.rollout.black_box import Endpoint, FakeTokens, chat, served, serving, spelt

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = EpisodeLimits(max_total_tokens=400, turn_tokens=40, max_turns=12)
USER = {"role": "user", "content": "task"}


def heard(prompt: str) -> str:
    return f"aws {prompt.count('<|user|>')}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def endpoint() -> AsyncIterator[Endpoint]:
    async with serving(LIMITS) as up:
        yield up


def plain_http() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, verify=False)


async def say(client: openai.AsyncOpenAI, messages: list[dict[str, Any]], **more: Any) -> str:
    reply = await client.chat.completions.create(model="any", messages=messages, **more)  # type: ignore[arg-type]
    return reply.choices[0].message.content or ""


def outcomes(session: OpenAiSession, reward: float | None = 1.0) -> list[RolloutOutcome]:
    return session.outcomes(Ending("finished", reward))


@pytest.mark.slow
async def test_a_conversation_keeps_the_ids_that_were_sampled(endpoint: Endpoint) -> None:
    tokens = FakeTokens(heard)
    async with served(endpoint, tokens) as (server, session, client):
        messages = [USER]
        for answer in ("one", "two"):
            words = await say(client, messages)
            messages = [
                *messages,
                {"role": "assistant", "content": words},
                {"role": "user", "content": answer},
            ]
        await say(client, messages)
        assert [message["content"] for message in messages[1::2]] == ["aws 1", "aws 2"]
        (outcome,) = outcomes(session)
        server.sessions.close(session)
    stop = chat().stop_ids[0]
    policy = [[*spelt(f"aws {n}"), stop] for n in (1, 2, 3)]
    between = [chat().following(text, ended=True) for text in ("one", "two")]
    assert outcome.prompt_ids == chat().first("task")
    assert outcome.completion_ids == policy[0] + between[0] + policy[1] + between[1] + policy[2]
    assert spelt("aws 1") != chat().encode("aws 1"), (
        "tokenising the words again would give other ids"
    )
    assert outcome.loss_mask == [
        n % 2 == 0
        for n, ids in enumerate([policy[0], between[0], policy[1], between[1], policy[2]])
        for _ in ids
    ]
    assert [v for v, m in zip(outcome.versions, outcome.loss_mask, strict=True) if m] == (
        [1] * len(policy[0]) + [2] * len(policy[1]) + [3] * len(policy[2])
    )
    assert all(
        (v == -1) == (not m) for v, m in zip(outcome.versions, outcome.loss_mask, strict=True)
    )
    assert (
        outcome.valid
        and outcome.reward == 1.0
        and [turn.text for turn in outcome.turns] == ["aws 1", "aws 2", "aws 3"]
    )
    assert [turn.output for turn in outcome.turns] == ["one", "two", ""]
    for request, sent in zip(tokens.requests, (0, 1, 2), strict=True):
        assert (
            list(request.token_ids)
            == outcome.prompt_ids
            + outcome.completion_ids[: sum(len(policy[n]) + len(between[n]) for n in range(sent))]
        )
        assert (request.slot, request.seed) == (3, 7)
    assert tokens.freed == [3]


async def test_an_unfinished_turn_is_ended_and_parts_are_joined(endpoint: Endpoint) -> None:
    tokens = FakeTokens(heard, part=2, finish="length")
    async with served(endpoint, tokens) as (_, session, client):
        reply = await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        assert (
            reply.choices[0].finish_reason == "length"
            and reply.choices[0].message.content == "aws 1"
        )
        assert [request.sampled for request in tokens.requests] == [0, 2, 4]
        await say(client, [USER, {"role": "assistant", "content": "aws 1"}, USER])
        (outcome,) = outcomes(session)
    first = spelt("aws 1")
    following = chat().following("task", ended=False)
    assert following[0] == chat().stop_ids[0] and outcome.completion_ids[: len(first)] == first
    assert outcome.completion_ids[len(first) :][: len(following)] == following
    assert outcome.versions[: len(first)] == [1, 1, 2, 2, 3][: len(first)]


@pytest.mark.slow
async def test_streaming_logprobs_and_usage(endpoint: Endpoint) -> None:
    async with served(endpoint, FakeTokens(heard)) as (_, session, client):
        stream = await client.chat.completions.create(
            model="m",
            messages=[USER],
            stream=True,
            logprobs=True,  # type: ignore[list-item]
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
        assert text == "aws 1" and usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            len(chat().first("task")),
            len(spelt("aws 1")) + 1,
        )
        assert chunks[-2].choices[0].finish_reason == "stop"
        whole = await client.chat.completions.create(model="m", messages=[USER], logprobs=True)  # type: ignore[list-item]
        values = whole.choices[0].logprobs
        assert values is not None and values.content is not None
        assert "".join(entry.token for entry in values.content) == "aws 1"
        assert {entry.logprob for entry in values.content} == {-0.5}
        assert (await client.models.list()).data[0].id == "policy"
        await say(client, [USER, {"role": "assistant", "content": text}, USER])
        assert len(session.ledger.branches) == 2, (
            "the streamed conversation was continued, not started again"
        )


async def test_the_bytes_of_tokens_that_split_a_character_are_joined_to_the_text(
    endpoint: Endpoint,
) -> None:
    """They were those of the replacement character that such a token reads as."""
    said = "é is 2 bytes, € is 3 and 😀 is 4"
    async with served(endpoint, FakeTokens(lambda prompt: said)) as (_, _, client):
        reply = await client.chat.completions.create(model="m", messages=[USER], logprobs=True)  # type: ignore[list-item]
        values = reply.choices[0].logprobs
        assert values is not None and values.content is not None
        assert any("\ufffd" in entry.token for entry in values.content), (
            "no token splits a character"
        )
        assert b"".join(bytes(entry.bytes or ()) for entry in values.content).decode() == said
        assert reply.choices[0].message.content == said


async def test_a_stream_that_is_left_counts_as_a_turn(endpoint: Endpoint) -> None:
    """As the page says: the turn was sampled before its first chunk was sent."""
    async with served(endpoint, FakeTokens(heard)) as (_, session, client):
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)  # type: ignore[list-item]
        async for _ in stream:
            break
        await stream.close()
        (outcome,) = outcomes(session)
    assert [turn.text for turn in outcome.turns] == ["aws 1"] and outcome.valid


@pytest.mark.slow
async def test_what_leaves_a_conversation_is_a_trajectory_of_its_own(endpoint: Endpoint) -> None:
    tokens = FakeTokens(heard)
    async with served(endpoint, tokens) as (_, session, client):
        first = {"role": "assistant", "content": await say(client, [USER])}
        told = {"role": "user", "content": "more"}
        await say(client, [USER, first, told])
        await say(client, [USER, first, told])
        assert len(session.ledger.branches) == 2
        main, fork = session.ledger.branches
        at = len(main.tokens.prompt_ids) + main.marks[0].tokens
        assert fork.tokens.prompt_ids == main.tokens.prefix()[:at] + chat().following(
            "more", ended=True
        )
        edited = {"role": "assistant", "content": first["content"] + " "}
        await say(client, [USER, edited, told])
        assert len(session.ledger.branches) == 3
        assert session.ledger.branches[2].tokens.prompt_ids == chat().opening([USER, edited, told])
        await say(client, [USER, first])
        assert len({request.slot for request in tokens.requests}) == 4
        assert len({request.seed for request in tokens.requests}) == 4
        done = outcomes(session, 0.25)
    assert done[0].completion_ids == main.tokens.completion_ids and done[0].timings["branches"] == 4
    assert [outcome.reward for outcome in done] == [0.25] * 4 and len(done) == 4
    assert sum(sum(outcome.loss_mask) for outcome in done) == sum(
        branch.n_sampled for branch in session.ledger.branches
    )


async def test_requests_at_once_do_not_share_a_row(endpoint: Endpoint) -> None:
    tokens = FakeTokens(heard)
    async with served(endpoint, tokens) as (_, session, client):
        first = {"role": "assistant", "content": await say(client, [USER])}
        tokens.hold = asyncio.Event()
        both = [asyncio.ensure_future(say(client, [USER, first, USER])) for _ in range(2)]
        while len(tokens.requests) < 3:
            await asyncio.sleep(0.005)
        tokens.hold.set()
        assert await asyncio.gather(*both) == ["aws 2", "aws 2"]
        assert (
            tokens.requests[1].slot != tokens.requests[2].slot and len(session.ledger.branches) == 2
        )


@pytest.mark.slow
async def test_a_reported_reward_ends_the_session(endpoint: Endpoint) -> None:
    tokens = FakeTokens(heard)
    async with served(endpoint, tokens) as (server, session, client), plain_http() as http:
        await say(client, [USER])
        address = f"{server.url}/sessions/{session.key}/reward"
        assert (await http.post(address, json={"reward": "much"})).status_code == 400
        assert (await http.post(address, content=b'{"reward": NaN}')).status_code == 400
        assert not session.ended.is_set()
        assert (await http.post(address, json={"reward": 0.75})).json() == {
            "trajectories": 1,
            "turns": 1,
        }
        assert session.ended.is_set() and outcomes(session, None)[0].reward == 0.75
        assert (await http.post(address, json={"reward": 1})).status_code == 409
        with pytest.raises(openai.ConflictError):
            await say(client, [USER])
        server.sessions.close(session)
        with pytest.raises(openai.NotFoundError):
            await say(client, [USER])
    assert tokens.freed == [3]


@pytest.mark.slow
async def test_an_engine_that_fails_is_no_turn(endpoint: Endpoint) -> None:
    tokens = FakeTokens(heard)
    tokens.fail = 1
    async with served(endpoint, tokens) as (_, session, client):
        with pytest.raises(openai.InternalServerError, match="no generation worker"):
            await say(client, [USER])
        assert session.engine_error is not None and not session.ledger.branches
        first = {"role": "assistant", "content": await say(client, [USER])}
        tokens.fail = 1
        with pytest.raises(openai.InternalServerError):
            await say(client, [USER, first, USER])
        await say(client, [USER, first, USER])
        (outcome,) = outcomes(session)
        assert len(outcome.turns) == 2 and outcome.valid
    tokens = FakeTokens(heard)
    tokens.fail = 1
    async with served(endpoint, tokens, retries=1) as (_, session, client):
        assert await say(client, [USER]) == "aws 1", "the package sends it again by itself"


async def test_the_end_cancels_what_is_under_way(endpoint: Endpoint) -> None:
    tokens = FakeTokens(heard)
    tokens.hold = asyncio.Event()
    async with served(endpoint, tokens) as (server, session, client):
        asking = asyncio.ensure_future(say(client, [USER]))
        while not tokens.requests:
            await asyncio.sleep(0.005)
        server.sessions.close(session)
        with pytest.raises(openai.ConflictError):
            await asking
        assert tokens.cancelled == 1 and not session.ledger.branches
    nothing = outcomes(session)[0]
    assert (
        nothing.status == "agent"
        and nothing.reward is None
        and nothing.message == "the agent requested no turn"
    )


async def test_a_client_that_goes_away_stops_the_sampling(endpoint: Endpoint) -> None:
    """Its turn is dropped, and the conversation goes on from where it was."""
    tokens = FakeTokens(heard)
    async with served(endpoint, tokens) as (_, session, client):
        tokens.hold = asyncio.Event()
        asking = asyncio.ensure_future(say(client, [USER]))
        while not tokens.requests:
            await asyncio.sleep(0.005)
        asking.cancel()
        async with asyncio.timeout(20):
            while not tokens.cancelled:
                await asyncio.sleep(0.005)
        tokens.hold = None
        assert not session.ledger.turns and await say(client, [USER]) == "aws 1"


@pytest.mark.slow
async def test_limits_are_told_in_the_words_of_the_api(endpoint: Endpoint) -> None:
    async with served(endpoint, FakeTokens(heard)) as (_, session, client):
        first = {"role": "assistant", "content": await say(client, [USER])}
        with pytest.raises(openai.BadRequestError) as refused:
            await say(client, [USER, first, {"role": "user", "content": "word " * 200}])
        assert (
            refused.value.code == "context_length_exceeded"
            and session.ledger.limit_hit == "token_budget"
        )
        assert len(session.ledger.branches) == 1 and session.ledger.branches[0].n_sampled
        for _ in range(LIMITS.max_turns - 1):
            await say(client, [USER])
        with pytest.raises(openai.BadRequestError) as refused:
            await say(client, [USER])
        assert refused.value.code == "turn_limit" and session.ledger.limit_hit == "max_turns"


async def test_a_session_may_have_fewer_turns_than_the_others(endpoint: Endpoint) -> None:
    async with served(endpoint, FakeTokens(heard), max_turns=1) as (_, session, client):
        await say(client, [USER])
        with pytest.raises(openai.BadRequestError, match="has had its 1 turns"):
            await say(client, [USER])
        assert session.ledger.limit_hit == "max_turns"
        cut = [
            session.outcomes(Ending("max_turns", 0.0, task=Task("", max_turns=most)))[0]
            for most in (1, 0)
        ]
        assert [outcome.out_of_turns for outcome in cut] == [False, True], (
            "only the run's own limit can be raised"
        )


@pytest.mark.slow
async def test_turns_under_way_count_to_the_limit(endpoint: Endpoint) -> None:
    """Of several that are asked for at once too; one that fails leaves its place to another."""
    tokens = FakeTokens(heard)
    tokens.fail = 1
    tokens.hold = asyncio.Event()
    async with served(endpoint, tokens, max_turns=2) as (_, session, client):
        with pytest.raises(openai.InternalServerError):
            await say(client, [USER])
        asked = [asyncio.ensure_future(say(client, [USER])) for _ in range(5)]
        async with asyncio.timeout(20):
            while sum(each.done() for each in asked) < 3:
                await asyncio.sleep(0.005)
        tokens.hold.set()
        replies = await asyncio.gather(*asked, return_exceptions=True)
        refused = [reply for reply in replies if isinstance(reply, openai.BadRequestError)]
        assert len(refused) == 3 and {error.code for error in refused} == {"turn_limit"}
        assert [reply for reply in replies if reply not in refused] == ["aws 1"] * 2
        assert session.ledger.turns == len(outcomes(session)) == 2


async def test_a_turn_that_is_sampled_when_the_session_ends_is_not_kept(endpoint: Endpoint) -> None:
    """The end comes while the server looks whether the client is still there; the outcome, made at
    once, stays."""
    async with served(endpoint, FakeTokens(heard)) as (server, session, client):
        await say(client, [USER])
        messages = [USER, {"role": "assistant", "content": "aws 1"}, USER]
        body = json.dumps({"messages": messages}).encode()
        incoming = iter([{"type": "http.request", "body": body}])
        made: list[RolloutOutcome] = []
        sent: list[Any] = []

        async def receive() -> Any:
            if (event := next(incoming, None)) is not None:
                return event
            # Nothing is sampled any more, so the server asks before it keeps.
            if not session._running and not made:
                server.sessions.close(session)
                made.extend(outcomes(session))
            return await asyncio.Event().wait()

        async def send(event: Any) -> None:
            sent.append(event)

        path = f"/sessions/{session.key}/v1/chat/completions"
        headers = [
            (b"content-length", str(len(body)).encode()),
            (b"content-type", b"application/json"),
        ]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": headers,
        }
        await build_app(server.sessions)(scope, receive, send)
        assert sent[0]["status"] == 409 and b"has ended" in sent[1]["body"]
        assert outcomes(session) == made and len(made[0].turns) == 1 and made[0].loss_mask[-1]
        assert len(made[0].completion_ids) == len(made[0].logprobs) == len(spelt("aws 1")) + 1


BAD: list[tuple[Any, int]] = [
    (b"{", 400), (b"[]", 400), ({}, 400), ({"messages": []}, 400),
    ({"messages": [{"role": "user", "content": 3}]}, 400),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400), ({"messages": [USER], "n": 2}, 400),
    ({"messages": [USER], "tools": [{"type": "function"}]}, 400), ({"messages": [USER], "stop": [""]}, 400),
    ({"messages": [USER] * 600}, 400), (b" " * (1 << 20) + b"{}", 413),
    ({"messages": [USER], "response_format": {"type": "grammar"}}, 400),
]  # fmt: skip


@pytest.mark.slow
async def test_bad_requests_are_refused_and_harm_nothing(endpoint: Endpoint) -> None:
    async with (
        served(endpoint, FakeTokens(heard)) as (server, session, client),
        plain_http() as http,
    ):
        address = f"{server.base_url(session)}/chat/completions"
        for body, status in BAD:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            reply = await http.post(address, **content)  # type: ignore[arg-type]
            assert reply.status_code == status and reply.json()["error"]["message"], (
                body,
                reply.text,
            )

        async def unsized() -> AsyncIterator[bytes]:
            yield b"{}"

        assert (await http.post(address, content=unsized())).status_code == 413
        picture = {
            "role": "user",
            "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}],
        }
        for message, said in (
            (
                picture,
                "messages.1.content: only text is read, and part 1 is of the type 'image_url'",
            ),
            (
                {"role": "user", "content": ["x"]},
                "messages.1.content: only text is read, and part 0 is not a valid part",
            ),
            (
                {"role": "user", "content": [{"type": "text"}]},
                "messages.1.content: part 0 has no text",
            ),
            (
                {"role": "user", "content": 3},
                "messages.1.content: must be text, a list of parts of text, or null",
            ),
        ):
            reply = await http.post(address, json={"messages": [USER, message]})
            assert (reply.status_code, reply.json()["error"]["message"]) == (400, said)
        guess = await http.post(
            f"{server.url}/sessions/guess/v1/chat/completions", json={"messages": [USER]}
        )
        assert guess.status_code == 404 and guess.json()["error"]["code"] == "no_such_session"
        parts = [{"type": "text", "text": "ta"}, {"type": "text", "text": "sk"}]
        assert await say(
            client,
            [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}],
        )
        assert len(session.ledger.branches) == 1


@pytest.mark.slow
async def test_what_is_not_served_is_refused_in_the_words_of_the_api(endpoint: Endpoint) -> None:
    """The ``openai`` package showed nothing but a status for what the framework answers."""
    async with (
        served(endpoint, FakeTokens(heard)) as (server, session, client),
        plain_http() as http,
    ):
        with pytest.raises(openai.NotFoundError, match="POST chat/completions") as refused:
            await client.embeddings.create(model="any", input="x")
        assert refused.value.code == "unknown_url" and refused.value.type == "invalid_request_error"
        for method, path, status in (
            ("POST", "models", 405),
            ("GET", "chat/completions", 405),
            ("GET", "files", 404),
        ):
            reply = await http.request(method, f"{server.base_url(session)}/{path}", json={})
            assert (
                reply.status_code == status and "GET models" in reply.json()["error"]["message"]
            ), reply.text
