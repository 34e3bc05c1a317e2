"""One AWS CLI command on a real account, with an account of what was sent; the child process of ``real_aws``.

Reads ``{"argv": [...]}`` from standard input, writes one JSON line: exit_code, stdout, stderr, requests.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

from awscli.clidriver import create_clidriver

_PARAMS = "realhf-params"


def run(argv: list[str]) -> dict[str, Any]:
    """Drive the CLI with its own credentials and endpoints; collect its words and its requests."""
    requests: list[dict[str, Any]] = []

    def keep_params(params: Any, context: dict[str, Any], **_: Any) -> None:
        context[_PARAMS] = dict(params)

    def note(http_response: Any, parsed: Any, model: Any, context: dict[str, Any], **_: Any) -> None:
        code = (parsed or {}).get("Error", {}).get("Code", "")
        params = json.loads(json.dumps(context.get(_PARAMS, {}), default=str))
        requests.append(
            {"service": model.service_model.service_name, "operation": model.name, "params": params,
             "status": http_response.status_code, "error_code": str(code)}
        )  # fmt: skip

    driver = create_clidriver()
    driver.session.register("before-parameter-build", keep_params)
    driver.session.register("after-call", note)
    out, err = _Text(), _Text()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = driver.main(argv)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
    return {"exit_code": code, "stdout": out.text(), "stderr": err.text(), "requests": requests}


class _Text(io.TextIOWrapper):
    """Standard output as the CLI expects it: text, with a ``buffer`` for bytes."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode("utf-8", "replace")


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin)["argv"])))
