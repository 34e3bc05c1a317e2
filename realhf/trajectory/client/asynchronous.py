"""Provides the client for coroutines; methods, arguments and errors are those of ``TrajectoryClient``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx

from realhf.base.tls import believing
from realhf.trajectory.client.answers import Batch, EnvRegistration, EnvStatus, PushReceipt, TrainerRegistration
from realhf.trajectory.client.calls import Calls, ClientOptions
from realhf.trajectory.client.exchange import Failed, Pause, Request, Response, Retry, Steps
from realhf.trajectory.client.pacing import Pace
from realhf.trajectory.client.sync import described, lower

T = TypeVar("T")


class AsyncTrajectoryClient:
    """Acts as a producer, a trainer, or both, on one event loop. ``TrajectoryClient`` documents every method."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        trainer_id: str = "",
        binary: bool = True,
        compression: str = "auto",
        retry_for_s: float = 120.0,
        request_timeout_s: float = 60.0,
        explicit_acks: bool = False,
        ca_file: str = "",
    ) -> None:
        self._calls = Calls(
            ClientOptions(url.rstrip("/"), token, trainer_id, binary, compression, Retry(retry_for_s), explicit_acks)
        )
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"), timeout=request_timeout_s, verify=believing(ca_file) if ca_file else True
        )

    @property
    def url(self) -> str:
        """See ``TrajectoryClient``."""
        return self._calls.url

    @property
    def trainer_id(self) -> str:
        """See ``TrajectoryClient``."""
        return self._calls.trainer_id

    @property
    def env(self) -> EnvRegistration | None:
        """See ``TrajectoryClient``."""
        return self._calls.env

    async def close(self) -> None:
        """See ``TrajectoryClient``."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncTrajectoryClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    # ---- producer

    async def register_env(
        self,
        name: str,
        *,
        group_size: int,
        max_token_length: int,
        weight: float = 1.0,
        min_batch_allocation: float | None = None,
        wait_s: float = 600.0,
    ) -> EnvRegistration:
        """See ``TrajectoryClient``."""
        return await self._run(
            self._calls.register_env(name, group_size, max_token_length, weight, min_batch_allocation, wait_s)
        )

    async def push(
        self, group: Mapping[str, Any], *, policy_version: int | None = None, idempotency_key: str | None = None
    ) -> PushReceipt:
        """See ``TrajectoryClient``."""
        return await self._run(
            self._calls.push([group], listed=False, policy_version=policy_version, key=idempotency_key)
        )

    async def push_many(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        policy_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> PushReceipt:
        """See ``TrajectoryClient``."""
        return await self._run(
            self._calls.push(groups, listed=True, policy_version=policy_version, key=idempotency_key)
        )

    async def env_status(self) -> EnvStatus:
        """See ``TrajectoryClient``."""
        return await self._run(self._calls.env_status())

    async def pace(self) -> Pace:
        """See ``TrajectoryClient``."""
        return await self._run(self._calls.pace())

    async def wait_for_room(self, timeout_s: float) -> Pace:
        """See ``TrajectoryClient``."""
        return await self._run(self._calls.wait_for_room(timeout_s))

    async def disconnect(self) -> None:
        """See ``TrajectoryClient``."""
        await self._run(self._calls.disconnect())

    # ---- trainer

    async def register(
        self,
        *,
        batch_size: int,
        max_token_len: int,
        num_steps: int,
        starting_step: int = 0,
        wandb_group: str = "",
        wandb_project: str = "",
        checkpoint_dir: str = "",
        save_checkpoint_interval: int = 0,
        max_staleness: int | None = None,
        join: bool = False,
        reset: bool = False,
        idempotency_key: str | None = None,
    ) -> TrainerRegistration:
        """See ``TrajectoryClient``."""
        registration = {
            "wandb_group": wandb_group,
            "wandb_project": wandb_project,
            "batch_size": batch_size,
            "max_token_len": max_token_len,
            "checkpoint_dir": checkpoint_dir,
            "num_steps": num_steps,
            "save_checkpoint_interval": save_checkpoint_interval,
            "starting_step": starting_step,
            "max_staleness": max_staleness,
            "trainer_id": self.trainer_id,
        }
        return await self._run(self._calls.register(registration, join=join, reset=reset, key=idempotency_key))

    async def pull(self, timeout_s: float, *, acknowledges: Batch | None = None) -> Batch:
        """See ``TrajectoryClient``."""
        return await self._run(self._calls.pull(timeout_s, acknowledges.lease_id if acknowledges else None))

    async def ack(self, lease_id: str) -> None:
        """See ``TrajectoryClient``."""
        await self._run(self._calls.end_lease("ack", lease_id))

    async def nack(self, lease_id: str) -> None:
        """See ``TrajectoryClient``."""
        await self._run(self._calls.end_lease("nack", lease_id))

    async def renew(self, lease_id: str) -> float:
        """See ``TrajectoryClient``."""
        return float((await self._run(self._calls.end_lease("renew", lease_id)))["expires_in_s"])

    async def set_policy_version(self, version: int) -> None:
        """See ``TrajectoryClient``."""
        await self._run(self._calls.set_policy_version(version))

    # ---- everyone

    async def info(self) -> dict[str, Any]:
        """See ``TrajectoryClient``."""
        return await self._run(self._calls.get("/info"))

    async def run_names(self) -> dict[str, Any]:
        """See ``TrajectoryClient``."""
        return await self._run(self._calls.get("/wandb_info"))

    async def status(self) -> dict[str, Any]:
        """See ``TrajectoryClient``."""
        return await self._run(self._calls.get("/status"))

    async def leases(self) -> list[dict[str, Any]]:
        """See ``TrajectoryClient``."""
        return (await self._run(self._calls.get("/leases")))["leases"]

    # ---- waiting

    async def _run(self, steps: Steps[T]) -> T:
        outcome: Response | Failed | None = None
        try:
            while True:
                wanted = steps.send(outcome)
                outcome = None
                if isinstance(wanted, Pause):
                    await asyncio.sleep(wanted.seconds)
                else:
                    outcome = await self._perform(wanted)
        except StopIteration as end:
            return end.value
        finally:
            steps.close()

    async def _perform(self, request: Request) -> Response | Failed:
        headers: dict[str, str] = {}
        try:
            async with self._http.stream(
                request.method, request.path, headers=request.headers, content=request.body
            ) as response:
                headers = lower(response.headers)
                return Response(response.status_code, headers, await response.aread())
        except httpx.RequestError as error:
            return Failed(described(error), headers)
