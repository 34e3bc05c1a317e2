"""A worker on another host: ``python host_process.py MASTER BIND KEY_FILE NAME``. It answers
``echo``, and serves an endpoint of each kind that a worker has."""

from __future__ import annotations

import sys
from pathlib import Path

from realhf.api.config import NetworkConfig
from realhf.scheduler.process import run_guarded
from realhf.transport.data_plane import DataPlane
from realhf.transport.network import Network, RunKeys
from realhf.transport.push_stream import StreamReceiver
from realhf.transport.rpc_worker import RpcWorker
from realhf.transport.service import ServiceServer
from realhf.transport.tensor_store import TensorStore


def serve() -> None:
    """Register with the master and serve until it says bye."""
    master, bind, key_file, name = sys.argv[1:]
    network = Network.for_worker(NetworkConfig(bind), RunKeys.read(Path(key_file)), master)
    plane = DataPlane(name, "run", TensorStore(name), network=network)
    plane.start()
    service = ServiceServer(
        name, "run", lambda request: request.reply(request.payload), network=network
    )
    stream = StreamReceiver("run", lambda batch: None, credits=1, network=network)

    try:
        RpcWorker(
            name,
            "model",
            0,
            "run",
            master,
            ordered={"echo": lambda payload: payload},
            data_endpoint=plane.endpoint,
            endpoints={"service": service.endpoint, "stream": stream.endpoint},
            network=network,
            connect_timeout_s=60.0,
            master_lost_after_s=4.0,
        ).run()
    finally:
        stream.close()
        service.close()
        plane.close()


if __name__ == "__main__":
    code = run_guarded(serve)
    sys.exit(code)
