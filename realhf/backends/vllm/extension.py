"""Runs inside a vLLM server: takes new weights between two tokens, read from a safetensors file, and says what is
there.

vLLM loads it (``--worker-extension-cls realhf.backends.vllm.extension.WeightExtension``) in the server's own
environment, which has torch and no package of ours but this one: it imports nothing else of ours than the digest. vLLM
mixes the class into its worker. The server must be paused while weights change; ``realhf.backends.vllm.generation``
ensures that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from realhf.base.tensor_digest import TensorDigester

Digests = dict[str, list[str]]
"""Name in the checkpoint -> element type and digest."""


class WeightExtension:
    """Holds the methods that ``/collective_rpc`` reaches. Answers are maps, because errors lose their text on the
    way."""

    def take_weights(self, path: str, version: str) -> dict[str, Any]:
        """Replace the model's weights by those of a safetensors file, names and shapes as in the model's folder.

        Returns ``{"ok": True, "version": n}``, or ``{"ok": False, "error": text, "touched": whether weights were
        changed}``.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            return {"ok": False, "error": f"{path}: {error}", "touched": False}
        try:
            model = self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]
            with _seen_before_packing(model) as seen:
                # This is vLLM's own way from checkpoint names to kernel layouts (packed, fused, quantised).
                self.reload_weights(weights_iterator=iter(tensors.items()))  # pyright: ignore[reportAttributeAccessIssue]
            _refresh_tied_head(model)
            now = {**seen, **self._live_digests()}
            self.realhf_seen = seen
            self.realhf_unproven = [name for name in tensors if name not in now]
        except Exception as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "touched": True}
        return {"ok": True, "version": int(version)}

    def weight_digests(self) -> dict[str, Any]:
        """Return ``{"held": {name in the checkpoint: [element type, digest]}, "unproven": names}``: digests of what the
        model's layers hold now. A layer that keeps only a copy in a kernel's own format has the digest of what the copy
        was made from. Tensors that arrived, and that no layer has under their names, because the model renames or
        joins them, are unproven: nothing can be said of them."""
        return {
            "held": {**getattr(self, "realhf_seen", {}), **self._live_digests()},
            "unproven": getattr(self, "realhf_unproven", []),
        }

    def _live_digests(self) -> Digests:
        model = self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]
        digester, held = TensorDigester(), Digests()
        for name, layer in model.named_modules():
            held |= _digests_of(model, name, layer, digester)
        return held


@contextlib.contextmanager
def _seen_before_packing(model: Any) -> Iterator[Digests]:
    """Fill a map with digests of what each layer holds at the moment its kernel's own format is made from it."""
    seen, digester, wrapped = Digests(), TensorDigester(), []
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is None or not hasattr(method, "process_weights_after_loading"):
            continue
        process = method.process_weights_after_loading

        def noted(loaded: Any, name: str = name, process: Any = process) -> Any:
            seen.update(_digests_of(model, name, loaded, digester))
            return process(loaded)

        method.process_weights_after_loading = noted
        wrapped.append(method)
    try:
        yield seen
    finally:
        for method in wrapped:
            del method.process_weights_after_loading


def _digests_of(model: Any, name: str, layer: Any, digester: TensorDigester) -> Digests:
    """Return digests of the parameters and buffers of one layer by their names in the checkpoint."""
    found = Digests()
    parts = getattr(model, "packed_modules_mapping", {}).get(name.rpartition(".")[2], [])
    sizes = getattr(layer, "output_partition_sizes", [])
    words = getattr(layer, "org_vocab_size", None)
    tensors = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
    for own, tensor in tensors.items():
        if tensor.numel() == 0 or tensor.is_meta:
            continue
        if parts and len(parts) == len(sizes):
            parent = name.rpartition(".")[0]
            pieces = zip(parts, tensor.split(sizes) if len(tensor) == sum(sizes) else [], strict=False)
            for part, piece in pieces:
                found[f"{parent}.{part}.{own}"] = _row(digester, piece)
        else:
            whole = tensor if words is None else tensor[:words]
            found[f"{name}.{own}"] = _row(digester, whole)
    return found


def _row(digester: TensorDigester, tensor: Any) -> list[str]:
    return [str(tensor.dtype), digester.digest(tensor)]


def _refresh_tied_head(model: Any) -> None:
    """Renew the packed head. vLLM's reload leaves a head that is tied to the embedding alone, and on the CPU the head
    computes with a packed copy, which would still hold the weights that the server was started with."""
    config = model.config
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)
