"""A real producer for the tests: ``python push_process.py ENDPOINT FIRST COUNT``; pushes, then
waits to be killed."""

from __future__ import annotations

import asyncio
import sys

from realhf.transport.push_stream import StreamProducer


async def main(endpoint: str, first: int, count: int) -> None:
    producer = StreamProducer([endpoint], "w0", "run")
    for number in range(first, first + count):
        await producer.push(f"s{number}", 0, [b"%d" % number, bytes(1000)], timeout_s=60)
        print(number, flush=True)
    await producer.drain(20)
    print("done", flush=True)
    await asyncio.sleep(20)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
