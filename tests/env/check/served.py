"""An environment that is played on a service: nobody can play it without."""

from __future__ import annotations

from typing import Any

from realhf.api.environment import EnvironmentService, EnvironmentSpec, Opening, Task, Turn


class Tasks:
    """One task for each split."""

    groups = ("one",)

    def __init__(self, split: str) -> None:
        self.split = split

    @property
    def group_of(self) -> dict[str, str]:
        return {self.split: "one"}

    def instantiate(self, template_id: str, seed: int) -> Task:
        return Task(f"{template_id}/{seed}", "one", {"split": self.split}, seed=seed)


class Client:
    """Speaks to the service, whose address it shows."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def reset(self, task: Any, *, seed: int) -> Opening:
        assert self.address, "there is no service"
        return Opening([{"role": "user", "content": f"You are at {self.address}."}])

    async def step(self, message: Any) -> Turn:
        return Turn(done=True, reward=0.0)

    async def close(self) -> None:
        """Nothing is held."""


Served = EnvironmentSpec("served", Client, Tasks, launch=EnvironmentService("some.service"))
