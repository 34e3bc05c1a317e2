"""Runs in an environment with the real ``openenv``: its generic client plays an episode against our
server.

    python stock_client.py URL '{"task_id": 201, "seed": 3}' 'aws ...' 'aws ...'

Prints one JSON line: what the client made of every reply.
"""

import asyncio
import json
import sys

from openenv.core.generic_client import GenericEnvClient


async def play(url: str, reset: dict, commands: list[str]) -> list[dict]:
    seen = []
    client = GenericEnvClient(base_url=url)
    await client.connect()
    try:
        first = await client.reset(**reset)
        seen.append({"observation": first.observation, "reward": first.reward, "done": first.done})
        for command in commands:
            result = await client.step({"command": command})
            seen.append(
                {"observation": result.observation, "reward": result.reward, "done": result.done}
            )
        seen.append({"state": await client.state()})
    finally:
        await client.close()
    return seen


if __name__ == "__main__":
    print(
        json.dumps(
            asyncio.run(play(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:])), default=str
        )
    )
