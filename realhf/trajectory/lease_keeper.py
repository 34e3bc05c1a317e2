"""Renews the leases in hand from a thread of its own, so that a long step does not lose its batch."""

from __future__ import annotations

import logging
import threading

from realhf.trajectory.client import LeaseLost, TrajectoryClient, TrajectoryError

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 60.0


class LeaseKeeper:
    """``client`` belongs to the keeper, which closes it. A lease is renewed when it comes in and whenever a third of
    its time has gone by."""

    def __init__(self, client: TrajectoryClient) -> None:
        self._client = client
        self._held: set[str] = set()
        self._changed = threading.Condition()
        self._new, self._closed = False, False
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self._thread.start()

    def keep(self, lease_id: str) -> None:
        with self._changed:
            self._held.add(lease_id)
            self._new = True
            self._changed.notify()

    def release(self, lease_id: str) -> None:
        """Renew it no longer."""
        with self._changed:
            self._held.discard(lease_id)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(5.0)
        self._client.close()

    def _run(self) -> None:
        wait = _LONGEST_WAIT_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._new, wait)
                if self._closed:
                    return
                self._new = False
                held = sorted(self._held)
            wait = min([_LONGEST_WAIT_S, *(self._renewed(lease_id) / 3 for lease_id in held)])

    def _renewed(self, lease_id: str) -> float:
        """Seconds that the lease has from now on."""
        try:
            return self._client.renew(lease_id)
        except LeaseLost as error:
            with self._changed:
                lost = lease_id in self._held
                self._held.discard(lease_id)
            if lost:
                logger.warning("the batch of a lease may be trained on twice: %s", error)
        except TrajectoryError as error:
            logger.warning("a lease was not renewed: %s", error)
            return 3.0
        return 3 * _LONGEST_WAIT_S
