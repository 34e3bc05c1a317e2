"""Renews the leases in hand from a thread of its own, so that a long step does not lose its batch."""

from __future__ import annotations

import logging
import threading
import time

from realhf.trajectory.client import LeaseLost, TrajectoryClient, TrajectoryError

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_JOIN_S = 5.0


class LeaseKeeper:
    """Renews leases with ``client``, which belongs to the keeper and is closed by it. A lease is renewed when it comes
    in, which shows how long it lasts, and whenever a third of that time has gone by."""

    def __init__(self, client: TrajectoryClient) -> None:
        self._client = client
        self._due: dict[str, float] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self._thread.start()

    def keep(self, lease_id: str) -> None:
        """Renew this lease from now on."""
        with self._changed:
            self._due[lease_id] = time.monotonic()
            self._changed.notify()

    def release(self, lease_id: str) -> None:
        """Stop renewing this lease."""
        with self._changed:
            self._due.pop(lease_id, None)

    def close(self) -> None:
        """Stop the thread and close the client."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_JOIN_S)
        self._client.close()

    def _run(self) -> None:
        while (lease_id := self._next()) is not None:
            wait = self._renewed(lease_id)
            with self._changed:
                if lease_id not in self._due:
                    continue
                if wait is None:
                    del self._due[lease_id]
                else:
                    self._due[lease_id] = time.monotonic() + wait

    def _next(self) -> str | None:
        """Wait for and return the lease that is to be renewed now; None when the keeper is closed."""
        with self._changed:
            while not self._closed:
                lease_id = min(self._due, key=self._due.__getitem__, default=None)
                wait = None if lease_id is None else self._due[lease_id] - time.monotonic()
                if lease_id is not None and wait is not None and wait <= 0:
                    return lease_id
                self._changed.wait(wait)
        return None

    def _renewed(self, lease_id: str) -> float | None:
        """Renew a lease; return the seconds until the next renewal, None if the lease has ended."""
        try:
            return self._client.renew(lease_id) / 3
        except LeaseLost as error:
            with self._changed:
                wanted = lease_id in self._due
            if wanted:
                logger.warning("somebody else may train on a batch of ours: %s", error)
            return None
        except TrajectoryError as error:
            logger.warning("a lease was not renewed, and is tried again: %s", error)
            return _RETRY_S
