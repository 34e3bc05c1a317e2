"""Makes the harness that plays ``verifiers`` environments with the policy: a chat loop in this process, which calls the
environment's tools and sends every model call through the environment's own interception, as the package asks of a
harness. Source: verifiers 0.4, ``verifiers.v1.harness``."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

HARNESS = "realhf_policy_harness"
"""The name by which the package finds the harness, as a module that exports it."""
_LONGEST_RESULT = 1 << 18
_CONNECT_S = 60.0


def offer_harness(verifiers: ModuleType) -> str:
    """Make the harness known to the package under the name that is returned."""
    if HARNESS not in sys.modules:
        module = ModuleType(HARNESS, "The harness of realhf's policy.")
        module.__dict__.update({"PolicyHarness": _harness_class(verifiers), "__all__": ["PolicyHarness"]})
        sys.modules[HARNESS] = module
    return HARNESS


def _harness_class(verifiers: ModuleType) -> type[Any]:
    """The class; it can be made only where the package is."""

    class PolicyHarness(verifiers.Harness[verifiers.HarnessConfig]):  # type: ignore[name-defined]
        """Talks to the policy until it answers without a tool call."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            """See the package: run one segment of the conversation."""
            del trace, runtime
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            messages += _as_messages(prompt)
            from verifiers.v1.runtimes import ProgramResult  # pyright: ignore[reportMissingImports]

            problem = await _talk(ctx.model, f"{endpoint}/chat/completions", secret, mcp_urls, messages)
            return ProgramResult(exit_code=1 if problem else 0, stdout="", stderr=problem)

    return PolicyHarness


def _as_messages(prompt: Any) -> list[dict[str, Any]]:
    from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]

    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [message_to_wire(message) for message in prompt or []]


async def _talk(model: str, url: str, secret: str, mcp_urls: Mapping[str, str], messages: list[dict[str, Any]]) -> str:
    """Go on until the model answers without a tool call. Returns why a call of the model failed, "" if none did."""
    import httpx
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # pyright: ignore[reportMissingImports]

    async with AsyncExitStack() as stack:
        tools, dispatch, servers = [], {}, {}
        if mcp_urls:
            config = {"mcpServers": {name: {"url": address} for name, address in mcp_urls.items()}}
            async with asyncio.timeout(_CONNECT_S):
                tools, dispatch, servers = await connect_mcp(config, stack, set())
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
        while True:
            body = {"model": model, "messages": messages} | ({"tools": tools} if tools else {})
            answer = await client.post(url, headers={"Authorization": f"Bearer {secret}"}, json=body)
            if answer.status_code != 200:
                return f"HTTP {answer.status_code}: {answer.text[:2000]}"
            message = answer.json()["choices"][0]["message"]
            messages.append({key: value for key, value in message.items() if value is not None})
            calls = message.get("tool_calls") or []
            if not calls:
                return ""
            for call in calls:
                name, arguments = call["function"]["name"], _arguments(call["function"]["arguments"])
                if isinstance(arguments, str):
                    content = f"error: {arguments}"
                elif name in dispatch:
                    content = await call_mcp(servers, dispatch, name, arguments)
                else:
                    content = f"error: unknown tool {name[:60]!r} (known: {', '.join(dispatch) or 'none'})"
                messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": _short(content)})


def _arguments(text: str) -> dict[str, Any] | str:
    """The arguments of a call, or why they are none."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        return f"the arguments are not JSON ({error})"
    return found if isinstance(found, dict) else "the arguments must be an object"


def _short(content: Any) -> Any:
    if isinstance(content, str) and len(content) > _LONGEST_RESULT:
        return f"{content[:_LONGEST_RESULT]}... ({len(content) - _LONGEST_RESULT} more characters)"
    return content
