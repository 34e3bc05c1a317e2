"""A real master of the toy graph: python toy_master.py FOLDER. Prints one JSON line.

Two steps on two worker processes, with every object reachable from the master's state that could
hold a tensor; then the reference's worker is killed in a third step.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

from realhf.dataflow.function_executor import FunctionExecutor
from realhf.dataflow.model_function_call import MFCFailed
from realhf.dataflow.step_source import SynchronousSteps
from realhf.transport.rpc_master import RpcMaster
from tests.dataflow.toy_source import ToySource, toy_graph

SKIP = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType, type)


def reachable(*roots: Any) -> list[Any]:
    """Every object reachable from the roots, code and modules left out."""
    seen: dict[int, Any] = {}
    todo = list(roots)
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, SKIP):
            continue
        seen[id(item)] = item
        todo += gc.get_referents(item)
    return list(seen.values())


def tensor_like(*roots: Any) -> list[str]:
    """Tensors, and buffers of 64 KiB and more, that are not columns of object references."""
    found = []
    for item in reachable(*roots):
        size = 0
        if isinstance(item, (bytes, bytearray)):
            size = len(item)
        elif isinstance(item, (memoryview, np.ndarray)):
            size = item.nbytes
        if size >= 1 << 16 or "Tensor" in type(item).__name__.replace("TensorStore", ""):
            found.append(f"{type(item).__name__} of {size} bytes")
    return found


async def run(folder: Path) -> dict[str, Any]:
    rpc = RpcMaster("toy", heartbeat_s=0.5, dead_after_s=60.0)
    await rpc.start()
    roles = {"w0": "actor", "w1": "ref"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.dataflow.toy_worker",
                name,
                str(i),
                role,
                "toy",
                rpc.endpoint,
                str(folder),
            ]
        )
        for i, (name, role) in enumerate(roles.items())
    ]
    answer: dict[str, Any] = {}
    try:
        await rpc.wait_for(roles, 60)
        workers = {"actor": ["w0"], "ref": ["w1"]}
        graph = toy_graph()
        source = ToySource()
        keys = graph.required_dataset_keys()
        steps = SynchronousSteps(
            source, rpc, worker="w0", keys=keys, n_seqs=graph.n_seqs, timeout_s=60
        )
        executor = FunctionExecutor(
            graph, rpc, source, make_loader=steps.loader, workers=workers, seed=7
        )
        async with executor:
            report = await executor.execute_step(0)
            answer["noise"], answer["weight"] = (
                report.stats["gen"]["noise"],
                report.stats["train"]["weight"],
            )
            answer["tensors_in_between"] = []
            step = asyncio.create_task(executor.execute_step(1))
            while not step.done():
                answer["tensors_in_between"] += tensor_like(executor, executor.buffer, rpc)
                await asyncio.sleep(0.005)
            answer["results"] = [result.id for result in step.result().results]
            answer["tensors"] = tensor_like(executor, step.result())
            answer["objects"] = len(reachable(executor))
            answer["held"] = {"w1": (await rpc.call("w1", "stats", {}, timeout_s=60))["nbytes"]}
            answer |= await killed(executor, processes[1])
        answer["held"]["w0"] = (await rpc.call("w0", "stats", {}, timeout_s=60))["nbytes"]
    finally:
        await rpc.close()
        answer["exits"] = [process.wait(60) for process in processes]
    answer["torch"] = "torch" in sys.modules
    return answer


async def killed(executor: FunctionExecutor, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    process.kill()
    began = time.monotonic()
    try:
        await executor.execute_step(2)
    except MFCFailed as error:
        return {"error": str(error), "seconds": time.monotonic() - began}
    return {"error": "none"}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(Path(sys.argv[1])))))
