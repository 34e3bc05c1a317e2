"""Broken on purpose: a thread of its module keeps the process alive."""

import threading


def wait():
    threading.Event().wait()


threading.Thread(target=wait).start()


class Broken:
    """Is polite, but for its module."""

    async def reset(self, task, *, seed):
        return {"messages": [{"role": "user", "content": "Say something."}]}

    async def step(self, message):
        return {"done": True, "reward": 0.0}
