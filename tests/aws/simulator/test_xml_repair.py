"""Answers in which a name broke the XML are readable again, and say what the name was."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.aws.simulator.ministack_server import repaired, well_formed

ANSWER = (
    '<?xml version="1.0" encoding="UTF-8"?><GetGroupResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/">'
    "<Group><Path>/ops/{}/</Path><Name>n</Name></Group><Users></Users><More/></GetGroupResponse>"
)
SPACE = "{https://iam.amazonaws.com/doc/2010-05-08/}"


def path_of(body: bytes) -> str | None:
    return ElementTree.fromstring(body).findtext(f"{SPACE}Group/{SPACE}Path")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("op<|user|>", "op<|user|>"),
        ("a\x14b", "a\ufffdb"),
        ("a&b", "a&b"),
        ("a<b>c", "a<b>c"),
        ("a</b>c", "a</b>c"),
        ("<", "<"),
        ("a&lt;b&c", "a<b&c"),
        ("<Name>", "<Name>"),
        ("&#1;", None),
    ],
)
def test_a_name_that_was_not_escaped(name: str, read: str | None) -> None:
    body = ANSWER.format(name).encode()
    assert not well_formed(body)
    whole = repaired(body)
    assert whole == body if read is None else path_of(whole) == f"/ops/{read}/"


def test_what_is_xml_is_left_alone() -> None:
    body = ANSWER.format("a &amp; b").encode()
    assert repaired(body) is body


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",), exclude_characters="&>"), max_size=30))
def test_any_name_without_a_whole_tag_is_read_as_it_was(name: str) -> None:
    body = repaired(ANSWER.format(name).encode())
    read = "".join("\ufffd" if (ord(c) < 32 and c not in "\t\n\r") or c in "\ufffe\uffff" else c for c in name)
    assert path_of(body) == f"/ops/{read}/".replace("\r\n", "\n").replace("\r", "\n")
