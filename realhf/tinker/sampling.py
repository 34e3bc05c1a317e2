"""Continuous batching of ``sample`` requests over several sets of weights.

A set of weights is the base model, the base with saved adapters, or saved weights of the whole
model. One set is active at a time. All sequences of the active set decode together, and its
requests join between two tokens as soon as there is room in the key-value cache. The active set
accepts no more requests once a request for another set has waited for ``SWITCH_S``; when its
sequences have ended, the set of the longest waiting request becomes active.

Whole-model weights are loaded into one copy of the model when their set becomes active. Adapters
are merged when their set becomes active (``LoraAdapters``, which verifies the merge), so there is
one copy of merged weights, however many sets wait.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.api.config import GenConfig, LoraConfig
from realhf.api.model import GenRequest
from realhf.backends.embedded.decode_core import DecodeCore, DecodeTurn, remaining_tokens
from realhf.backends.embedded.sampling import check_request, seed_stream
from realhf.backends.embedded.weight_copy import collect_weights
from realhf.backends.training.lora import ADAPTER, CONFIG, LoraAdapters
from realhf.backends.training.packed_forward import Heads, find_heads
from realhf.backends.training.selected_logprobs import scale_and_cap
from realhf.base.tensor_digest import TensorDigester, joint_digest
from realhf.tinker.training import WeightsId, copy_sharing_tensors, load_all_weights
from realhf.tinker.wire import (
    BadRequest,
    PromptScores,
    SampledSequence,
    TopK,
    check_tokens,
    prompt_tokens,
    serialize_samples,
)

SWITCH_S = 2.0
"""Seconds that a request for another set of weights waits before the active set accepts no more
requests."""
MAX_SAMPLES = 1024
"""Maximum number of sequences per request."""
MAX_TOP_K = 1024
"""Maximum number of most likely tokens per position that a request may ask for."""
MAX_TOP_K_CELLS = 1 << 22
"""Maximum total number of entries, of eight bytes each, in the top-k lists of a response."""
MAX_STOP_STRINGS = 64
"""Maximum number of stop strings per request; every sampled token is checked against all of
them."""
MAX_STOP_LENGTH = 256
"""Maximum number of characters in a stop string."""
MIN_TEMPERATURE = 1e-3
"""Minimum temperature other than 0. Below it logits would overflow fp32, and the whole batch would
fail."""
_LOGIT_BYTES = 1 << 26
"""Maximum bytes of fp32 logits that are computed at once."""
UNSCORED_LOGPROB = -99999.0
"""Log-probability that the client expects at positions without a top-k list."""
BASE = WeightsId(0, "base")
"""Identifier of the base model's weights."""
VERSION = "version.json"
"""File, next to saved weights, with their version and digest."""
OnSampled = Callable[[int, bytes | Exception, WeightsId], None]
"""Callback for a finished request: its number, the body of its response or its error, and the
identity of the weights that sampled it."""


@dataclass(eq=False)
class SampleJob:
    """A ``sample`` request in progress. Each of its sequences is one turn of the decoder."""

    number: int
    """Number of the request."""
    folder: str
    """Folder of the weights; "": the base model."""
    prompt: np.ndarray
    """Prompt tokens, i64 (n,)."""
    request: Any
    """The client's ``SampleRequest``."""
    config: GenConfig
    """Sampling parameters of the request."""
    stop_tokens: frozenset[int]
    """Tokens that end a sequence."""
    stop_strings: tuple[str, ...]
    """Strings that end a sequence."""
    on_done: OnSampled
    """Called once with the response or the error."""
    scores_only: bool = False
    """Whether only the prompt is scored, because it fills the context and nothing can be
    sampled."""
    turns: list[DecodeTurn] = field(default_factory=list)
    """Turns of the decoder, one for each sequence."""
    top_k: dict[int, TopK] = field(default_factory=dict)
    """Most likely tokens of each position of the finished sequences, by slot."""
    unfinished: int = 0
    """Number of sequences that have not finished yet."""
    submitted_at: float = field(default_factory=time.monotonic)
    """Arrival time of the request, in seconds of the monotonic clock."""


class SamplingWeights:
    """Holder of the active set of weights: ``model`` has the weights of the last ``use``, and
    ``core`` decodes with it."""

    def __init__(self, base: Any, max_bytes: Callable[[], int | None], full_weights: bool) -> None:
        self._base = base
        self._max_bytes = max_bytes
        self._whole_model = copy.deepcopy(base) if full_weights else None
        self._adapters: dict[str, LoraAdapters] = {}  # by shape: rank, alpha and target layers
        self._digester = TensorDigester()
        self.weights_id = BASE
        self.model = base
        self.core = DecodeCore(base, max_bytes=max_bytes)
        self.heads: Heads = find_heads(base)
        self._merged: LoraAdapters | None = None  # the adapters that are merged into ``model``

    def use(self, folder: str) -> None:
        """Activate the weights of a folder, or the base model (""). Raises FileNotFoundError if
        they are gone."""
        self.core.release()
        if self._merged is not None:
            self._merged.drop_merged()
            self._merged = None
        if not folder:
            self.model = self._base
            self.weights_id = BASE
        elif self._whole_model is not None:
            load_all_weights(self._whole_model, Path(folder))
            self.model = self._whole_model
            self.weights_id = self._identify(Path(folder), collect_weights(self._whole_model))
        else:
            adapters = self._adapters_for(Path(folder))
            adapters.load(Path(folder) / ADAPTER)
            self._merged = adapters
            self.model = adapters.merged_model()
            self.weights_id = self._identify(Path(folder), adapters.tensors())
        self.core = DecodeCore(self.model, max_bytes=self._max_bytes)
        self.heads = find_heads(self.model)

    def _identify(self, folder: Path, tensors: Mapping[str, Tensor]) -> WeightsId:
        digests = {name: self._digester.digest(tensor) for name, tensor in tensors.items()}
        return WeightsId(_read_version(folder), joint_digest(digests))

    def _adapters_for(self, folder: Path) -> LoraAdapters:
        """Return adapters with the shape saved in ``folder``. Only the adapters of the last shape
        are cached."""
        try:
            config = json.loads((folder / ADAPTER / CONFIG).read_text(encoding="utf-8"))
        except OSError:
            raise FileNotFoundError(
                f"the weights of {folder.name} are no longer kept here"
            ) from None
        targets = sorted(config["target_modules"])
        shape = json.dumps([config["r"], config["lora_alpha"], targets])
        if shape not in self._adapters:
            options = LoraConfig(int(config["r"]), float(config["lora_alpha"]), targets, 0.0)
            model = copy_sharing_tensors(self._base)
            self._adapters = {shape: LoraAdapters(model, options, role="sampler", head=True)}
        return self._adapters[shape]


def _read_version(folder: Path) -> int:
    """Return the version of saved weights; -1 if it is unknown."""
    try:
        return int(json.loads((folder / VERSION).read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError):
        return -1


class Sampler:
    """Engine that runs ``sample`` requests on ``base``, a transformers model, one step at a time.

    Args:
        end_tokens: Tokens that end a sequence unless its request names stop tokens or strings.
        longest: Maximum length of prompt and sampled tokens together.
        max_bytes: Function that returns the maximum size of the key-value cache (None: no maximum).
        on_start: Called with the number of a request before its computation starts.
        full_weights: Whether saved weights are those of the whole model.
    """

    def __init__(
        self,
        base: Any,
        tokenizer: Any,
        *,
        end_tokens: frozenset[int],
        longest: int,
        max_bytes: Callable[[], int | None] = lambda: None,
        on_start: Callable[[int], None] = lambda number: None,
        full_weights: bool = False,
    ) -> None:
        self._on_start = on_start
        self._weights = SamplingWeights(base, max_bytes, full_weights)
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._longest = longest
        self._vocabulary = int(base.config.get_text_config().vocab_size)
        self._folder = ""  # of the active weights
        self._waiting: list[SampleJob] = []
        self._joining: list[tuple[SampleJob, DecodeTurn]] = []  # wait for room in the cache
        self._decoding: dict[int, tuple[SampleJob, DecodeTurn]] = {}  # by slot
        self._scoring: list[
            tuple[SampleJob, DecodeTurn]
        ] = []  # have ended, and their top-k lists are to be computed
        self._slots = 0

    @property
    def busy(self) -> bool:
        """Whether there is work to do."""
        return bool(self._waiting or self._is_active)

    @property
    def _is_active(self) -> bool:
        """Whether any request still needs the active weights."""
        return bool(self._joining or self._decoding or self._scoring)

    def submit(self, number: int, folder: str, request: Any, on_done: OnSampled) -> None:
        """Queue a ``SampleRequest`` for the weights of ``folder``. Raises BadRequest if it is
        invalid."""
        prompt = prompt_tokens(request.prompt)
        check_tokens(prompt, self._vocabulary, self._longest)
        params = request.sampling_params
        room = self._longest - len(prompt)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        # Clients ask for the log-probabilities of a prompt by sampling one token, also if the
        # prompt fills the context.
        scores_only = room == 0 and max_tokens in (0, 1) and _has_prompt_scores(request)
        if scores_only:
            max_tokens = 1
        elif max_tokens < 1 or max_tokens > room:
            raise BadRequest(
                f"sampling_params.max_tokens={max_tokens}: after {len(prompt)} tokens of prompt "
                f"there is room for "
                f"{room}"
            )
        if 0 < params.temperature < MIN_TEMPERATURE:
            raise BadRequest(
                f"sampling_params.temperature={params.temperature} must be 0, or {MIN_TEMPERATURE} "
                f"or more"
            )
        config = GenConfig(
            max_new_tokens=max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=0 if params.top_k == -1 else params.top_k,
        )
        stop_tokens, stop_strings = self._parse_stop(params.stop)
        _check_request(request, len(prompt), max_tokens)
        job = SampleJob(
            number, folder, prompt, request, config, stop_tokens, stop_strings, on_done, scores_only
        )
        try:
            check_request(GenRequest(0, prompt.tolist()), config)
        except ValueError as error:
            raise BadRequest(_with_client_names(str(error))) from None
        self._waiting.append(job)

    def _parse_stop(self, stop: Any) -> tuple[frozenset[int], tuple[str, ...]]:
        """Return stop tokens and stop strings. Those of a request replace the model's end
        tokens."""
        if stop is None:
            return self._end_tokens, ()
        if isinstance(stop, str):
            stop = [stop]
        strings = tuple(each for each in stop if isinstance(each, str))
        tokens = frozenset(each for each in stop if not isinstance(each, str))
        if (
            any(not 0 < len(text) <= MAX_STOP_LENGTH for text in strings)
            or len(strings) > MAX_STOP_STRINGS
        ):
            limits = f"at most {MAX_STOP_STRINGS} strings, of 1 to {MAX_STOP_LENGTH} letters"
            raise BadRequest(f"sampling_params.stop: {limits}")
        return tokens, strings

    def cancel(self, number: int) -> None:
        """Remove a request; it gets no response."""
        self._waiting = [job for job in self._waiting if job.number != number]
        self._joining = [(job, turn) for job, turn in self._joining if job.number != number]
        self._scoring = [(job, turn) for job, turn in self._scoring if job.number != number]
        cancelled = [
            (slot, turn) for slot, (job, turn) in self._decoding.items() if job.number == number
        ]
        self._weights.core.leave([turn for _, turn in cancelled])
        for slot, _ in cancelled:
            del self._decoding[slot]
        self._weights.core.free([slot for slot, _ in cancelled])

    def step(self) -> None:
        """Run one step: let sequences join, sample a token for each decoding sequence, and compute
        the top-k lists of one finished sequence. Errors are passed to ``on_done`` of the affected
        requests."""
        self._switch_weights()
        self._start_waiting()
        core = self._weights.core
        try:
            if self._joining:
                joined = core.join([turn for _, turn in self._joining])
                for job, turn in self._joining[:joined]:
                    self._decoding[turn.slot] = job, turn
                    if turn is job.turns[0]:
                        self._on_start(job.number)
                del self._joining[:joined]
            self._finish_ended(
                core.step(self._weights.weights_id.version) if self._decoding else []
            )
        except Exception as error:
            core.reset()
            self._fail(error)
        if self._scoring:
            self._compute_top_k(*self._scoring.pop(0))

    def _switch_weights(self) -> None:
        """Activate the weights that the first waiting request needs, unless the active weights are
        still needed."""
        if self._is_active or not self._waiting:
            return
        folder = self._waiting[0].folder
        if folder == self._folder:
            return
        try:
            self._weights.use(folder)
            self._folder = folder
        except Exception as error:
            self._folder = "?"  # no folder: the model may be half loaded, so the next request must load its weights
            failed = [job for job in self._waiting if job.folder == folder]
            self._waiting = [job for job in self._waiting if job.folder != folder]
            for job in failed:
                job.on_done(job.number, error, self._weights.weights_id)

    def _start_waiting(self) -> None:
        """Create the turns of waiting requests for the active weights. Stop if a request for other
        weights has waited too long, or if MAX_SAMPLES turns already wait for room (each of them has
        a copy of its prompt)."""
        now = time.monotonic()
        must_switch = any(
            job.folder != self._folder and now - job.submitted_at > SWITCH_S
            for job in self._waiting
        )
        if must_switch and self._is_active:
            return
        waiting = self._waiting
        self._waiting = []
        scored = False
        for job in waiting:
            if (
                job.folder != self._folder
                or len(self._joining) >= MAX_SAMPLES
                or (job.scores_only and scored)
            ):
                self._waiting.append(job)
                continue
            # a pass over a whole prompt: at most one a step, so that decoding is not held up
            if job.scores_only:
                scored = True
                self._on_start(job.number)
                self._respond(job)
                continue
            job.unfinished = job.request.num_samples
            prompt = job.prompt.tolist()
            job.turns = [self._create_turn(job, prompt, i) for i in range(job.unfinished)]
            self._joining += [(job, turn) for turn in job.turns]

    def _create_turn(self, job: SampleJob, prompt: list[int], i: int) -> DecodeTurn:
        seed = job.request.sampling_params.seed
        stream = (
            int.from_bytes(np.random.bytes(8), "little")
            if seed is None
            else seed_stream(seed + (i << 32))
        )
        self._slots += 1
        request = GenRequest(self._slots, prompt)
        budget = remaining_tokens(request, job.config, self._weights.core.limit)
        return DecodeTurn(request, job.config, job.stop_tokens, budget, stream)

    def _finish_ended(self, ended: Sequence[DecodeTurn]) -> None:
        """Finish the turns that ended in this step, and those whose last token completed a stop
        string."""
        slots = {turn.slot for turn in ended}
        for slot, (job, turn) in list(self._decoding.items()):
            if (
                slot not in slots
                and job.stop_strings
                and self._ends_with_stop(turn, job.stop_strings)
            ):
                turn.reason = "stop"
                self._weights.core.leave([turn])
                slots.add(slot)
        for slot in slots:
            job, turn = self._decoding.pop(slot)
            if (
                job.stop_strings
                and turn.reason == "length"
                and self._ends_with_stop(turn, job.stop_strings)
            ):
                turn.reason = "stop"
            if job.request.topk_sample_logprobs:
                self._scoring.append((job, turn))
            else:
                self._finish_turn(job)
        self._weights.core.free(slots)

    def _finish_turn(self, job: SampleJob) -> None:
        job.unfinished -= 1
        if not job.unfinished:
            self._respond(job)

    def _compute_top_k(self, job: SampleJob, turn: DecodeTurn) -> None:
        """Compute the most likely tokens at each position of a finished sequence. This takes a
        forward pass over the whole sequence, so ``step`` does it for only one sequence at a
        time."""
        ids = np.concatenate([job.prompt, np.asarray(turn.token_ids, dtype=np.int64)])
        k = job.request.topk_sample_logprobs
        first = len(job.prompt) - 1
        try:
            top_k = self._score(ids[:-1], first, k, temperature=job.config.temperature or 1.0)[1]
        except Exception as error:
            self.cancel(job.number)
            job.on_done(job.number, error, self._weights.weights_id)
            return
        assert top_k is not None
        job.top_k[turn.slot] = top_k
        self._finish_turn(job)

    def _ends_with_stop(self, turn: DecodeTurn, strings: Sequence[str]) -> bool:
        """Return whether the last token completes a stop string. A token has at least one byte, so
        any stop string that ends there lies within as many last tokens as the longest stop string
        has bytes."""
        tail = turn.token_ids[-max(len(text.encode()) for text in strings) - 1 :]
        decoded = self._tokenizer.decode(tail, clean_up_tokenization_spaces=False)
        return any(text in decoded for text in strings)

    def _respond(self, job: SampleJob) -> None:
        weights = self._weights.weights_id
        try:
            response = self._serialize(job)
        except Exception as error:
            job.on_done(job.number, error, weights)
            return
        job.on_done(job.number, response, weights)

    def _serialize(self, job: SampleJob) -> bytes:
        sequences = [
            SampledSequence(turn.token_ids, turn.logprobs, turn.reason, job.top_k.get(turn.slot))
            for turn in job.turns
        ]
        if job.scores_only:
            sequences = [SampledSequence([], [], "length")] * job.request.num_samples
        return serialize_samples(sequences, self._score_prompt(job.request, job.prompt))

    def _score_prompt(self, request: Any, prompt: np.ndarray) -> PromptScores:
        """Compute the prompt scores that a request asks for."""
        last_n = request.prompt_logprobs_last_n
        first_requested = 0 if last_n is None else len(prompt) - 1 - last_n
        k = request.topk_prompt_logprobs
        targets = request.target_prompt_logprobs
        if not (request.prompt_logprobs or k or targets is not None):
            return PromptScores()
        if len(prompt) < 2:
            # The first token of a prompt has no score.
            unscored = np.full(1, np.nan) if request.prompt_logprobs else None
            no_tokens = TopK(np.zeros((0, k), np.int32), np.zeros((0, k), np.float32))
            return PromptScores(unscored, _prepend_unscored(no_tokens, 1) if k else None)
        target_ids = None if targets is None else _parse_target_ids(targets, self._vocabulary)
        # The scores of target ids always cover the whole prompt.
        first_scored = first_requested if target_ids is None else 0
        values, top_k, target_values = self._score(
            prompt[:-1], first=first_scored, k=k, targets=prompt[1:], target_ids=target_ids
        )
        # Mark what was scored only for the target ids, or not scored at all, as unscored.
        if first_scored < first_requested:
            values[:first_requested] = np.nan
            if top_k is not None:
                top_k.tokens[:first_requested] = 0
                top_k.logprobs[:first_requested] = UNSCORED_LOGPROB
        elif first_scored:
            values = np.concatenate([np.full(first_scored, np.nan), values])
            top_k = None if top_k is None else _prepend_unscored(top_k, first_scored)
        logprobs = np.concatenate([[np.nan], values]) if request.prompt_logprobs else None
        return PromptScores(
            logprobs, None if top_k is None else _prepend_unscored(top_k, 1), target_values
        )

    @torch.inference_mode()
    def _score(
        self,
        tokens: np.ndarray,
        first: int,
        k: int,
        targets: np.ndarray | None = None,
        target_ids: np.ndarray | None = None,
        temperature: float = 1.0,
    ) -> tuple[np.ndarray, TopK | None, np.ndarray | None]:
        """Run a forward pass over ``tokens`` (n,) and score the predictions from position ``first``
        on.

        Returns the log-probabilities of ``targets`` (n,), f32 (n - first,); the ``k`` most likely
        tokens; and the log-probabilities of ``target_ids`` (n, K), f32 (n - first, K), 0 where the
        id is -1. Parts that were not requested are empty or None.
        """
        model = self._weights.model
        input_ids = torch.from_numpy(tokens)[None].to(model.device)
        hidden = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state[
            0, first:
        ]
        rows = max(1, _LOGIT_BYTES // (4 * self._vocabulary))
        logprobs: list[Tensor] = []
        top_k: list[tuple[Tensor, Tensor]] = []
        target_logprobs: list[Tensor] = []
        for begin in range(0, len(hidden), rows):
            part = slice(begin, begin + rows)
            log_p = self._logits(hidden[part]).div_(temperature).log_softmax(-1)
            if targets is not None:
                index = torch.from_numpy(targets[first:][part]).to(log_p.device)
                logprobs.append(log_p.gather(-1, index[:, None])[:, 0])
            if k:
                best = log_p.topk(min(k, self._vocabulary), dim=-1)
                top_k.append((best.indices, best.values))
            if target_ids is not None:
                ids = torch.from_numpy(target_ids[first:][part]).to(log_p.device)
                target_logprobs.append(log_p.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0))
        concatenate = lambda parts: torch.cat(list(parts)).cpu().numpy()
        return (
            concatenate(logprobs) if logprobs else np.zeros(0, np.float32),
            TopK(concatenate(i for i, _ in top_k), concatenate(v for _, v in top_k))
            if top_k
            else None,
            concatenate(target_logprobs) if target_logprobs else None,
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        heads = self._weights.heads
        return scale_and_cap(
            self._weights.model.get_output_embeddings()(hidden).float(), heads.factor, heads.cap
        )

    def _fail(self, error: Exception) -> None:
        """Fail all requests with decoding sequences. If there are none, the error means that a
        joining sequence does not fit into memory, so fail the request with the longest joining
        sequence."""
        failed = {id(job): job for job, _ in self._decoding.values()}
        if not failed and self._joining:
            longest, _ = max(self._joining, key=lambda each: each[1].length + each[1].budget)
            failed = {id(longest): longest}
        self._decoding = {}
        self._joining = [(job, turn) for job, turn in self._joining if id(job) not in failed]
        self._scoring = [(job, turn) for job, turn in self._scoring if id(job) not in failed]
        for job in failed.values():
            job.on_done(job.number, error, self._weights.weights_id)


def _has_prompt_scores(request: Any) -> bool:
    """Return whether a request asks for scores of its prompt."""
    return bool(
        request.prompt_logprobs
        or request.topk_prompt_logprobs
        or request.target_prompt_logprobs is not None
    )


def _with_client_names(text: str) -> str:
    """Replace the names of generation options in an error message with the client's names for
    them."""
    return text.replace("gen.max_new_tokens", "sampling_params.max_tokens").replace(
        "gen.", "sampling_params."
    )


def _check_request(request: Any, length: int, max_tokens: int) -> None:
    """Raise BadRequest if a request with a prompt of ``length`` tokens and up to ``max_tokens``
    sampled tokens exceeds a limit, or has an unsupported option."""
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise BadRequest(f"num_samples={request.num_samples} must be from 1 to {MAX_SAMPLES}")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(request, name) <= MAX_TOP_K:
            raise BadRequest(f"{name}={getattr(request, name)} must be from 0 to {MAX_TOP_K}")
    targets = (
        0
        if request.target_prompt_logprobs is None
        else _target_width(request.target_prompt_logprobs, length)
    )
    per_prompt_token = request.topk_prompt_logprobs + targets
    cells = (
        per_prompt_token * length + request.topk_sample_logprobs * max_tokens * request.num_samples
    )
    if cells > MAX_TOP_K_CELLS:
        raise BadRequest(
            f"topk_prompt_logprobs and target_prompt_logprobs, {per_prompt_token} for {length} "
            f"tokens, and "
            f"topk_sample_logprobs={request.topk_sample_logprobs} for {request.num_samples} "
            f"sequences of up to "
            f"{max_tokens} tokens are {cells} places in all; an answer has at most "
            f"{MAX_TOP_K_CELLS}"
        )
    if request.prompt_alt_tokens_k:
        raise BadRequest("prompt_alt_tokens_k is not carried by this server")
    if request.record_stability_info:
        raise BadRequest(
            "record_stability_info (loss_fn stable_reinforce) is not carried by this server"
        )
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not (request.prompt_logprobs and 1 <= last_n <= length - 1):
        raise BadRequest(
            f"prompt_logprobs_last_n={last_n} needs prompt_logprobs, and must be from 1 to "
            f"{length - 1}"
        )


def _target_width(targets: Any, length: int) -> int:
    """Return K, the number of target ids per position of a prompt of ``length`` tokens. Raises
    BadRequest. The shape is checked before a sparse tensor is made dense, because a small body may
    declare a huge shape."""
    if targets.sparse_crow_indices is not None and targets.sparse_col_indices is None:
        raise BadRequest("target_prompt_logprobs: sparse_col_indices are missing")
    shape = tuple(targets.shape or [len(targets.data)])
    if len(shape) != 2 or shape[0] != length - 1 or not 0 < shape[1] <= MAX_TOP_K:
        raise BadRequest(
            f"target_prompt_logprobs has the shape {shape}, for a prompt of {length} tokens and at "
            f"most {MAX_TOP_K}"
        )
    return shape[1]


def _parse_target_ids(targets: Any, vocabulary: int) -> np.ndarray:
    """Return the target ids, i64 (n - 1, K), -1 for padding. Raises BadRequest."""
    try:
        ids = np.asarray(targets.to_numpy(pad_value=-1), dtype=np.int64)
    except (ValueError, RuntimeError, OverflowError) as error:
        raise BadRequest(f"target_prompt_logprobs: {error}") from None
    if ids.max() >= vocabulary or ids.min() < -1:
        raise BadRequest(f"target_prompt_logprobs: ids must be from 0 to {vocabulary - 1}, or -1")
    return ids


def _prepend_unscored(top: TopK, rows: int) -> TopK:
    """Prepend ``rows`` positions with fill values."""
    k = top.tokens.shape[1]
    tokens = np.concatenate([np.zeros((rows, k), top.tokens.dtype), top.tokens])
    return TopK(
        tokens, np.concatenate([np.full((rows, k), UNSCORED_LOGPROB, np.float32), top.logprobs])
    )
