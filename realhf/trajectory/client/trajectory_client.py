"""``AsyncTrajectoryClient`` for coroutines, and ``TrajectoryClient``, its blocking counterpart.

Source: docs/reference/trajectory.md 2.2 to 2.8, 3.2, 3.9, 3.10.
"""

from __future__ import annotations

import json
import logging
import uuid
from asyncio import sleep
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

import httpx

from realhf.base import process_clock
from realhf.base.loop_thread import BlockingFacade, blocking, creates_inner
from realhf.base.tls import context_trusting
from realhf.trajectory.client import encoding
from realhf.trajectory.client.protocol import (
    BadAnswer,
    Batch,
    EnvRegistration,
    EnvStatus,
    LeaseLost,
    NoBatchYet,
    NotRegistered,
    Pace,
    PushReceipt,
    Response,
    TrainerRegistration,
    Unreachable,
    check_response,
    epoch_of,
    field_of,
    json_object,
    pace,
    retry_wait_s,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_MAX_POLL_S = 1.0
_LOG_EVERY_S = 10.0
"""Minimum seconds between two log lines about failed attempts or about waiting for the server."""


class AsyncTrajectoryClient:
    """Asynchronous client of a producer, a trainer, or both, for one event loop. Use it as a
    context manager, or call ``close``.

    Args:
        url: address of the server.
        token: bearer token, if the server requires one.
        trainer_id: name under which batches are leased; set it to find them again after a restart.
        binary: MessagePack with tensors (rows of pulled groups are numpy arrays); otherwise JSON
            (lists).
        compression: ``auto`` (over a network only), ``none``, ``gzip`` or ``zstd`` (binary only).
        retry_for_s: connection errors, 5xx and full queues are retried this long.
        request_timeout_s: deadline of one attempt.
        explicit_acks: a batch ends by ``ack`` only; otherwise the next pull acknowledges it.
        ca_file: PEM file of the certificate authority for an https server ("": the system's, or
            SSL_CERT_FILE).

    ``env`` is this client's registration as an environment, or None. Every method raises a
    ``TrajectoryError``: Unreachable, Denied, StaleEpoch (register again), Refused, BadAnswer.
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
        self.url = url.rstrip("/")
        self.trainer_id = trainer_id or uuid.uuid4().hex
        self.env: EnvRegistration | None = None
        self._binary = binary
        self._explicit_acks = explicit_acks
        self._retry_for_s = retry_for_s
        self._compression = encoding.choose_compression(compression, self.url, binary=binary)
        self._epoch: int | None = None
        self._in_hand: set[str] = set()
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=request_timeout_s,
            verify=context_trusting(ca_file) if ca_file else True,
            headers={"Authorization": f"Bearer {token}"} if token else None,
        )

    async def close(self) -> None:
        """Close the connections. Leases and registrations are not changed."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
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
        """Register as an environment. Waits up to ``wait_s`` seconds for the trainer's first pull,
        then raises NotRegistered."""
        registration = {
            "desired_name": name,
            "group_size": group_size,
            "max_token_length": max_token_length,
            "weight": weight,
            "min_batch_allocation": min_batch_allocation,
        }
        began = last_log = process_clock.now()
        while True:
            # A new key for each request, or the server would replay the answer "wait" forever.
            response = await self._post(
                "/register-env", registration, {"Idempotency-Key": uuid.uuid4().hex}
            )
            body = json_object(response, self.url)
            if body.get("status") == "success":
                break
            waited = process_clock.now() - began
            if waited >= wait_s:
                raise NotRegistered(
                    self.url,
                    f"environment {name!r} waited {waited:.0f} s for the trainer: "
                    f"{body.get('status')}",
                )
            if process_clock.now() - last_log > _LOG_EVERY_S:
                last_log = process_clock.now()
                logger.info(
                    "%s: environment %s waits for the trainer, %.0f s so far",
                    self.url,
                    name,
                    waited,
                )
            await sleep(min(1.0, max(0.0, wait_s - waited)))
        info = await self.info()
        self._epoch = epoch_of(response)
        names = (
            "env_id",
            "wandb_name",
            "checkpoint_dir",
            "starting_step",
            "checkpoint_interval",
            "num_steps",
        )
        self.env = EnvRegistration(
            group_size=group_size,
            min_batch_allocation=min_batch_allocation,
            epoch=self._epoch,
            batch_size=field_of(info, "batch_size", self.url),
            **{key: field_of(body, key, self.url) for key in names},
        )
        return self.env

    async def push(
        self,
        group: Mapping[str, Any],
        *,
        policy_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> PushReceipt:
        """Push one group. It is stored exactly once, even if attempts fail and are retried. Raises
        BadGroup before anything is sent."""
        return await self._push([group], policy_version, idempotency_key, listed=False)

    async def push_many(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        policy_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> PushReceipt:
        """Push several groups; either all are stored or none. Raises the errors of ``push``."""
        if not groups:
            return PushReceipt(0, 0, (), replayed=False)
        return await self._push(groups, policy_version, idempotency_key, listed=True)

    async def _push(
        self,
        groups: Sequence[Mapping[str, Any]],
        policy_version: int | None,
        key: str | None,
        *,
        listed: bool,
    ) -> PushReceipt:
        body, content = encoding.encode_groups(
            groups,
            listed=listed,
            binary=self._binary,
            compression=self._compression,
            env_id=self.env.env_id if self.env else None,
        )
        headers = self._fence() | content | {"Idempotency-Key": key or uuid.uuid4().hex}
        if policy_version is not None:
            headers["X-Policy-Version"] = str(policy_version)
        response = await self._send(
            "POST", "/scored_data_list" if listed else "/scored_data", headers, body
        )
        answer = json_object(response, self.url)
        reasons = response.headers.get("x-quarantined", "")
        if reasons:
            logger.warning("%s: pushed groups are in quarantine: %s", self.url, reasons)
        return PushReceipt(
            len(groups),
            answer.get("buffered", 0) if listed else int(answer.get("status") == "buffered"),
            tuple(reasons.split(",")) if reasons else (),
            replayed=response.headers.get("idempotency-replayed") == "true",
        )

    async def env_status(self) -> EnvStatus:
        """Return the server's queue and batch numbers for this environment; the request also counts
        as a heartbeat."""
        response = await self._post(
            "/status-env", {"env_id": self._registered_env().env_id}, self._fence()
        )
        status = json_object(response, self.url)
        return EnvStatus(
            **{name: field_of(status, name, self.url) for name in EnvStatus.__annotations__}
        )

    async def pace(self) -> Pace:
        """Return advice on how fast to produce: whether to pause, how many groups to work on at
        once, and whether the run has enough."""
        env = self._registered_env()
        return pace(await self.env_status(), env)

    async def wait_for_room(self, timeout_s: float) -> Pace:
        """Wait until the advice is no longer to pause, and return it. After ``timeout_s`` seconds,
        return the last advice, whose ``pause`` is still set."""
        give_up = process_clock.now() + timeout_s
        poll = _POLL_S
        while True:
            now = await self.pace()
            if not now.pause or now.done or process_clock.now() + poll > give_up:
                return now
            await sleep(poll)
            poll = min(_MAX_POLL_S, poll * 1.5)

    async def disconnect(self) -> None:
        """Unregister as an environment; groups that were pushed can still be served."""
        env = self.env
        self.env = None
        if env is not None:
            await self._post("/disconnect-env", {"env_id": env.env_id})

    def _registered_env(self) -> EnvRegistration:
        if self.env is None:
            raise NotRegistered(
                self.url, "this client is not an environment; call register_env first"
            )
        return self.env

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
        """Start a run, or continue the one of the same group, project and batch size; any other run
        is replaced.

        ``join``: continue the current run, whichever it is. ``reset``: start a new run in any case.
        ``batch_size`` in sequences; ``max_staleness`` in policy versions.
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
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        headers |= {name: "1" for name, is_set in (("X-Join", join), ("X-Reset", reset)) if is_set}
        response = await self._post("/register", registration, headers)
        number = field_of(json_object(response, self.url), "uuid", self.url)
        self._epoch = epoch_of(response)
        return TrainerRegistration(int(number), self._epoch)

    async def pull(self, timeout_s: float, *, acknowledges: Batch | None = None) -> Batch:
        """Return the next batch.

        Waits up to ``timeout_s`` seconds, then raises NoBatchYet. ``acknowledges``: a batch whose
        lease ends with this request. Raises NotRegistered, LeaseLost.
        """
        poll = _POLL_S
        began = process_clock.now()
        last_log = began
        await self._acknowledge_returned()
        while True:
            response = await self._request_with_retries(
                "GET", "/batch", self._pull_headers(acknowledges), before_retry=self._give_back
            )
            outcome = self._parse_batch(check_response(response, self.url))
            if isinstance(outcome, Batch):
                if not self._explicit_acks:
                    self._in_hand.add(outcome.lease_id)
                return outcome
            waited = process_clock.now() - began
            if waited + poll > timeout_s:
                raise NoBatchYet(self.url, waited, outcome)
            if process_clock.now() - last_log > _LOG_EVERY_S:
                last_log = process_clock.now()
                logger.info("%s: waits for a batch, %.0f s so far (%s)", self.url, waited, outcome)
            await sleep(poll)
            poll = min(_MAX_POLL_S, poll * 1.5)

    async def _acknowledge_returned(self) -> None:
        """Acknowledge the batches that earlier pulls returned. They are acknowledged one by one,
        because the server's implicit acknowledgement would include batches whose answers never
        arrived."""
        for lease_id in list(self._in_hand):
            try:
                await self.ack(lease_id)
            except LeaseLost as error:
                logger.warning("the acknowledgement of a batch came too late: %s", error)
                self._in_hand.discard(lease_id)

    async def _give_back(self, broken: Response) -> None:
        """Give back a batch whose response broke off. Otherwise the server, which may believe that
        it arrived, would keep it until its lease expires."""
        if lease_id := broken.headers.get("x-lease-id"):
            try:
                await self.nack(lease_id)
            except LeaseLost as error:
                logger.warning("a batch that broke off is not ours any more: %s", error)

    def _parse_batch(self, response: Response) -> Batch | str:
        """Return the batch in an answer, or the server's reason why there is none."""
        headers = response.headers
        answer = encoding.decode_batch(response.body, headers.get("content-type", ""), self.url)
        if answer.get("status") == "error":
            raise NotRegistered(self.url, str(answer.get("message")))
        groups = answer.get("batch")
        if groups is None:
            return headers.get("x-batch-reason", "no reason given")
        try:
            return Batch(
                groups,
                headers["x-lease-id"],
                int(headers["x-batch-step"]),
                int(headers["x-min-policy-version"]),
                int(headers["x-max-policy-version"]),
                redelivered=headers.get("x-redelivered") == "1",
            )
        except (KeyError, ValueError) as error:
            raise BadAnswer(self.url, f"a batch without a usable lease ({error})") from None

    def _pull_headers(self, acknowledges: Batch | None) -> dict[str, str]:
        headers = self._fence() | {"X-Trainer-Id": self.trainer_id, "X-Ack-Mode": "explicit"}
        headers["Accept-Encoding"] = encoding.accepted_codings(self._compression)
        if self._binary:
            headers["Accept"] = encoding.MSGPACK
        if acknowledges is not None:
            headers["X-Ack"] = acknowledges.lease_id
        return headers

    async def ack(self, lease_id: str) -> None:
        """Acknowledge that the batch was consumed; idempotent. Raises LeaseLost."""
        json_object(await self._post("/batch/ack", {"lease_id": lease_id}), self.url)
        self._in_hand.discard(lease_id)

    async def nack(self, lease_id: str) -> None:
        """Give the batch back; the next pull gets it. Raises LeaseLost."""
        self._in_hand.discard(lease_id)
        json_object(await self._post("/batch/nack", {"lease_id": lease_id}), self.url)

    async def renew(self, lease_id: str) -> float:
        """Extend the lease; return the seconds until it expires. Raises LeaseLost."""
        answer = json_object(await self._post("/batch/renew", {"lease_id": lease_id}), self.url)
        return float(answer["expires_in_s"])

    async def set_policy_version(self, version: int) -> None:
        """Announce the version of the weights with which rollouts are sampled from now on."""
        await self._post("/policy_version", {"version": version})

    # ---- queries

    async def info(self) -> dict[str, Any]:
        """Return ``batch_size`` and ``max_token_len``; -1 without a trainer."""
        return await self._get("/info")

    async def run_names(self) -> dict[str, Any]:
        """Return ``group`` and ``project`` of the trainer's registration; null without one."""
        return await self._get("/wandb_info")

    async def status(self) -> dict[str, Any]:
        """Return ``current_step`` and ``queue_size`` (in groups)."""
        return await self._get("/status")

    async def leases(self) -> list[dict[str, Any]]:
        """Return the batches that trainers hold: ``lease_id``, ``owner``, ``step``, ``state``,
        ``expires_in_s``."""
        return (await self._get("/leases"))["leases"]

    # ---- requests

    async def _get(self, path: str) -> dict[str, Any]:
        return json_object(await self._send("GET", path), self.url)

    async def _post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Response:
        content = {"Content-Type": "application/json"} | dict(headers or {})
        return await self._send("POST", path, content, json.dumps(body).encode())

    def _fence(self) -> dict[str, str]:
        return {} if self._epoch is None else {"X-Epoch": str(self._epoch)}

    async def _send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Response:
        return check_response(
            await self._request_with_retries(method, path, headers or {}, body), self.url
        )

    async def _request_with_retries(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        before_retry: Callable[[Response], Awaitable[None]] | None = None,
    ) -> Response:
        """Send a request, retrying failures, and return the first answer with a status below 500.
        ``before_retry`` is called with the failed response before each new attempt. After the deadline,
        raises Unreachable with the last cause."""
        began = process_clock.now()
        last_log = process_clock.now()
        attempt = 0
        while True:
            response = await self._request_once(method, path, headers, body)
            if not response.failure and response.status < 500:
                return response
            attempt += 1
            wait = retry_wait_s(attempt, response)
            now = process_clock.now()
            if now + wait > began + self._retry_for_s:
                attempts = f"gave up after {attempt} attempts in {now - began:.1f} s"
                raise Unreachable(self.url, f"{method} {path}: {response.cause}; {attempts}")
            if attempt == 1 or now - last_log > _LOG_EVERY_S:
                last_log = now
                logger.warning(
                    "%s: %s %s: %s; trying again", self.url, method, path, response.cause
                )
            await sleep(wait)
            if before_retry is not None:
                await before_retry(response)

    async def _request_once(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Response:
        status = 0
        received = httpx.Headers()
        sent = {"Accept-Encoding": "identity"} | dict(headers)
        try:
            async with self._http.stream(method, path, headers=sent, content=body) as response:
                status = response.status_code
                received = response.headers
                return Response(status, received, await response.aread())
        except httpx.RequestError as error:
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return Response(status, received, b"", cause)


class TrajectoryClient(BlockingFacade[AsyncTrajectoryClient]):
    """``AsyncTrajectoryClient`` for blocking callers on any thread. Use it as a context manager, or
    call ``close``; open a new one after a fork."""

    @creates_inner(AsyncTrajectoryClient)
    def __init__(self, inner: AsyncTrajectoryClient) -> None:
        super().__init__(inner, "trajectory-client")

    @property
    def url(self) -> str:
        """Address of the server."""
        return self.inner.url

    @property
    def trainer_id(self) -> str:
        """Name under which this client's batches are leased."""
        return self.inner.trainer_id

    @property
    def env(self) -> EnvRegistration | None:
        """This client's registration as an environment, or None."""
        return self.inner.env

    register_env = blocking(AsyncTrajectoryClient.register_env)
    push = blocking(AsyncTrajectoryClient.push)
    push_many = blocking(AsyncTrajectoryClient.push_many)
    env_status = blocking(AsyncTrajectoryClient.env_status)
    pace = blocking(AsyncTrajectoryClient.pace)
    wait_for_room = blocking(AsyncTrajectoryClient.wait_for_room)
    disconnect = blocking(AsyncTrajectoryClient.disconnect)
    register = blocking(AsyncTrajectoryClient.register)
    pull = blocking(AsyncTrajectoryClient.pull)
    ack = blocking(AsyncTrajectoryClient.ack)
    nack = blocking(AsyncTrajectoryClient.nack)
    renew = blocking(AsyncTrajectoryClient.renew)
    set_policy_version = blocking(AsyncTrajectoryClient.set_policy_version)
    info = blocking(AsyncTrajectoryClient.info)
    run_names = blocking(AsyncTrajectoryClient.run_names)
    status = blocking(AsyncTrajectoryClient.status)
    leases = blocking(AsyncTrajectoryClient.leases)
