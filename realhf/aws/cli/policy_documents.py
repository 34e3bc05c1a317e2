"""Decodes the policies in answers of IAM without ever failing: agents write them, and a grader reads them.

botocore's own decoder ends a call with RecursionError over a document that is nested deeply.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any
from urllib.parse import unquote

from botocore.handlers import json_decode_policies, json_decode_template_body

_POLICY = "policyDocumentType"


def guard_decoders(client: Any, service: str) -> None:
    """Replace botocore's decoders of documents on this client by ones that leave what they cannot read as text."""
    if service == "iam":
        client.meta.events.unregister("after-call.iam", json_decode_policies)
        client.meta.events.register("after-call.iam", _decode_policies)
    if service == "cloudformation":
        client.meta.events.unregister("after-call.cloudformation.GetTemplate", json_decode_template_body)
        client.meta.events.register("after-call.cloudformation.GetTemplate", _decode_template)


def decoded(document: Any) -> Any:
    """Return what the quoted JSON text holds; the text itself where it is no JSON, or is nested too deeply to be
    read."""
    try:
        return json.loads(unquote(document))
    except (ValueError, TypeError, RecursionError):
        return document


def _decode_policies(parsed: Any, model: Any, **_: Any) -> None:
    if model.output_shape is not None:
        _decode(parsed, model.output_shape)


def _decode(parsed: Any, shape: Any) -> None:
    if shape.type_name == "structure":
        for name, member in shape.members.items():
            if name not in parsed:
                continue
            if member.type_name == "string" and member.name == _POLICY:
                parsed[name] = decoded(parsed[name])
            else:
                _decode(parsed[name], member)
    elif shape.type_name == "list":
        for item in parsed:
            _decode(item, shape.member)


def _decode_template(parsed: dict[str, Any], **arguments: Any) -> None:
    with contextlib.suppress(RecursionError):  # the text stays
        json_decode_template_body(parsed, **arguments)
