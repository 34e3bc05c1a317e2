"""The official MCP client: the tools are those of an MCP server, the model is asked by the ``openai`` package."""

from __future__ import annotations

import json
from typing import Any

from mcp import Client
from mcp.server import MCPServer
from openai import AsyncOpenAI

from tests.agents import playing


def serve(session: Any) -> MCPServer:
    """Return an MCP server with the tool of the environment."""
    server = MCPServer("boxes")

    @server.tool()
    async def look(box: str) -> str:
        """Look into a box: red, blue or green."""
        return await playing.look(session, box)

    return server


async def rollout(task: Any, base_url: str, session: Any) -> None:
    """Let the model use the tools of the server until it answers."""
    messages: list[Any] = [{"role": "user", "content": session.text}]
    ai = AsyncOpenAI(base_url=base_url, api_key="none", http_client=playing.connection())
    async with ai, Client(serve(session)) as client:
        tools: list[Any] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in (await client.list_tools()).tools
        ]
        while True:
            reply = await ai.chat.completions.create(model="policy", messages=messages, tools=tools)
            said = reply.choices[0].message
            if not said.tool_calls:
                break
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls:
                arguments = json.loads(call.function.arguments)
                result = await client.call_tool(call.function.name, arguments)
                text = "\n".join(part.text for part in result.content if part.type == "text")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    await playing.conclude(session, said.content)
