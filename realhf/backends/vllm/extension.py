"""Worker extension inside a vLLM server that loads new weights between two tokens, from a
safetensors file, from memory of the same GPU or from a broadcast, and reports digests of the
weights.

vLLM loads it (``--worker-extension-cls realhf.backends.vllm.extension.WeightExtension``) in the
server's environment and mixes the class into its worker. That environment has torch and realhf, but
not the other dependencies of realhf, so the module imports only the digest and the handles of
device memory from it. The server must be paused while weights change;
``realhf.backends.vllm.generation`` ensures that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from realhf.backends.vllm.device_transfer import from_json
from realhf.base.tensor_digest import TensorDigester

Digests = dict[str, list[str]]
"""Dtype and digest of each tensor, keyed by its name in the checkpoint."""


class WeightExtension:
    """Mixin of vLLM's worker with the methods that ``/collective_rpc`` calls.

    The methods return errors as dicts, because the server does not pass on the texts of exceptions.
    """

    realhf_arrived: Digests
    """Digests of the layers whose weights have arrived in the current transfer."""
    realhf_open: contextlib.ExitStack | None
    """Open context managers of the current transfer; None outside a transfer."""

    def take_weights(self, path: str, version: str) -> dict[str, Any]:
        """Replace the model's weights with those of a safetensors file, with names and shapes as in
        the model's folder.

        Returns ``{"ok": True, "version": n}``, or ``{"ok": False, "error": text, "touched": whether
        weights were changed}``.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            return {"ok": False, "error": f"{path}: {error}", "touched": False}
        try:
            model = self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]
            with _digest_before_packing(model) as digests:
                # vLLM's conversion from checkpoint names to kernel layouts (packed, fused,
                # quantised).
                self.reload_weights(weights_iterator=iter(tensors.items()))  # pyright: ignore[reportAttributeAccessIssue]
            _refresh_tied_head(model)
            self._record_digests(digests, tensors)
        except Exception as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "touched": True}
        return {"ok": True, "version": int(version)}

    def describe(self) -> dict[str, Any]:
        """Return the versions, device, model runner and dtypes of this worker."""
        import torch
        import vllm

        config = self.vllm_config  # pyright: ignore[reportAttributeAccessIssue]
        model = config.model_config
        # torch's version is of a class that vLLM cannot serialise, and then never answers again.
        return {
            "vllm": str(vllm.__version__),  # pyright: ignore[reportAttributeAccessIssue]
            "torch": str(torch.__version__),
            "device": str(config.device_config.device_type),
            "runner": "v2" if self.use_v2_model_runner else "v1",  # pyright: ignore[reportAttributeAccessIssue]
            "dtype": str(model.dtype).removeprefix("torch."),
            "head_dtype": str(model.head_dtype).removeprefix("torch."),
            "kv_cache_bytes": config.cache_config.kv_cache_memory_bytes,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        }

    def place(self) -> dict[str, Any]:
        """Return ``{"uuid": UUID of this worker's GPU or None, "backend": that of vLLM's transfer
        or "", "workers": number of the server's workers, "replicas": data-parallel size}``."""
        engine = getattr(self, "weight_transfer_engine", None)
        device = getattr(self, "device", None)
        if engine is None or getattr(device, "type", "") != "cuda":
            return {"uuid": None, "backend": "", "workers": 0, "replicas": 0}
        import torch

        parallel = self.vllm_config.parallel_config  # pyright: ignore[reportAttributeAccessIssue]
        return {
            "uuid": str(torch.cuda.get_device_properties(device).uuid),
            "backend": engine.config.backend,
            "workers": int(parallel.world_size),
            "replicas": int(parallel.data_parallel_size),
        }

    def join_group(self, init_info: dict[str, Any]) -> dict[str, Any]:
        """Join the group of a trainer, and leave an earlier one. Returns when all ranks have joined
        (``realhf.backends.vllm.broadcast``)."""

        def join() -> None:
            self.weight_transfer_engine.shutdown()  # pyright: ignore[reportAttributeAccessIssue]
            self.init_weight_transfer_engine(init_info)  # pyright: ignore[reportAttributeAccessIssue]

        return {**self._run_and_report(join), "touched": False}

    def take_broadcast(
        self, version: str, update_info: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """Receive and load the weights that the trainer sends to the group that was joined last.

        Returns a result like ``take_weights``. After ``timeout_s`` seconds, and after every other
        error, the group is left, and the server needs other weights before it continues.
        """
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.weight_transfer_engine.shutdown()  # pyright: ignore[reportAttributeAccessIssue]

        def take() -> None:
            self._leave_transfer()
            model = self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]
            self.realhf_open = contextlib.ExitStack()
            digests = self.realhf_open.enter_context(_digest_before_packing(model))
            self.start_weight_update()  # pyright: ignore[reportAttributeAccessIssue]
            self.update_weights(update_info)  # pyright: ignore[reportAttributeAccessIssue]
            # What follows may take longer. The next version needs the group.
            timer.cancel()
            timer.join()
            if late.is_set():  # vLLM takes nothing from a group that was left, and reports no error
                raise TimeoutError(f"the weights did not arrive within {timeout_s:g} s")
            self.finish_weight_update()  # pyright: ignore[reportAttributeAccessIssue]
            self._leave_transfer()
            _refresh_tied_head(model)
            self._record_digests(digests, update_info["names"])

        timer = threading.Timer(timeout_s, give_up)
        timer.start()
        try:
            answer = self._run_and_report(take)
        finally:
            timer.cancel()
        if not answer["ok"]:
            give_up()
            self._end_broken_update()
        return {**answer, "version": int(version)}

    def _end_broken_update(self) -> None:
        """Put the model's layers back after an update that was cut off; their contents are those of
        two versions. vLLM would add the next weights to the rest of these."""
        for step in (self.start_weight_update, self.finish_weight_update):  # pyright: ignore[reportAttributeAccessIssue]
            # ``start_weight_update`` fails if the update is still open. The next update reports any
            # other error.
            with contextlib.suppress(Exception):
                step()

    def begin_transfer(self) -> dict[str, Any]:
        """Start to receive weights by vLLM's transfer. ``take_chunk`` and ``end_transfer`` follow.
        All three methods return results like ``take_weights``."""

        def begin() -> None:
            self._leave_transfer()
            self._close_received_memory()
            self.init_weight_transfer_engine({"packed": True})  # pyright: ignore[reportAttributeAccessIssue]
            model = self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]
            self.realhf_open = contextlib.ExitStack()
            self.realhf_arrived = self.realhf_open.enter_context(_digest_before_packing(model))
            self.start_weight_update()  # pyright: ignore[reportAttributeAccessIssue]

        return self._run_and_report(begin)

    def take_chunk(
        self,
        names: list[str],
        dtype_names: list[str],
        shapes: list[list[int]],
        tensor_sizes: list[int],
        handles: dict[str, list[Any]],
    ) -> dict[str, Any]:
        """Load tensors that lie one after another in a buffer on each GPU.

        ``handles`` are those of the buffers, by UUID of the GPU, encoded by
        ``device_transfer.to_json``.
        """

        def take() -> None:
            chunk = {
                "names": names,
                "dtype_names": dtype_names,
                "shapes": shapes,
                "tensor_sizes": tensor_sizes,
            }
            own_handles = {uuid: from_json(parts) for uuid, parts in handles.items()}
            self.update_weights({**chunk, "ipc_handles": own_handles})  # pyright: ignore[reportAttributeAccessIssue]

        return self._run_and_report(take)

    def end_transfer(self, version: str, names: list[str]) -> dict[str, Any]:
        """Activate the received weights as ``version``; ``names`` are all tensors that were
        sent."""

        def end() -> None:
            self.finish_weight_update()  # pyright: ignore[reportAttributeAccessIssue]
            digests = self.realhf_arrived
            self._leave_transfer()
            _refresh_tied_head(self.model_runner.get_model())  # pyright: ignore[reportAttributeAccessIssue]
            self._record_digests(digests, names)

        return {**self._run_and_report(end), "version": int(version)}

    def _run_and_report(self, run: Callable[[], None]) -> dict[str, Any]:
        """Call ``run`` and return a result like that of ``take_weights``. An error ends the
        transfer."""
        try:
            run()
        except Exception as error:
            self._leave_transfer()
            self._close_received_memory()
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "touched": True}
        return {"ok": True}

    def _leave_transfer(self) -> None:
        """Stop collecting digests of arriving weights, also after an aborted transfer."""
        open_contexts = getattr(self, "realhf_open", None)
        self.realhf_open = None
        if open_contexts is not None:
            open_contexts.close()

    def _close_received_memory(self) -> None:
        """Close the device memory of an aborted transfer; the trainer cannot free it until then."""
        engine = getattr(self, "weight_transfer_engine", None)
        if engine is not None and engine.config.backend == "ipc":
            with contextlib.suppress(Exception):  # the first error has been reported already
                engine.shutdown()

    def _record_digests(self, digests: Digests, names: Iterable[str]) -> None:
        """Store the digests of the received tensors, and the names of those without a digest."""
        now = {**digests, **self._live_digests()}
        self.realhf_seen = digests
        self.realhf_unproven = [name for name in names if name not in now]

    def weight_digests(self) -> dict[str, Any]:
        """Return ``{"held": {name in the checkpoint: [dtype, digest]}, "unproven": names}``.

        ``held`` are the digests of the current tensors of the model's layers. For a layer that
        keeps only a copy in the format of a kernel, it is the digest of the tensor that was copied.
        ``unproven`` are received tensors that no layer has under their names, because the model
        renames or fuses them.
        """
        return {
            "held": {**getattr(self, "realhf_seen", {}), **self._live_digests()},
            "unproven": getattr(self, "realhf_unproven", []),
        }

    def _live_digests(self) -> Digests:
        """Return digests of the current tensors of all layers."""
        model = self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]
        digester = TensorDigester()
        digests = Digests()
        for name, layer in model.named_modules():
            digests |= _digest_layer(model, name, layer, digester)
        return digests


@contextlib.contextmanager
def _digest_before_packing(model: Any) -> Iterator[Digests]:
    """Yield a map that is filled with digests of each layer's tensors just before vLLM converts
    them to the format of a kernel."""
    digests, digester, wrapped = Digests(), TensorDigester(), []
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is None or not hasattr(method, "process_weights_after_loading"):
            continue
        process = method.process_weights_after_loading

        def digest_and_process(loaded: Any, name: str = name, process: Any = process) -> Any:
            digests.update(_digest_layer(model, name, loaded, digester))
            return process(loaded)

        method.process_weights_after_loading = digest_and_process
        wrapped.append(method)
    try:
        yield digests
    finally:
        for method in wrapped:
            del method.process_weights_after_loading


def _digest_layer(model: Any, name: str, layer: Any, digester: TensorDigester) -> Digests:
    """Return digests of the parameters and buffers of one layer, by their names in the
    checkpoint."""
    digests = Digests()
    parts = getattr(model, "packed_modules_mapping", {}).get(name.rpartition(".")[2], [])
    sizes = getattr(layer, "output_partition_sizes", [])
    vocabulary = getattr(layer, "org_vocab_size", None)
    tensors = {
        **dict(layer.named_parameters(recurse=False)),
        **dict(layer.named_buffers(recurse=False)),
    }
    for tensor_name, tensor in tensors.items():
        if tensor.numel() == 0 or tensor.is_meta:
            continue
        if parts and len(parts) == len(sizes):
            parent = name.rpartition(".")[0]
            pieces = zip(
                parts, tensor.split(sizes) if len(tensor) == sum(sizes) else [], strict=False
            )
            for part, piece in pieces:
                digests[f"{parent}.{part}.{tensor_name}"] = _to_row(digester, piece)
        else:
            whole = tensor if vocabulary is None else tensor[:vocabulary]
            digests[f"{name}.{tensor_name}"] = _to_row(digester, whole)
    return digests


def _to_row(digester: TensorDigester, tensor: Any) -> list[str]:
    return [str(tensor.dtype), digester.digest(tensor)]


def _refresh_tied_head(model: Any) -> None:
    """Convert a tied head again. vLLM's reload skips a head that is tied to the embedding. On the
    CPU the head computes with a packed copy, which would keep the weights that the server was
    started with."""
    config = model.config
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)
