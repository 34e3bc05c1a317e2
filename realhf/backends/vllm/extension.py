"""Runs inside a vLLM server: takes new weights between two tokens, read from a safetensors file.

vLLM loads it (``--worker-extension-cls realhf.backends.vllm.extension.WeightExtension``) in the server's own
environment: this module imports nothing of ours, and vLLM mixes the class into its worker. The server must be paused
while weights change; ``realhf.backends.vllm.generation`` ensures that.
"""

from __future__ import annotations

from typing import Any


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
            # This is vLLM's own way from checkpoint names to kernel layouts (packed, fused, quantised).
            self.reload_weights(weights_iterator=iter(tensors.items()))  # pyright: ignore[reportAttributeAccessIssue]
            _refresh_tied_head(self.model_runner.get_model())  # pyright: ignore[reportAttributeAccessIssue]
        except Exception as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "touched": True}
        return {"ok": True, "version": int(version)}


def _refresh_tied_head(model: Any) -> None:
    """Renew the packed head. vLLM's reload leaves a head that is tied to the embedding alone, and on the CPU the head
    computes with a packed copy, which would still hold the weights that the server was started with."""
    config = model.config
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)
