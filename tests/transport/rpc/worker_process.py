"""A real worker process for the tests: ``python worker_process.py ENDPOINT RUN_ID NAME
LEAVE_WITHIN_S``."""

from __future__ import annotations

import sys
import time

from realhf.transport.rpc_worker import RpcWorker

LOG: list[int] = []


def boom(payload: dict) -> None:
    raise ValueError(f"cannot digest {payload['meal']}")


def slow_append(payload: dict) -> int:
    time.sleep(payload["seconds"])
    LOG.append(payload["number"])
    return len(LOG)


def main() -> None:
    endpoint, run_id, name, leave_within_s = sys.argv[1:]
    worker = RpcWorker(
        name,
        "model",
        0,
        run_id,
        endpoint,
        ordered={
            "echo": lambda payload: payload,
            "boom": boom,
            "append": slow_append,
            "log": lambda _: LOG,
            "huge": lambda size: bytes(size),
            "unsendable": lambda _: object(),
            "exit": lambda _: sys.exit(3),
        },
        immediate={
            "status": lambda _: list(LOG),
            "nap": time.sleep,
            "services": lambda _: {
                peer.name: sorted(peer.endpoints) for peer in worker.roster.values()
            },
            "roster": lambda _: {peer.name: peer.kind for peer in worker.roster.values()},
        },
        data_endpoint="tcp://127.0.0.1:1",
        endpoints={"env": "http://127.0.0.1:2"},
        connect_timeout_s=60,
        master_lost_after_s=10,
        leave_within_s=float(leave_within_s) if leave_within_s else None,
    )
    worker.run()


if __name__ == "__main__":
    main()
