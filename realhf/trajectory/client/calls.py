"""Defines every operation of a client as steps without I/O: what is sent, how long to wait, what the answer means.

Source: docs/reference/trajectory.md 2.2 to 2.8, 3.2, 3.9, 3.10.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realhf.trajectory.client import encoding
from realhf.trajectory.client.protocol import (
    BadAnswer,
    Batch,
    EnvRegistration,
    EnvStatus,
    Failed,
    LeaseLost,
    NoBatchYet,
    NotRegistered,
    Pace,
    Pause,
    PushReceipt,
    Request,
    Response,
    Retry,
    Steps,
    TrainerRegistration,
    answered,
    checked,
    epoch_of,
    field_of,
    json_object,
    pace,
)

logger = logging.getLogger(__name__)

_POLL_S, _LONGEST_POLL_S = 0.1, 1.0
_TELL_EVERY_S = 10.0
"""Seconds between two log lines about waiting for the server."""


@dataclass(frozen=True)
class ClientOptions:
    """Holds the options of a client.

    ``url`` of the server; ``token``: bearer; ``trainer_id``: the name under which batches are leased (empty: a new one
    for each client); ``binary``: MessagePack with tensors instead of JSON; ``compression``: auto, none, gzip or zstd;
    ``retry``: for how long; ``explicit_acks``: only ``ack`` ends a batch, and the next pull does not.
    """

    url: str
    token: str
    trainer_id: str
    binary: bool
    compression: str
    retry: Retry
    explicit_acks: bool


class Calls:
    """Holds the operations of one client, and what it remembers: its environment, its trainer's name, the epoch."""

    def __init__(self, options: ClientOptions) -> None:
        self.env: EnvRegistration | None = None
        self.trainer_id = options.trainer_id or uuid.uuid4().hex
        self._options = options
        self._compression = encoding.choose_compression(options.compression, options.url, binary=options.binary)
        self._epoch: int | None = None
        self._in_hand: set[str] = set()

    # ---- both

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._options.url

    def get(self, path: str) -> Steps[dict[str, Any]]:
        """Request a path and return the JSON object of the answer."""
        response = yield from self._send(Request("GET", path, self._headers()))
        return json_object(response, self._options.url)

    def _post(self, path: str, body: Mapping[str, Any], **headers: str) -> Steps[Response]:
        content = {"Content-Type": "application/json"} | headers
        return (yield from self._send(Request("POST", path, self._headers() | content, json.dumps(body).encode())))

    def _send(self, request: Request) -> Steps[Response]:
        response = yield from answered(request, self._options.url, self._options.retry)
        return checked(response, self._options.url)

    def _headers(self, *, fenced: bool = False) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity"}
        if self._options.token:
            headers["Authorization"] = f"Bearer {self._options.token}"
        if fenced and self._epoch is not None:
            headers["X-Epoch"] = str(self._epoch)
        return headers

    # ---- producer

    def register_env(
        self,
        name: str,
        group_size: int,
        max_token_length: int,
        weight: float,
        min_batch_allocation: float | None,
        wait_s: float,
    ) -> Steps[EnvRegistration]:
        """See ``TrajectoryClient.register_env``."""
        url, clock = self._options.url, self._options.retry.clock
        wanted = {
            "desired_name": name,
            "group_size": group_size,
            "max_token_length": max_token_length,
            "weight": weight,
            "min_batch_allocation": min_batch_allocation,
        }
        began, told = clock(), clock()
        while True:
            # A key of its own for each question: a replayed answer "wait" would come for ever.
            response = yield from self._post("/register-env", wanted, **{"Idempotency-Key": uuid.uuid4().hex})
            body = json_object(response, url)
            if body.get("status") == "success":
                break
            waited = clock() - began
            if waited >= wait_s:
                raise NotRegistered(
                    url, f"environment {name!r} waited {waited:.0f} s for the trainer: {body.get('status')}"
                )
            if clock() - told > _TELL_EVERY_S:
                told = clock()
                logger.info("%s: environment %s waits for the trainer, %.0f s so far", url, name, waited)
            yield Pause(min(1.0, max(0.0, wait_s - waited)))
        info = yield from self.get("/info")
        self._epoch = epoch_of(response)
        self.env = EnvRegistration(
            group_size=group_size,
            min_batch_allocation=min_batch_allocation,
            epoch=self._epoch,
            batch_size=field_of(info, "batch_size", url),
            **{
                key: field_of(body, key, url)
                for key in (
                    "env_id",
                    "wandb_name",
                    "checkpoint_dir",
                    "starting_step",
                    "checkpoint_interval",
                    "num_steps",
                )
            },
        )
        return self.env

    def push(
        self, groups: Sequence[Mapping[str, Any]], *, listed: bool, policy_version: int | None, key: str | None
    ) -> Steps[PushReceipt]:
        """Push groups, as one group or (``listed``) as a list; see ``TrajectoryClient.push_many``."""
        if listed and not groups:
            return PushReceipt(0, 0, (), replayed=False)
        options = self._options
        body, content = encoding.encode_groups(
            groups,
            listed=listed,
            binary=options.binary,
            compression=self._compression,
            env_id=self.env.env_id if self.env else None,
        )
        headers = self._headers(fenced=True) | content | {"Idempotency-Key": key or uuid.uuid4().hex}
        if policy_version is not None:
            headers["X-Policy-Version"] = str(policy_version)
        path = "/scored_data_list" if listed else "/scored_data"
        response = yield from self._send(Request("POST", path, headers, body))
        answer = json_object(response, options.url)
        buffered = answer.get("buffered", 0) if listed else int(answer.get("status") == "buffered")
        reasons = response.headers.get("x-quarantined", "")
        receipt = PushReceipt(
            len(groups),
            buffered,
            tuple(reasons.split(",")) if reasons else (),
            replayed=response.headers.get("idempotency-replayed") == "true",
        )
        if receipt.quarantined:
            logger.warning("%s: pushed groups are in quarantine: %s", options.url, reasons)
        return receipt

    def env_status(self) -> Steps[EnvStatus]:
        """See ``TrajectoryClient.env_status``."""
        body = {"env_id": self._registered_env().env_id}
        headers = self._headers(fenced=True) | {"Content-Type": "application/json"}
        response = yield from self._send(Request("POST", "/status-env", headers, json.dumps(body).encode()))
        found = json_object(response, self._options.url)
        return EnvStatus(**{name: field_of(found, name, self._options.url) for name in EnvStatus.__annotations__})

    def pace(self) -> Steps[Pace]:
        """See ``TrajectoryClient.pace``."""
        env = self._registered_env()
        return pace((yield from self.env_status()), env)

    def wait_for_room(self, timeout_s: float) -> Steps[Pace]:
        """See ``TrajectoryClient.wait_for_room``."""
        clock = self._options.retry.clock
        give_up, poll = clock() + timeout_s, _POLL_S
        while True:
            now = yield from self.pace()
            if not now.pause or now.done or clock() + poll > give_up:
                return now
            yield Pause(poll)
            poll = min(_LONGEST_POLL_S, poll * 1.5)

    def disconnect(self) -> Steps[None]:
        """See ``TrajectoryClient.disconnect``."""
        env, self.env = self.env, None
        if env is not None:
            yield from self._post("/disconnect-env", {"env_id": env.env_id})

    def _registered_env(self) -> EnvRegistration:
        if self.env is None:
            raise NotRegistered(self._options.url, "this client is no environment; call register_env first")
        return self.env

    # ---- trainer

    def register(
        self, registration: Mapping[str, Any], *, join: bool, reset: bool, key: str | None
    ) -> Steps[TrainerRegistration]:
        """See ``TrajectoryClient.register``; ``registration`` is the body of the request."""
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        headers |= {name: "1" for name, wanted in (("X-Join", join), ("X-Reset", reset)) if wanted}
        response = yield from self._post("/register", registration, **headers)
        number = field_of(json_object(response, self._options.url), "uuid", self._options.url)
        self._epoch = epoch_of(response)
        return TrainerRegistration(int(number), self._epoch)

    def pull(self, timeout_s: float, acknowledges: str | None) -> Steps[Batch]:
        """Ask for a batch at least once, and again while there is none; give back a batch that arrived in pieces."""
        url, clock = self._options.url, self._options.retry.clock
        began, poll, told = clock(), _POLL_S, clock()
        yield from self._acknowledge_returned()
        while True:
            outcome = yield from self._pull_once(acknowledges)
            if isinstance(outcome, Batch):
                if not self._options.explicit_acks:
                    self._in_hand.add(outcome.lease_id)
                return outcome
            waited = clock() - began
            if waited + poll > timeout_s:
                raise NoBatchYet(url, waited, outcome)
            if clock() - told > _TELL_EVERY_S:
                told = clock()
                logger.info("%s: waits for a batch, %.0f s so far (%s)", url, waited, outcome)
            yield Pause(poll)
            poll = min(_LONGEST_POLL_S, poll * 1.5)

    def _acknowledge_returned(self) -> Steps[None]:
        """Acknowledge the batches that earlier pulls returned. The server itself would also count those whose answers
        never arrived."""
        for lease_id in list(self._in_hand):
            try:
                yield from self.end_lease("ack", lease_id)
            except LeaseLost as error:
                logger.warning("the acknowledgement of a batch came too late: %s", error)
                self._in_hand.discard(lease_id)

    def _pull_once(self, acknowledges: str | None) -> Steps[Batch | str]:
        """Return a batch, or the reason why there is none."""
        request = Request("GET", "/batch", self._pull_headers(acknowledges))
        response = yield from answered(request, self._options.url, self._options.retry, self._give_back)
        return self._batch(checked(response, self._options.url))

    def _give_back(self, outcome: Response | Failed) -> Steps[None]:
        """Give back a batch that broke off: the server may believe that it arrived, and would keep it until its lease
        expires."""
        lease_id = outcome.headers.get("x-lease-id")
        if lease_id is None:
            return
        try:
            yield from self.end_lease("nack", lease_id)
        except LeaseLost as error:
            logger.warning("a batch that broke off is not ours any more: %s", error)

    def _batch(self, response: Response) -> Batch | str:
        url, headers = self._options.url, response.headers
        found = encoding.decode_batch(response.body, headers.get("content-type", ""), url)
        if found.get("status") == "error":
            raise NotRegistered(url, str(found.get("message")))
        groups = found.get("batch")
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
            raise BadAnswer(url, f"a batch without a usable lease ({error})") from None

    def _pull_headers(self, acknowledges: str | None) -> dict[str, str]:
        headers = self._headers(fenced=True) | {"X-Trainer-Id": self.trainer_id}
        headers["Accept-Encoding"] = encoding.accepted_codings(self._compression)
        headers["X-Ack-Mode"] = "explicit"
        if self._options.binary:
            headers["Accept"] = encoding.MSGPACK
        if acknowledges is not None:
            headers["X-Ack"] = acknowledges
        return headers

    def end_lease(self, verb: str, lease_id: str) -> Steps[dict[str, Any]]:
        """Send ``ack``, ``nack`` or ``renew`` for a lease and return the answer."""
        if verb == "nack":
            self._in_hand.discard(lease_id)
        response = yield from self._post(f"/batch/{verb}", {"lease_id": lease_id})
        if verb == "ack":
            self._in_hand.discard(lease_id)
        return json_object(response, self._options.url)

    def set_policy_version(self, version: int) -> Steps[None]:
        """See ``TrajectoryClient.set_policy_version``."""
        yield from self._post("/policy_version", {"version": version})
