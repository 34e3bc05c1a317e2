"""A real worker process of the toy graph: python toy_worker.py NAME INDEX ROLES RUN_ID MASTER
FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from realhf.transport.data_plane import DataPlane
from realhf.transport.rpc_worker import RpcWorker
from realhf.transport.tensor_store import TensorStore
from tests.dataflow.toy_graph import ToyGen, toy_host
from tests.dataflow.toy_source import toy_graph


def main() -> None:
    name, index, roles, run_id, master, folder = sys.argv[1:]
    ToyGen.scale = 5000
    store = TensorStore(name)
    plane = DataPlane(name, run_id, store)
    plane.start()
    host = toy_host(roles.split(","), toy_graph(), Path(folder), store, plane.fetch)
    worker = RpcWorker(
        name,
        "model_worker",
        int(index),
        run_id,
        master,
        ordered=host.handlers(),
        immediate=host.immediate_handlers(),
        data_endpoint=plane.endpoint,
    )
    try:
        worker.run()
    finally:
        plane.close()


if __name__ == "__main__":
    main()
