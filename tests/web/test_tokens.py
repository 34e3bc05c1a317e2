"""Tokens in headers and files."""

from __future__ import annotations

import pytest

from realhf.web.settings import SettingError
from realhf.web.tokens import TokenTable, bearer_token, encode_token, read_token_lines


@pytest.mark.parametrize(
    ("values", "token"),
    [
        ([b"Bearer secret"], b"secret"),
        ([b"bearer  secret "], b"secret"),
        ([b"Bearer"], b""),
        ([b"Basic secret"], b""),
        ([b""], b""),
        ([], b""),
        ([b"Bearer secret", b"Bearer other"], b""),
    ],
)
def test_the_token_of_a_request(values: list[bytes], token: bytes) -> None:
    assert bearer_token([(b"Authorization", value) for value in values]) == token


def test_a_token_grants_what_it_stands_for_and_an_empty_one_nothing() -> None:
    table = TokenTable([("one", 1), ("", 2), ("both", 3), ("both", 4), ("schlüssel", 5)])
    assert table.find_grants(b"one") == [1] and table.find_grants(b"both") == [3, 4]
    assert table.find_grants(b"") == table.find_grants(b"on") == table.find_grants(b"one ") == []
    assert (
        table.find_grants("schlüssel".encode())
        == table.find_grants("schlüssel".encode("latin-1"))
        == [5]
    )
    assert table and not TokenTable([("", 1)])


@pytest.mark.parametrize(
    ("token", "sent"),
    [
        ("пароль-секрет", b"??????-??????"),
        ("日本", b"??"),
        ("geheim\udcff", b"geheim?"),
        ("geheim\ud800", b"geheim?"),
    ],
)
def test_a_character_that_an_encoding_lacks_is_not_replaced_by_another(
    token: str, sent: bytes
) -> None:
    """Question marks in their place would be a token that anybody can guess."""
    table = TokenTable([(token, 1)])
    assert table.find_grants(sent) == []
    assert table.find_grants(encode_token(token)) == [1]


def test_a_variable_that_is_not_utf_8_is_compared_by_its_bytes() -> None:
    assert TokenTable([("geheim\udcff", 1)]).find_grants(b"geheim\xff") == [1]


def test_what_is_wrong_with_a_file_of_tokens_is_named(tmp_path) -> None:
    file = tmp_path / "tokens"
    with pytest.raises(SettingError, match=r"--token-file .*tokens: No such file"):
        read_token_lines(str(file), "--token-file")
    file.write_text(" a \nb\n\n")
    assert read_token_lines(str(file), "--token-file") == ["a", "b"]
    file.chmod(0o640)
    with pytest.raises(SettingError, match="others may read it; chmod 600"):
        read_token_lines(str(file), "--token-file", private=True)
    file.write_bytes(b"\xff")
    with pytest.raises(SettingError, match=r"--token-file .*decode"):
        read_token_lines(str(file), "--token-file")
