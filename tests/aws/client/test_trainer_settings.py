"""The trainer's variables of the design, with their defaults."""

import pytest

from realhf.aws.client.multi_turn_pool import pool_arguments, pool_from_environment


def test_defaults() -> None:
    assert pool_arguments({}) == {
        "base_url": "http://127.0.0.1:8100",
        "token": None,
        "size": 8,
        "max_turns": 6,
        "max_total_tokens": 4096,
    }


def test_variables_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"NUM_GENERATIONS": "4", "MAX_TURNS": "3", "AWS_RL_ENV_TOKEN": "t"}.items():
        monkeypatch.setenv(name, text)
    assert pool_arguments({"NUM_GENERATIONS": "4", "AWS_RL_ENV_URL": "http://a:1"})["base_url"] == "http://a:1"
    assert pool_from_environment().size == 4
    assert pool_from_environment(size=2).size == 2


@pytest.mark.parametrize("text", ["0", "-1", "many", "2.5"])
def test_a_bad_number_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="MAX_TURNS"):
        pool_arguments({"MAX_TURNS": text})
