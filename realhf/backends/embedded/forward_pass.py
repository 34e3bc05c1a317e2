"""Forward passes over cached rows, computed by transformers' modules or, for Llama and Qwen, by a
faster decoder without them.

A pass consists of *decoding*, which feeds one token to each of many rows, and *pieces*, the missing
tokens of rows that join. For small models on a CPU, the Python layers around the arithmetic cost
more than the arithmetic, so ``FastDecoder`` computes Llama and Qwen without them. On a CPU
``compiled_decoder`` replaces it where there is a C compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realhf.backends.embedded.attention import (
    ROW_DECODE,
    additive_mask,
    blocks_attention,
    check_layer_kinds,
    layer_masks,
    layers_differ,
    row_blocks,
    sliding_window,
    use_attention,
)
from realhf.backends.embedded.kernels import (
    MIN_ROWS,
    OneDnnLinear,
    onednn_linear,
    onednn_row_range,
    supports_onednn,
)
from realhf.backends.embedded.kv_cache import RowCache

_PASS_TOKENS = 4096
"""Maximum number of tokens in one pass over pieces, padding included; it bounds the memory of mask
and activations."""
_PADDING_TOKENS = 768
"""Number of padding tokens that cost a small model as much as one more pass."""


@dataclass(frozen=True)
class Decoding:
    """Input of a pass that decodes one token for each of n cache rows."""

    rows: np.ndarray
    """Rows, int64 (n,), ascending."""
    tokens: np.ndarray
    """Token to feed to each row, int64 (n,)."""
    positions: np.ndarray
    """Position of each of these tokens, int64 (n,)."""
    cached: np.ndarray
    """Tokens of all cache rows, int64 (rows, columns), from which the rows' common prefixes are
    found."""


@dataclass(frozen=True)
class PrefillPiece:
    """Consecutive tokens to feed to one row."""

    row: int
    """Row of the cache."""
    start: int
    """Position of the first token."""
    tokens: np.ndarray
    """The tokens, int64 (m,)."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


class ModulePass:
    """Forward pass of any causal language model of transformers. It writes the keys and values of
    all tokens to ``cache``; ``limit`` is the model's maximum number of positions."""

    def __init__(self, model: Any, cache: RowCache, limit: int) -> None:
        self._model = model
        self._cache = cache
        self._limit = limit
        check_layer_kinds(model.config)

    def run(self, decoding: Decoding | None, pieces: Sequence[PrefillPiece]) -> Tensor:
        """Return the logits after the last token of each decoding row and then of each piece,
        (decoding rows + pieces, vocabulary)."""
        with use_attention(self._model.config, ROW_DECODE):
            logits = [] if decoding is None else [self._decode(decoding)]
            by_piece: list[Tensor | None] = [None] * len(pieces)
            for chunk in _chunks(pieces):
                for i, row_logits in zip(
                    chunk, self._prefill([pieces[i] for i in chunk]), strict=True
                ):
                    by_piece[i] = row_logits
        logits.extend(row[None] for row in by_piece if row is not None)
        return torch.cat(logits)

    def _decode(self, decoding: Decoding) -> Tensor:
        """Feed one token to each row up to the last decoding one. Idle rows in between get a token
        in their last column, which is never read: the last token of a sequence is sampled but not
        fed."""
        n = int(decoding.rows[-1]) + 1
        idle_position = min(self._cache.columns, self._limit) - 1
        tokens = np.full(n, decoding.tokens[0], dtype=np.int64)
        positions = np.full(n, idle_position)
        tokens[decoding.rows], positions[decoding.rows] = decoding.tokens, decoding.positions
        width = int(decoding.positions.max()) + 1
        columns = self._to_index(positions)
        self._cache.bind_decode(columns, torch.arange(n, device=columns.device), width)
        # Clamp the positions of idle rows, from which a rotary embedding that depends on the
        # length would infer a longer text.
        logits = self._forward(
            self._to_index(tokens)[:, None], columns.clamp(max=width - 1)[:, None], width
        )
        return logits[self._to_index(decoding.rows)]

    def _prefill(self, pieces: Sequence[PrefillPiece]) -> Tensor:
        """Feed pieces as one batch. They are padded on the left with their own first tokens, so
        that the last query of every row is its last token."""
        starts = np.array([p.start for p in pieces])
        ends = np.array([p.end for p in pieces])
        n_query = int((ends - starts).max())
        width = int(ends.max())
        position = ends[:, None] - n_query + np.arange(n_query)
        valid = position >= starts[:, None]
        tokens = np.repeat([[int(piece.tokens[0])] for piece in pieces], n_query, axis=1)
        tokens[valid] = np.concatenate([p.tokens for p in pieces])
        columns = self._to_index(np.where(valid, position, 0))
        rows = self._to_index([p.row for p in pieces])
        self._cache.bind_prefill(
            rows, columns, torch.as_tensor(valid, device=columns.device), width
        )
        return self._forward(self._to_index(tokens), columns, width)

    def _forward(self, tokens: Tensor, positions: Tensor, width: int) -> Tensor:
        """Feed ``tokens`` at ``positions``, int64 (n, n_query) each, with attention over the first
        ``width`` columns of their rows; return logits (n, vocabulary) after the last one."""
        column = torch.arange(width, device=positions.device)
        position = positions[:, None, :, None]
        # An idle row beyond the width must see something too: a softmax over nothing is NaN.
        outside_window = lambda window: column <= position.clamp(max=width - 1) - window
        out = self._model(
            input_ids=tokens,
            attention_mask=layer_masks(
                self._model.config, self._model.dtype, column > position, outside_window
            ),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _to_index(self, values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=self._model.device)


def _chunks(pieces: Sequence[PrefillPiece]) -> list[list[int]]:
    """Group the indices of pieces of similar length into passes that respect the limits on padding
    and on tokens."""
    sizes = [len(piece.tokens) for piece in pieces]
    chunks: list[list[int]] = []
    for i in sorted(range(len(pieces)), key=lambda i: (sizes[i], i)):
        current = chunks[-1] if chunks else []
        fits = current and (len(current) + 1) * sizes[i] <= _PASS_TOKENS
        padding = sum(sizes[i] - sizes[j] for j in current)
        if fits and padding <= _PADDING_TOKENS + sum(sizes[j] for j in current) // 4:
            current.append(i)
        else:
            chunks.append([i])
    return chunks


_log = logging.getLogger(__name__)
_FAMILY = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Model architectures that ``FastDecoder`` implements."""
PLAIN_TENSORS: tuple[type[Tensor], ...] = (Tensor,)
"""Types of parameters that ``FastDecoder`` reads. A pretended GPU adds its own while it lasts."""
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Types of rotary embeddings that do not depend on the sequence length."""
_PROBE_TOKENS = MIN_ROWS + 6
"""Number of tokens on which the decoder is compared with the model, enough to use oneDNN's
products."""
_TOLERANCE = 1e-4
"""Maximum difference from the model's logits: root mean square, relative to that of the logits
themselves."""


def build_fast_decoder(model: Any, cache: RowCache) -> FastDecoder | None:
    """Return a fast decoder for ``model`` if its logits on a short test sequence equal the model's.
    Otherwise log a warning and return None."""
    reason = _find_unsupported(model)
    if reason is None:
        reason = find_deviation(model, lambda cache: FastDecoder(model, cache))
        if reason is None:
            return FastDecoder(model, cache)
    _log.warning(
        "%s generates through transformers, which is slower on a CPU: %s",
        type(model).__name__,
        reason,
    )
    return None


def find_deviation(model: Any, build: Callable[[RowCache], Any]) -> str | None:
    """Return how much the logits of a forward pass, which ``build`` returns for a cache, differ from
    the model's on a short test sequence; None if they are equal up to rounding."""
    difference = _measure_difference(model, build)
    allowed = _tolerance(model)
    if difference <= allowed:
        return None
    return (
        f"its logits differ by {difference:.2g} from the module's, which is more than {allowed:.2g}"
    )


def _tolerance(model: Any) -> float:
    """Return the maximum relative difference for the model's dtype. In a narrow dtype every layer
    rounds, and two correct computations differ by their accumulated errors: measured 0.9 to 1.1
    times the dtype's epsilon times the square root of the number of layers."""
    epsilon = torch.finfo(model.dtype).eps
    return _TOLERANCE if epsilon < _TOLERANCE else 2 * epsilon * model.config.num_hidden_layers**0.5


def _find_unsupported(model: Any) -> str | None:
    """Return the reason why ``FastDecoder`` does not support a model, or None if it does."""
    config = model.config
    if type(model).__name__ not in _FAMILY:
        return "another architecture"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its activation is {config.hidden_act}"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _STATIC_ROPE:
        return f"its rotary embedding is {rope}"
    if layers_differ(config):
        return "its layers have options of their own"
    if sliding_window(config) is not None:
        return f"some of its layers see the last {sliding_window(config)} tokens only"
    if any(type(p.data) not in PLAIN_TENSORS for p in model.parameters()):
        return "its parameters are not plain tensors"
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return "a module has hooks"
    for layer in model.model.layers:
        parts = [
            getattr(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        ]
        parts += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
        if any(type(part) not in (nn.Linear, OneDnnLinear) for part in parts):
            return "a projection is not a plain linear layer"
    return None


@torch.no_grad()
def _measure_difference(model: Any, build: Callable[[RowCache], Any]) -> float:
    """Return the relative difference between a forward pass's and the model's logits on a test
    sequence, which is fed first as a piece and then token by token."""
    device = model.device
    ids = (torch.arange(_PROBE_TOKENS) * 7919 + 3) % model.config.vocab_size
    expected = model(input_ids=ids[None].to(device), use_cache=False).logits[0]
    cache = RowCache()
    tokens = ids.numpy()
    cache.reserve(2, _PROBE_TOKENS)
    decoder = build(cache)
    n_prefilled = MIN_ROWS
    logits = [decoder.run(None, [PrefillPiece(1, 0, tokens[:n_prefilled])])]
    for at in range(n_prefilled, _PROBE_TOKENS):
        decoding = Decoding(
            np.array([1]), tokens[at : at + 1], np.array([at]), np.stack((tokens, tokens))
        )
        logits.append(decoder.run(decoding, []))
    expected_tail = expected[n_prefilled - 1 :].double()
    error = (
        torch.cat(logits) - expected_tail
    ).square().mean().sqrt() / expected_tail.square().mean().sqrt().clamp(min=1e-6)
    return float(error) if torch.isfinite(error) else float("inf")


class _RmsNorm:
    """RMS norm that uses the weight of a given module."""

    def __init__(self, module: Any) -> None:
        self._parameters = module._parameters
        self._eps = module.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        return F.rms_norm(x, weight.shape, weight, self._eps)


class _Linear:
    """Linear layer that maps ``x`` (n, in) to (n, out) with the faster kernel for n rows."""

    def __init__(self, module: nn.Linear) -> None:
        self._parameters = module._parameters
        self._by_product = (
            onednn_row_range(module.weight) if supports_onednn(module.weight) else range(0)
        )

    def __call__(self, x: Tensor) -> Tensor:
        parameters: dict[str, Any] = self._parameters
        if len(x) in self._by_product:
            return onednn_linear(x, parameters["weight"], parameters["bias"])
        return F.linear(x, parameters["weight"], parameters["bias"])


class _Layer:
    """Modules and weights of one decoder layer."""

    def __init__(self, module: Any) -> None:
        attention = module.self_attn
        mlp = module.mlp
        self.attention_norm, self.mlp_norm = (
            _RmsNorm(module.input_layernorm),
            _RmsNorm(module.post_attention_layernorm),
        )
        self.query, self.key, self.value = (_Linear(getattr(attention, f"{n}_proj")) for n in "qkv")
        self.out = _Linear(attention.o_proj)
        self.query_norm = _RmsNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = _RmsNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.gate, self.up, self.down = (
            _Linear(mlp.gate_proj),
            _Linear(mlp.up_proj),
            _Linear(mlp.down_proj),
        )
        self.scale: float = attention.scaling


class _PassPlan:
    """Cache rows, positions and attention masks of the tokens of one forward pass, shared by all
    layers."""

    def __init__(
        self,
        decoding: Decoding | None,
        pieces: Sequence[PrefillPiece],
        device: torch.device,
        like: Tensor,
    ) -> None:
        self.n = 0 if decoding is None else len(decoding.rows)
        rows = []
        columns = []
        tokens = []
        if decoding is not None:
            rows = [decoding.rows]
            columns = [decoding.positions]
            tokens = [decoding.tokens]
        self.spans: list[tuple[int, int, PrefillPiece, Tensor | None]] = []
        at = self.n
        for piece in pieces:
            n_tokens = len(piece.tokens)
            rows.append(np.full(n_tokens, piece.row))
            columns.append(np.arange(piece.start, piece.end))
            tokens.append(piece.tokens)
            mask = None
            if piece.start and n_tokens > 1:
                mask = torch.ones(n_tokens, piece.end, dtype=torch.bool, device=device).tril_(
                    piece.start
                )
            self.spans.append((at, at + n_tokens, piece, mask))
            at += n_tokens
        self.rows, self.columns, self.tokens = (
            torch.from_numpy(np.concatenate(part)).to(device) for part in (rows, columns, tokens)
        )
        self.last = None
        if any(stop - start > 1 for start, stop, _, _ in self.spans):
            ends = [*range(self.n), *(stop - 1 for _, stop, _, _ in self.spans)]
            self.last = torch.tensor(ends, device=device)
        self.height = 0
        self.has_idle_rows = False
        if decoding is not None:
            self.height = int(decoding.rows[-1]) + 1
            width = int(decoding.positions.max()) + 1
            self.blocks = row_blocks(decoding.cached, decoding.rows, decoding.positions)
            self.has_idle_rows = self.height > self.n
            reach = np.zeros((self.height, 1, 1, 1), dtype=np.int64)
            reach[decoding.rows, 0, 0, 0] = decoding.positions
            masked = torch.arange(width, device=device) > torch.from_numpy(reach).to(device)
            self.mask = additive_mask(masked, like.dtype)


class FastDecoder:
    """Faster equivalent of ``ModulePass`` for Llama and Qwen, without transformers' modules.

    The tokens of all rows are concatenated without padding; only attention separates rows. Decoding
    rows attend by batched products over the cache in place; idle rows between them are computed too
    and discarded. Parameters are read from the model in every pass, so weights that are copied into
    it, or replaced, take effect.
    """

    def __init__(self, model: Any, cache: RowCache) -> None:
        self._cache = cache
        self._base = model.model
        self._embedding = model.model.embed_tokens._parameters
        self._layers = [
            _Layer(layer) for layer in model.model.layers[: model.config.num_hidden_layers]
        ]
        self._norm, self._head = _RmsNorm(model.model.norm), _Linear(model.lm_head)
        self._heads: int = model.config.num_attention_heads
        self._kv_heads: int = model.config.num_key_value_heads
        self._dim: int = model.model.layers[0].self_attn.head_dim
        self._rotation: tuple[Tensor, Tensor] | None = None

    def run(self, decoding: Decoding | None, pieces: Sequence[PrefillPiece]) -> Tensor:
        """See ``ModulePass.run``."""
        embedding: Tensor = self._embedding["weight"]
        plan = _PassPlan(decoding, pieces, embedding.device, embedding)
        x = embedding[plan.tokens]
        cos, sin = (table[plan.columns][:, None] for table in self.rotary_tables(embedding))
        head = torch.arange(self._kv_heads, device=x.device)
        target = (
            (plan.rows[:, None] * self._kv_heads + head) * self._cache.columns
            + plan.columns[:, None]
        ).view(-1)
        for index, layer in enumerate(self._layers):
            h = layer.attention_norm(x)
            query = layer.query(h).view(-1, self._heads, self._dim)
            key = layer.key(h).view(-1, self._kv_heads, self._dim)
            if layer.query_norm is not None and layer.key_norm is not None:
                query = layer.query_norm(query)
                key = layer.key_norm(key)
            query = _rotate(query, cos, sin)
            key = _rotate(key, cos, sin)
            keys, values = self._cache.storage(index, self._kv_heads, self._dim, embedding)
            keys.view(-1, self._dim).index_copy_(0, target, key.view(-1, self._dim))
            values.view(-1, self._dim).index_copy_(0, target, layer.value(h).view(-1, self._dim))
            x = x + layer.out(self._attention(plan, layer.scale, query, keys, values))
            h = layer.mlp_norm(x)
            x = x + layer.down(F.silu(layer.gate(h)).mul_(layer.up(h)))
        if plan.last is not None:
            x = x[plan.last]
        return self._head(self._norm(x))

    def _attention(
        self, plan: _PassPlan, scale: float, query: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attend with ``query`` (tokens, heads, dim) over cached ``keys`` and ``values``; return
        (tokens, heads * dim)."""
        parts = []
        if plan.n:
            parts.append(self._decode_attention(plan, scale, query[: plan.n], keys, values))
        for start, stop, piece, allowed in plan.spans:
            mixed = F.scaled_dot_product_attention(
                query[start:stop].transpose(0, 1)[None],
                keys[piece.row, :, : piece.end][None],
                values[piece.row, :, : piece.end][None],
                attn_mask=allowed,
                is_causal=piece.start == 0 and stop - start > 1,
                scale=scale,
                enable_gqa=self._heads != self._kv_heads,
            )
            parts.append(mixed[0].transpose(0, 1).reshape(stop - start, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode_attention(
        self, plan: _PassPlan, scale: float, query: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Compute the attention of the decoding rows; return (rows, heads * dim)."""
        rows = plan.rows[: plan.n]
        if plan.has_idle_rows:
            query = query.new_zeros(plan.height, self._heads, self._dim).index_copy_(0, rows, query)
        mixed = blocks_attention(query, keys, values, plan.mask, plan.blocks, scale)
        return mixed[rows] if plan.has_idle_rows else mixed

    def rotary_tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and signed sine for each position, (columns, dim). The sine of the first
        half is negated, so that the half rotation of rotary embeddings becomes a roll."""
        columns = self._cache.columns
        if self._rotation is None or len(self._rotation[0]) < columns:
            cos, sin = self._base.rotary_emb(like, torch.arange(columns, device=like.device)[None])
            half = self._dim // 2
            self._rotation = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        return self._rotation


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to ``x`` (tokens, heads, dim), with the tables of
    ``rotary_tables``."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
