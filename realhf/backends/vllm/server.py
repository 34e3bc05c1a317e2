"""Runs a vLLM server as a child: starts it, waits for it, watches it and stops it, leaving nothing
behind."""

from __future__ import annotations

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
from realhf.base.loopback import free_port

_POLL_S = 0.25
_STOP_TIMEOUT_S = 20.0
_OF_MEMORY = re.compile(r"gpu.memory.utilization|out of memory|cache blocks", re.IGNORECASE)
"""What vLLM's last words say when it found too little memory, among them the name of an option that
is not ours."""
_WORDS = 3000
"""Number of characters at the end of its log that are reported when the server fails."""


@dataclass(frozen=True)
class VllmOptions:
    """Holds options of a server.

    ``dtype``: float32, bfloat16 or auto. ``threads``: of the CPU backend (None: its own choice).
    ``max_model_len``: longest sequence (None: the model's). ``gpu_memory_utilization``: share of a
    GPU's memory (None: its own choice); ``tensor_parallel_size``: devices that hold the model
    together. ``cuda``: graphs are captured, prompts may be computed in parts (which ends a CPU
    server when a request has a seed), prefixes are kept, and weights come from memory of the same
    GPUs, by vLLM's own transfer over CUDA IPC. ``arguments``: further arguments of ``vllm serve``.
    """

    dtype: str = "float32"
    threads: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int = 1
    cuda: bool = False
    arguments: tuple[str, ...] = ()


class VllmServer:
    """Runs ``vllm serve`` on this host's loopback; use it as a context manager. The server ends
    with the process that started it, however that one ends. ``url`` is its address; ``log``
    collects its output."""

    def __init__(
        self,
        model: str | Path,
        *,
        executable: Path,
        log: Path,
        options: VllmOptions = VllmOptions(),
    ) -> None:
        """Start the server and return at once (see ``wait_until_up``).

        ``model``: folder or hub name. ``executable``: the ``vllm`` of its environment. Raises
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
        imports = _imports(log.parent / "vllm_imports")
        command = [
            sys.executable,
            "-m",
            "realhf.backends.vllm.guard",
            *_command(str(executable), str(model), port, options),
        ]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(options, imports),
                start_new_session=True,
            )

    def wait_until_up(self, timeout_s: float = 180.0) -> None:
        """Return when the server has sampled a first token. Otherwise stops it and raises
        TimeoutError or RuntimeError with the end of its log."""
        deadline = process_clock.now() + timeout_s
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}
        said = "nothing"
        try:
            with httpx.Client(base_url=self.url, trust_env=False) as http:
                while (left := deadline - process_clock.now()) > 0:
                    if failure := self.failure():
                        raise RuntimeError(failure)
                    try:
                        answer = http.post("/inference/v1/generate", json=body, timeout=left)
                        if answer.is_success:
                            return
                        said = f"{answer.status_code} {answer.text[:300]}"
                    except httpx.HTTPError as error:
                        said = type(error).__name__
                    time.sleep(_POLL_S)
            raise TimeoutError(
                f"the vLLM server at {self.url} is not up within {timeout_s:g} s (last answer: "
                f"{said}): "
                f"{self._last_words()}"
            )
        except BaseException:
            self.stop()
            raise

    def failure(self) -> str | None:
        """Return why the server ended, with the end of its log; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        words = self._last_words()
        advice = (
            "; engine.gpu_memory_utilization is its share of the GPU"
            if _OF_MEMORY.search(words)
            else ""
        )
        return f"the vLLM server at {self.url} ended (code {code}): {words}{advice}"

    def stop(self) -> None:
        """End the server and all of its processes; a second call does no harm."""
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

    def _last_words(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-_WORDS:]


def _command(executable: str, model: str, port: int, options: VllmOptions) -> Sequence[str]:
    # Log-probabilities are taken after the temperature, as a trainer computes them; no sampling
    # defaults of the model's folder; token ids in and out; cached prompt tokens are reported.
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
    if options.cuda:
        command += ["--enable-prefix-caching", "--weight-transfer-config", '{"backend": "ipc"}']
    else:
        command += ["--no-enable-chunked-prefill", "--enforce-eager"]
    if options.max_model_len is not None:
        command += ["--max-model-len", str(options.max_model_len)]
    if options.gpu_memory_utilization is not None:
        command += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    if options.tensor_parallel_size > 1:
        command += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
    return [*command, *options.arguments]


def _imports(folder: Path) -> Path:
    """Make a folder with our package alone: the server has packages of its own, and ours may lie
    among others."""
    folder.mkdir(exist_ok=True)
    link = folder / PACKAGE.name
    if not link.is_symlink():
        link.symlink_to(PACKAGE, target_is_directory=True)
    return folder


def _environment(options: VllmOptions, imports: Path) -> dict[str, str]:
    more = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": str(imports.resolve()),
    }
    if options.threads is not None:
        more["OMP_NUM_THREADS"] = str(options.threads)
    return {**os.environ, **more}
