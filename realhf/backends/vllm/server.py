"""vLLM server as a child process: start, wait until ready, watch, and stop with all of its
processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from realhf.backends.vllm.api import EXTENSION
from realhf.base import process_clock
from realhf.base.installation import PACKAGE
from realhf.base.loopback import LOOPBACK_INTERFACE, free_port

_POLL_S = 0.25
"""Seconds between checks whether the server is ready."""
_STOP_TIMEOUT_S = 20.0
"""Seconds that the server has to stop before it is killed."""
_OOM_PATTERN = re.compile(r"gpu.memory.utilization|out of memory|cache blocks", re.IGNORECASE)
"""Pattern of vLLM's last output after it ran out of memory. Some of these messages name an option
of vLLM, so the error also names this package's option."""
HEAD_OVERRIDE = '{"head_dtype": "float32"}'
"""Override of the model's configuration with which vLLM computes logits in fp32, by bf16 products
with fp32 sums on CUDA, so that the head's weights keep their dtype."""
_NO_SHARE = 0.01
"""Share of a GPU's memory that is certainly free."""
_LOG_END_CHARS = 3000
"""Number of characters at the end of the log that are reported if the server fails."""


@dataclass(frozen=True)
class VllmOptions:
    """Options of a vLLM server."""

    dtype: str = "float32"
    """float32, bfloat16 or auto."""
    threads: int | None = None
    """Number of threads of the CPU backend; None: the default of vLLM."""
    max_model_len: int | None = None
    """Maximum length of a sequence; None: that of the model."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory; None: the default of vLLM."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache on each GPU; None: what ``gpu_memory_utilization`` leaves. vLLM measures
    that remainder while it starts, and takes what another process allocates meanwhile for its
    own."""
    runner: str = "auto"
    """Model runner: v1, v2, or auto for vLLM's own choice."""
    tensor_parallel_size: int = 1
    """Number of devices that share the model."""
    cuda: bool = False
    """Whether the server runs on CUDA. It then captures CUDA graphs, computes prompts in chunks
    (which crashes a CPU server if a request has a seed), caches prefixes, and receives weights by
    vLLM's transfer between GPUs."""
    transfer: str = "ipc"
    """Transfer of weights on CUDA: ipc from memory of the server's own GPUs, or nccl from a trainer
    on another one."""
    interface: str = LOOPBACK_INTERFACE
    """Network interface at which the server's workers, and with nccl the trainer, meet."""
    arguments: tuple[str, ...] = ()
    """Further arguments of ``vllm serve``."""


class VllmServer:
    """``vllm serve`` on this host's loopback interface; use it as a context manager.

    The server ends with the process that started it, even if that process is killed. ``url`` is its
    address; its output goes to the file ``log``.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        executable: Path,
        log: Path,
        options: VllmOptions = VllmOptions(),
    ) -> None:
        """Start the server, without waiting for it (see ``wait_until_up``).

        ``model`` is a folder or hub id, ``executable`` the ``vllm`` of its environment. Raises
        FileNotFoundError without the executable.
        """
        if not executable.exists():
            raise FileNotFoundError(
                f"{executable}: no vLLM there (`make test-vllm` installs one for the CPU)"
            )
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        imports = _make_import_folder(log.parent / "vllm_imports")
        command = [
            sys.executable,
            "-m",
            "realhf.backends.vllm.guard",
            *_build_command(str(executable), str(model), port, options),
        ]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_build_environment(options, imports),
                start_new_session=True,
            )

    def wait_until_up(self, timeout_s: float = 180.0) -> None:
        """Wait until the server has sampled a first token. If it fails to, stop it, and raise
        TimeoutError or RuntimeError with the end of its log."""
        deadline = process_clock.now() + timeout_s
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}
        last_answer = "nothing"
        try:
            with httpx.Client(base_url=self.url, trust_env=False) as http:
                while (left_s := deadline - process_clock.now()) > 0:
                    if failure := self.describe_failure():
                        raise RuntimeError(failure)
                    try:
                        answer = http.post("/inference/v1/generate", json=body, timeout=left_s)
                        if answer.is_success:
                            return
                        last_answer = f"{answer.status_code} {answer.text[:300]}"
                    except httpx.HTTPError as error:
                        last_answer = type(error).__name__
                    time.sleep(_POLL_S)
            raise TimeoutError(
                f"the vLLM server at {self.url} is not up within {timeout_s:g} s (last answer: "
                f"{last_answer}): "
                f"{self._read_log_end()}"
            )
        except BaseException:
            self.stop()
            raise

    def describe_failure(self) -> str | None:
        """Return why the server ended, with the end of its log; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        log_end = self._read_log_end()
        advice = (
            "; engine.gpu_memory_utilization is its share of the GPU"
            if _OOM_PATTERN.search(log_end)
            else ""
        )
        return f"the vLLM server at {self.url} ended (code {code}): {log_end}{advice}"

    def stop(self) -> None:
        """End the server and all of its processes. A second call does nothing."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> VllmServer:
        self.wait_until_up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _read_log_end(self) -> str:
        """Return the end of the server's log."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_END_CHARS:]


def _build_command(executable: str, model: str, port: int, options: VllmOptions) -> Sequence[str]:
    """Return the command line of a server."""
    # In the order of the options: log-probabilities after the temperature, as a trainer computes
    # them; no sampling defaults from the model's folder; token ids as input and output; a report
    # of cached prompt tokens.
    command = [
        executable,
        "serve",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        options.dtype,
        "--logprobs-mode",
        "processed_logprobs",
        "--generation-config",
        "vllm",
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        "--worker-extension-cls",
        EXTENSION,
    ]
    # The trainer computes logits in fp32, and rounding them to bf16 moves log-probabilities.
    if options.dtype != "float32":
        command += ["--hf-overrides", HEAD_OVERRIDE]
    if options.cuda:
        transfer = json.dumps({"backend": options.transfer})
        command += ["--enable-prefix-caching", "--weight-transfer-config", transfer]
    else:
        command += ["--no-enable-chunked-prefill", "--enforce-eager"]
    if options.max_model_len is not None:
        command += ["--max-model-len", str(options.max_model_len)]
    if options.kv_cache_bytes is not None:
        # vLLM does not start unless its share of the memory is free, although the share has no
        # other effect with a KV cache of fixed size.
        command += ["--kv-cache-memory-bytes", str(options.kv_cache_bytes)]
        command += ["--gpu-memory-utilization", str(_NO_SHARE)]
    elif options.gpu_memory_utilization is not None:
        command += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    if options.tensor_parallel_size > 1:
        command += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
    return [*command, *options.arguments]


def _make_import_folder(folder: Path) -> Path:
    """Return a folder that contains only this package, for the server's import path. The server's
    environment has its own packages, which must not be replaced by those installed next to this
    one."""
    folder.mkdir(exist_ok=True)
    link = folder / PACKAGE.name
    if not link.is_symlink():
        link.symlink_to(PACKAGE, target_is_directory=True)
    return folder


def _build_environment(options: VllmOptions, imports: Path) -> dict[str, str]:
    """Return the environment variables of a server."""
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": str(imports.resolve()),
        # NCCL would listen on an interface to other machines, and authenticates nobody.
        "NCCL_SOCKET_IFNAME": f"={options.interface}",
    }
    if options.threads is not None:
        variables["OMP_NUM_THREADS"] = str(options.threads)
    if options.runner != "auto":
        variables["VLLM_USE_V2_MODEL_RUNNER"] = str(int(options.runner == "v2"))
    return {**os.environ, **variables}
