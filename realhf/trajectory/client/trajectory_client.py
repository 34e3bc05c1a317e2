"""Provides ``TrajectoryClient`` for blocking code and ``AsyncTrajectoryClient`` for coroutines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx

from realhf.base.tls import believing
from realhf.trajectory.client.calls import Calls, ClientOptions
from realhf.trajectory.client.protocol import (
    Batch,
    EnvRegistration,
    EnvStatus,
    Failed,
    Pace,
    Pause,
    PushReceipt,
    Request,
    Response,
    Retry,
    Steps,
    TrainerRegistration,
)

T = TypeVar("T")


def lower(headers: httpx.Headers) -> dict[str, str]:
    """Return headers as a plain map with names in lower case."""
    return {name.lower(): value for name, value in headers.items()}


def described(error: Exception) -> str:
    """Describe an error of httpx, which may have no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class TrajectoryClient:
    """Acts as a producer, a trainer, or both. Use it as a context manager, or ``close`` it; one thread at a time.

    Args:
        url: of the server.
        token: bearer token, if the server wants one.
        trainer_id: name under which batches are leased; give a fixed one to find them again after a restart.
        binary: MessagePack with tensors (rows of pulled groups are numpy arrays); else JSON (lists).
        compression: ``auto`` (over a network only), ``none``, ``gzip`` or ``zstd`` (binary only).
        retry_for_s: connection errors, 5xx and full queues are retried that long.
        request_timeout_s: of one attempt.
        explicit_acks: a batch ends by ``ack`` only; else the next pull acknowledges it.
        ca_file: PEM file with whom an https server is checked by ("": as this machine does, or SSL_CERT_FILE).

    Every method raises a ``TrajectoryError``: Unreachable, Denied, StaleEpoch (register again), Refused, BadAnswer.
    """

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
        self._http = httpx.Client(
            base_url=url.rstrip("/"), timeout=request_timeout_s, verify=believing(ca_file) if ca_file else True
        )

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._calls.url

    @property
    def trainer_id(self) -> str:
        """The name under which this client's batches are leased."""
        return self._calls.trainer_id

    @property
    def env(self) -> EnvRegistration | None:
        """This client's registration as an environment, or None."""
        return self._calls.env

    def close(self) -> None:
        """Close the connections. Leases and registrations stay as they are."""
        self._http.close()

    def __enter__(self) -> TrajectoryClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- producer

    def register_env(
        self,
        name: str,
        *,
        group_size: int,
        max_token_length: int,
        weight: float = 1.0,
        min_batch_allocation: float | None = None,
        wait_s: float = 600.0,
    ) -> EnvRegistration:
        """Take part as an environment. Waits up to ``wait_s`` seconds for the trainer's first pull, then raises
        NotRegistered."""
        return self._run(
            self._calls.register_env(name, group_size, max_token_length, weight, min_batch_allocation, wait_s)
        )

    def push(
        self, group: Mapping[str, Any], *, policy_version: int | None = None, idempotency_key: str | None = None
    ) -> PushReceipt:
        """Hand over one group, once, whatever breaks on the way. Raises BadGroup before anything is sent."""
        return self._run(self._calls.push([group], listed=False, policy_version=policy_version, key=idempotency_key))

    def push_many(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        policy_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> PushReceipt:
        """Hand over several groups, all or none. Errors are those of ``push``."""
        return self._run(self._calls.push(groups, listed=True, policy_version=policy_version, key=idempotency_key))

    def env_status(self) -> EnvStatus:
        """Return the server's numbers for this environment; the request is a sign of life, too."""
        return self._run(self._calls.env_status())

    def pace(self) -> Pace:
        """Return whether to pause, how many groups to work on at once, and whether all is done."""
        return self._run(self._calls.pace())

    def wait_for_room(self, timeout_s: float) -> Pace:
        """Wait until producing makes sense again; after ``timeout_s`` the answer still says ``pause``."""
        return self._run(self._calls.wait_for_room(timeout_s))

    def disconnect(self) -> None:
        """Leave as an environment; what was pushed is still served."""
        self._run(self._calls.disconnect())

    # ---- trainer

    def register(
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
        """Begin a run, or continue the one of the same group, project and batch size; any other one is replaced.

        ``join``: take part in whatever run there is; ``reset``: begin anew in any case. ``batch_size`` in sequences;
        ``max_staleness`` in policy versions.
        """
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
        return self._run(self._calls.register(registration, join=join, reset=reset, key=idempotency_key))

    def pull(self, timeout_s: float, *, acknowledges: Batch | None = None) -> Batch:
        """Return the next batch.

        Waits up to ``timeout_s`` seconds, then raises NoBatchYet. ``acknowledges``: end the lease of this batch on the
        way. Raises NotRegistered, LeaseLost.
        """
        return self._run(self._calls.pull(timeout_s, acknowledges.lease_id if acknowledges else None))

    def ack(self, lease_id: str) -> None:
        """Acknowledge that the batch was consumed. Repeating it does no harm. Raises LeaseLost."""
        self._run(self._calls.end_lease("ack", lease_id))

    def nack(self, lease_id: str) -> None:
        """Give the batch back; the next pull gets it. Raises LeaseLost."""
        self._run(self._calls.end_lease("nack", lease_id))

    def renew(self, lease_id: str) -> float:
        """Hold the batch longer; return the seconds from now until it expires. Raises LeaseLost."""
        return float(self._run(self._calls.end_lease("renew", lease_id))["expires_in_s"])

    def set_policy_version(self, version: int) -> None:
        """Announce which version of the weights rollouts are made with from now on."""
        self._run(self._calls.set_policy_version(version))

    # ---- everyone

    def info(self) -> dict[str, Any]:
        """Return ``batch_size`` and ``max_token_len``; -1 without a trainer."""
        return self._run(self._calls.get("/info"))

    def run_names(self) -> dict[str, Any]:
        """Return ``group`` and ``project`` that the trainer registered; null without one."""
        return self._run(self._calls.get("/wandb_info"))

    def status(self) -> dict[str, Any]:
        """Return ``current_step`` and ``queue_size`` (in groups)."""
        return self._run(self._calls.get("/status"))

    def leases(self) -> list[dict[str, Any]]:
        """List the batches in trainers' hands: ``lease_id``, ``owner``, ``step``, ``state``, ``expires_in_s``."""
        return self._run(self._calls.get("/leases"))["leases"]

    # ---- waiting

    def _run(self, steps: Steps[T]) -> T:
        outcome: Response | Failed | None = None
        try:
            while True:
                wanted = steps.send(outcome)
                outcome = None
                if isinstance(wanted, Pause):
                    time.sleep(wanted.seconds)
                else:
                    outcome = self._perform(wanted)
        except StopIteration as end:
            return end.value
        finally:
            steps.close()

    def _perform(self, request: Request) -> Response | Failed:
        headers: dict[str, str] = {}
        try:
            with self._http.stream(
                request.method, request.path, headers=request.headers, content=request.body
            ) as response:
                headers = lower(response.headers)
                return Response(response.status_code, headers, response.read())
        except httpx.RequestError as error:
            return Failed(described(error), headers)


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
