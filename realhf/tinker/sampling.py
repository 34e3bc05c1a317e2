"""Samples for many requests at once, with the weights that each names: all sequences of one set of weights decode
together, requests join between two tokens, and sets take turns.

A set of weights is the base model, the base with adapters that were saved, or saved weights of the whole model, which
are read into one copy of it for as long as their set has its turn. Adapters are merged for as long as their
set has its turn (``LoraAdapters``, which proves the merge), so that there is one copy of merged weights, however many
sets wait. Within a set a request waits for room only; a set that is in use stops taking requests when another has
waited for ``TURN_S``.
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
from realhf.backends.embedded.decode_core import DecodeCore, Turn, remaining_tokens
from realhf.backends.embedded.sampling import check_request, stream_of
from realhf.backends.embedded.weight_copy import named_weights
from realhf.backends.training.lora import ADAPTER, CONFIG, LoraAdapters
from realhf.backends.training.packed_forward import Heads, heads_of
from realhf.backends.training.selected_logprobs import bent
from realhf.base.tensor_digest import TensorDigester, joint_digest
from realhf.tinker.training import Held, load_whole, sharing_copy
from realhf.tinker.wire import BadRequest, Sampled, Scored, TopK, check_tokens, prompt_tokens, sample_answer

TURN_S = 2.0
MOST_SAMPLES = 1024
"""Sequences that one request may ask for."""
MOST_TOP = 1024
MOST_LISTED = 1 << 22
"""Places in the lists of the likeliest tokens of one answer, each of which has eight bytes."""
MOST_STOPS, LONGEST_STOP = 64, 256
"""Stop strings of a request, and their letters: every token that is drawn is looked at for all of them."""
LEAST_TEMPERATURE = 1e-3
"""Below it, but for 0, logits would leave the range of fp32, and with them everybody's who samples at once."""
_LOGIT_BYTES = 1 << 26
MASKED = -99999.0
"""The client's log-probability of a place in a list of the likeliest that nothing stands in."""
BASE = Held(0, "base")
Answered = Callable[[int, bytes | Exception, Held], None]
"""Is called with the number of a request, its answer or what went wrong, and the weights that sampled."""


@dataclass(eq=False)
class Asked:
    """One request that is sampled: its turns, which end one by one, the ``likeliest`` tokens of each by its slot, and
    what is wanted of its prompt. ``texts`` are stop strings; ``done`` is called with the answer, or with what went
    wrong."""

    number: int
    folder: str
    prompt: np.ndarray
    request: Any
    config: GenConfig
    stops: frozenset[int]
    texts: tuple[str, ...]
    done: Answered
    only_scored: bool = False
    """There is no room behind the prompt: nothing is drawn."""
    turns: list[Turn] = field(default_factory=list)
    likeliest: dict[int, TopK] = field(default_factory=dict)
    left: int = 0
    since: float = field(default_factory=time.monotonic)


class Weights:
    """One set of weights that can sample: a model whose parameters are these for as long as ``use`` says so."""

    def __init__(self, base: Any, most_bytes: Callable[[], int | None], full_weights: bool) -> None:
        self._base, self._most_bytes = base, most_bytes
        self._whole = copy.deepcopy(base) if full_weights else None
        self._adapters: dict[str, LoraAdapters] = {}  # by their shape
        self._digester = TensorDigester()
        self.held, self.model = BASE, base
        self.core = DecodeCore(base, max_bytes=most_bytes)
        self.heads: Heads = heads_of(base)
        self._in_use: LoraAdapters | None = None

    def use(self, folder: str) -> None:
        """Compute with the weights of this folder from now on, or with the base (""). Raises FileNotFoundError where
        they are gone."""
        self.core.release()
        if self._in_use is not None:
            self._in_use.changed()
            self._in_use = None
        if not folder:
            self.model, self.held = self._base, BASE
        elif self._whole is not None:
            load_whole(self._whole, Path(folder))
            self.model, self.held = self._whole, self._proved(Path(folder), named_weights(self._whole))
        else:
            adapters = self._shaped_like(Path(folder))
            adapters.load(Path(folder) / ADAPTER)
            self._in_use = adapters
            self.model = adapters.merged()
            self.held = self._proved(Path(folder), adapters.tensors())
        self.core = DecodeCore(self.model, max_bytes=self._most_bytes)
        self.heads = heads_of(self.model)

    def _proved(self, folder: Path, tensors: Mapping[str, Tensor]) -> Held:
        digests = {name: self._digester.digest(tensor) for name, tensor in tensors.items()}
        return Held(_version(folder), joint_digest(digests))

    def _shaped_like(self, folder: Path) -> LoraAdapters:
        """Return adapters of the shape of the saved ones. Only those of one shape are kept."""
        try:
            said = json.loads((folder / ADAPTER / CONFIG).read_text(encoding="utf-8"))
        except OSError:
            raise FileNotFoundError(f"the weights of {folder.name} are no longer kept here") from None
        targets = sorted(said["target_modules"])
        shape = json.dumps([said["r"], said["lora_alpha"], targets])
        if shape not in self._adapters:
            options = LoraConfig(int(said["r"]), float(said["lora_alpha"]), targets, 0.0)
            self._adapters = {shape: LoraAdapters(sharing_copy(self._base), options, role="sampler", head=True)}
        return self._adapters[shape]


VERSION = "version.json"
"""Beside saved adapters: which version they are."""


def _version(folder: Path) -> int:
    try:
        return int(json.loads((folder / VERSION).read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError):
        return -1


class Sampler:
    """Plays requests over ``base`` (transformers) a step at a time. ``ends`` are the tokens that end a sequence where
    the request names none; ``longest`` bounds prompt and sampled tokens together; ``began`` is called with the number
    of a request before anything of it is computed. ``full_weights``: what is saved is the whole model."""

    def __init__(
        self,
        base: Any,
        tokenizer: Any,
        *,
        ends: frozenset[int],
        longest: int,
        most_bytes: Callable[[], int | None] = lambda: None,
        began: Callable[[int], None] = lambda number: None,
        full_weights: bool = False,
    ) -> None:
        self._began = began
        self._weights = Weights(base, most_bytes, full_weights)
        self._tokenizer, self._ends, self._longest = tokenizer, ends, longest
        self._vocabulary = int(base.config.get_text_config().vocab_size)
        self._folder = ""
        self._waiting: list[Asked] = []
        self._joining: list[tuple[Asked, Turn]] = []
        self._playing: dict[int, tuple[Asked, Turn]] = {}  # by slot
        self._scoring: list[tuple[Asked, Turn]] = []  # ended, and their likeliest tokens are asked for
        self._slots = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._in_use)

    @property
    def _in_use(self) -> bool:
        return bool(self._joining or self._playing or self._scoring)

    def submit(self, number: int, folder: str, request: Any, done: Answered) -> None:
        """Take a ``SampleRequest`` for the weights of ``folder``. Raises BadRequest for what cannot be sampled."""
        prompt = prompt_tokens(request.prompt)
        check_tokens(prompt, self._vocabulary, self._longest)
        params = request.sampling_params
        room = self._longest - len(prompt)
        wanted = room if params.max_tokens is None else params.max_tokens
        only_scored = room == 0 and wanted in (0, 1) and _scores(request)
        if only_scored:
            wanted = 1  # the client's way to ask for the log-probabilities of a prompt
        elif wanted < 1 or wanted > room:
            raise BadRequest(
                f"sampling_params.max_tokens={wanted}: after {len(prompt)} tokens of prompt there is room for {room}"
            )
        if 0 < params.temperature < LEAST_TEMPERATURE:
            raise BadRequest(
                f"sampling_params.temperature={params.temperature} must be 0, or {LEAST_TEMPERATURE} or more"
            )
        config = GenConfig(
            max_new_tokens=wanted,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=0 if params.top_k == -1 else params.top_k,
        )
        stops, texts = self._stops(params.stop)
        _check(request, len(prompt), wanted)
        asked = Asked(number, folder, prompt, request, config, stops, texts, done, only_scored)
        try:
            check_request(GenRequest(0, prompt.tolist()), config)
        except ValueError as error:
            raise BadRequest(_in_words_of_the_client(str(error))) from None
        self._waiting.append(asked)

    def _stops(self, stop: Any) -> tuple[frozenset[int], tuple[str, ...]]:
        """Return stop tokens and stop strings. What a client names stands in place of the model's own ends."""
        if stop is None:
            return self._ends, ()
        if isinstance(stop, str):
            stop = [stop]
        texts = tuple(each for each in stop if isinstance(each, str))
        tokens = frozenset(each for each in stop if not isinstance(each, str))
        if any(not 0 < len(text) <= LONGEST_STOP for text in texts) or len(texts) > MOST_STOPS:
            raise BadRequest(f"sampling_params.stop: at most {MOST_STOPS} strings, of 1 to {LONGEST_STOP} letters")
        return tokens, texts

    def cancel(self, number: int) -> None:
        """Forget a request; nothing is answered."""
        self._waiting = [asked for asked in self._waiting if asked.number != number]
        self._joining = [(asked, turn) for asked, turn in self._joining if asked.number != number]
        self._scoring = [(asked, turn) for asked, turn in self._scoring if asked.number != number]
        gone = [(slot, turn) for slot, (asked, turn) in self._playing.items() if asked.number == number]
        self._weights.core.leave([turn for _, turn in gone])
        for slot, _ in gone:
            del self._playing[slot]
        self._weights.core.free([slot for slot, _ in gone])

    def step(self) -> None:
        """Do a bit of the work: let requests join, draw a token for every sequence in play, and look once more at one
        that has ended. What fails is told to those whose request it was."""
        self._take_turns()
        self._begin()
        core = self._weights.core
        try:
            if self._joining:
                joined = core.join([turn for _, turn in self._joining])
                for asked, turn in self._joining[:joined]:
                    self._playing[turn.slot] = asked, turn
                    if turn is asked.turns[0]:
                        self._began(asked.number)
                del self._joining[:joined]
            self._end(core.step(self._weights.held.version) if self._playing else [])
        except Exception as error:
            core.reset()
            self._fail(error)
        if self._scoring:
            self._look_again(*self._scoring.pop(0))

    def _take_turns(self) -> None:
        """Change to other weights when those in use have nothing left to do."""
        if self._in_use or not self._waiting:
            return
        folder = self._waiting[0].folder
        if folder == self._folder:
            return
        try:
            self._weights.use(folder)
            self._folder = folder
        except Exception as error:
            self._folder = "?"  # whatever is there now, the next request loads its own
            failed = [asked for asked in self._waiting if asked.folder == folder]
            self._waiting = [asked for asked in self._waiting if asked.folder != folder]
            for asked in failed:
                asked.done(asked.number, error, self._weights.held)

    def _begin(self) -> None:
        """Make the turns of waiting requests of the weights in use, unless others have waited too long, or as many
        turns wait for room as one request may have."""
        now = time.monotonic()
        others_wait = any(asked.folder != self._folder and now - asked.since > TURN_S for asked in self._waiting)
        if others_wait and self._in_use:
            return
        waiting, self._waiting = self._waiting, []
        scored = False
        for asked in waiting:
            if asked.folder != self._folder or len(self._joining) >= MOST_SAMPLES or (asked.only_scored and scored):
                self._waiting.append(asked)
                continue
            if asked.only_scored:  # a pass over the prompt: one between two tokens of the others
                scored = True
                self._began(asked.number)
                self._answer(asked)
                continue
            asked.left = asked.request.num_samples
            prompt = asked.prompt.tolist()
            asked.turns = [self._turn(asked, prompt, i) for i in range(asked.left)]
            self._joining += [(asked, turn) for turn in asked.turns]

    def _turn(self, asked: Asked, prompt: list[int], i: int) -> Turn:
        seed = asked.request.sampling_params.seed
        stream = int.from_bytes(np.random.bytes(8), "little") if seed is None else stream_of(seed + (i << 32))
        self._slots += 1
        request = GenRequest(self._slots, prompt)
        budget = remaining_tokens(request, asked.config, self._weights.core.limit)
        return Turn(request, asked.config, asked.stops, budget, stream)

    def _end(self, ended: Sequence[Turn]) -> None:
        over = {turn.slot for turn in ended}
        for slot, (asked, turn) in list(self._playing.items()):
            if slot not in over and asked.texts and self._says(turn, asked.texts):
                turn.reason = "stop"
                self._weights.core.leave([turn])
                over.add(slot)
        for slot in over:
            asked, turn = self._playing.pop(slot)
            if asked.texts and turn.reason == "length" and self._says(turn, asked.texts):
                turn.reason = "stop"
            if asked.request.topk_sample_logprobs:
                self._scoring.append((asked, turn))
            else:
                self._ended(asked)
        self._weights.core.free(over)

    def _ended(self, asked: Asked) -> None:
        asked.left -= 1
        if not asked.left:
            self._answer(asked)

    def _look_again(self, asked: Asked, turn: Turn) -> None:
        """Find the likeliest tokens at each place of a sequence: a pass over all of it, so that one at a time is done
        between two tokens of the others."""
        ids = np.concatenate([asked.prompt, np.asarray(turn.token_ids, dtype=np.int64)])
        top, first = asked.request.topk_sample_logprobs, len(asked.prompt) - 1
        try:
            likeliest = self._score(ids[:-1], first, top, temperature=asked.config.temperature or 1.0)[1]
        except Exception as error:
            self.cancel(asked.number)
            asked.done(asked.number, error, self._weights.held)
            return
        assert likeliest is not None
        asked.likeliest[turn.slot] = likeliest
        self._ended(asked)

    def _says(self, turn: Turn, texts: Sequence[str]) -> bool:
        """Whether the last token completes a stop string: as many tokens as it has bytes hold it in any case."""
        tail = turn.token_ids[-max(len(text.encode()) for text in texts) - 1 :]
        said = self._tokenizer.decode(tail, clean_up_tokenization_spaces=False)
        return any(text in said for text in texts)

    def _answer(self, asked: Asked) -> None:
        held = self._weights.held
        try:
            answer = self._written(asked)
        except Exception as error:
            asked.done(asked.number, error, held)
            return
        asked.done(asked.number, answer, held)

    def _written(self, asked: Asked) -> bytes:
        sequences = [
            Sampled(turn.token_ids, turn.logprobs, turn.reason, asked.likeliest.get(turn.slot)) for turn in asked.turns
        ]
        if asked.only_scored:
            sequences = [Sampled([], [], "length")] * asked.request.num_samples
        return sample_answer(sequences, self._of_prompt(asked.request, asked.prompt))

    def _of_prompt(self, request: Any, prompt: np.ndarray) -> Scored:
        """Score the prompt as far as it was asked for."""
        last_n = request.prompt_logprobs_last_n
        first = 0 if last_n is None else len(prompt) - 1 - last_n
        top, wanted = request.topk_prompt_logprobs, request.target_prompt_logprobs
        if not (request.prompt_logprobs or top or wanted is not None):
            return Scored()
        if len(prompt) < 2:
            empty = TopK(np.zeros((1, top), np.int32), np.full((1, top), MASKED, np.float32)) if top else None
            return Scored(np.full(1, np.nan) if request.prompt_logprobs else None, empty)
        ids = None if wanted is None else _target_ids(wanted, self._vocabulary)
        values, likeliest, chosen = self._score(prompt[:-1], 0 if ids is not None else first, top, prompt[1:], ids)
        if ids is not None and first:  # the whole prompt was computed, and only its end was asked for
            values[:first] = np.nan
            if likeliest is not None:
                likeliest.tokens[:first], likeliest.logprobs[:first] = 0, MASKED
        elif first:
            values = np.concatenate([np.full(first, np.nan), values])
            likeliest = None if likeliest is None else _shifted(likeliest, first)
        logprobs = np.concatenate([[np.nan], values]) if request.prompt_logprobs else None
        return Scored(logprobs, None if likeliest is None else _shifted(likeliest, 1), chosen)

    @torch.inference_mode()
    def _score(
        self,
        tokens: np.ndarray,
        first: int,
        top: int,
        targets: np.ndarray | None = None,
        wanted: np.ndarray | None = None,
        temperature: float = 1.0,
    ) -> tuple[np.ndarray, TopK | None, np.ndarray | None]:
        """Feed ``tokens`` and look at the predictions from position ``first`` on: the log-probabilities of ``targets``
        (n,) there, the ``top`` likeliest, and those of the tokens ``wanted`` (n, K), 0 where that is -1."""
        model = self._weights.model
        given = torch.from_numpy(tokens)[None].to(model.device)
        hidden = model.get_decoder()(input_ids=given, use_cache=False).last_hidden_state[0, first:]
        rows = max(1, _LOGIT_BYTES // (4 * self._vocabulary))
        found, likeliest, chosen = list[Tensor](), list[tuple[Tensor, Tensor]](), list[Tensor]()
        for begin in range(0, len(hidden), rows):
            part = slice(begin, begin + rows)
            log_p = self._logits(hidden[part]).div_(temperature).log_softmax(-1)
            if targets is not None:
                at = torch.from_numpy(targets[first:][part]).to(log_p.device)
                found.append(log_p.gather(-1, at[:, None])[:, 0])
            if top:
                best = log_p.topk(min(top, self._vocabulary), dim=-1)
                likeliest.append((best.indices, best.values))
            if wanted is not None:
                ids = torch.from_numpy(wanted[first:][part]).to(log_p.device)
                chosen.append(log_p.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0))
        numbers = lambda parts: torch.cat(list(parts)).cpu().numpy()
        return (
            numbers(found) if found else np.zeros(0, np.float32),
            TopK(numbers(i for i, _ in likeliest), numbers(v for _, v in likeliest)) if likeliest else None,
            numbers(chosen) if chosen else None,
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        heads = self._weights.heads
        return bent(self._weights.model.get_output_embeddings()(hidden).float(), heads.factor, heads.cap)

    def _fail(self, error: Exception) -> None:
        """Tell all that are in play; where none is, the one that wanted the longest rows, for which there was no
        room."""
        failed = {id(asked): asked for asked, _ in self._playing.values()}
        if not failed and self._joining:
            widest, _ = max(self._joining, key=lambda each: each[1].length + each[1].budget)
            failed = {id(widest): widest}
        self._playing = {}
        self._joining = [(asked, turn) for asked, turn in self._joining if id(asked) not in failed]
        self._scoring = [(asked, turn) for asked, turn in self._scoring if id(asked) not in failed]
        for asked in failed.values():
            asked.done(asked.number, error, self._weights.held)


def _scores(request: Any) -> bool:
    """Return whether anything is asked of the prompt itself."""
    return bool(request.prompt_logprobs or request.topk_prompt_logprobs or request.target_prompt_logprobs is not None)


def _in_words_of_the_client(text: str) -> str:
    """Return what is wrong with the options of a generation, by the names that the client has for them."""
    return text.replace("gen.max_new_tokens", "sampling_params.max_tokens").replace("gen.", "sampling_params.")


def _check(request: Any, length: int, wanted: int) -> None:
    """Raise BadRequest for what is asked of a prompt of ``length`` tokens, and of sequences of at most ``wanted``,
    beyond their size."""
    if not 1 <= request.num_samples <= MOST_SAMPLES:
        raise BadRequest(f"num_samples={request.num_samples} must be from 1 to {MOST_SAMPLES}")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(request, name) <= MOST_TOP:
            raise BadRequest(f"{name}={getattr(request, name)} must be from 0 to {MOST_TOP}")
    given = 0 if request.target_prompt_logprobs is None else _width(request.target_prompt_logprobs, length)
    of_prompt = request.topk_prompt_logprobs + given
    listed = of_prompt * length + request.topk_sample_logprobs * wanted * request.num_samples
    if listed > MOST_LISTED:
        raise BadRequest(
            f"topk_prompt_logprobs and target_prompt_logprobs, {of_prompt} for {length} tokens, and "
            f"topk_sample_logprobs={request.topk_sample_logprobs} for {request.num_samples} sequences of up to "
            f"{wanted} tokens are {listed} places in all; an answer has at most {MOST_LISTED}"
        )
    if request.prompt_alt_tokens_k:
        raise BadRequest("prompt_alt_tokens_k is not carried by this server")
    if request.record_stability_info:
        raise BadRequest("record_stability_info (loss_fn stable_reinforce) is not carried by this server")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not (request.prompt_logprobs and 1 <= last_n <= length - 1):
        raise BadRequest(f"prompt_logprobs_last_n={last_n} needs prompt_logprobs, and must be from 1 to {length - 1}")


def _width(wanted: Any, length: int) -> int:
    """Return how many ids are asked for at each place of a prompt of ``length`` tokens. A sparse tensor may say any
    shape, so that is looked at before it is spread. Raises BadRequest."""
    if wanted.sparse_crow_indices is not None and wanted.sparse_col_indices is None:
        raise BadRequest("target_prompt_logprobs: sparse_col_indices are missing")
    shape = tuple(wanted.shape or [len(wanted.data)])
    if len(shape) != 2 or shape[0] != length - 1 or not 0 < shape[1] <= MOST_TOP:
        raise BadRequest(
            f"target_prompt_logprobs has the shape {shape}, for a prompt of {length} tokens and at most {MOST_TOP}"
        )
    return shape[1]


def _target_ids(wanted: Any, vocabulary: int) -> np.ndarray:
    """Return the ids whose log-probabilities are asked for, i64 (n - 1, K), -1 for none."""
    try:
        ids = np.asarray(wanted.to_numpy(pad_value=-1), dtype=np.int64)
    except (ValueError, RuntimeError, OverflowError) as error:
        raise BadRequest(f"target_prompt_logprobs: {error}") from None
    if ids.max() >= vocabulary or ids.min() < -1:
        raise BadRequest(f"target_prompt_logprobs: ids must be from 0 to {vocabulary - 1}, or -1")
    return ids


def _shifted(top: TopK, rows: int) -> TopK:
    """Put rows without anything before the others."""
    k = top.tokens.shape[1]
    tokens = np.concatenate([np.zeros((rows, k), top.tokens.dtype), top.tokens])
    return TopK(tokens, np.concatenate([np.full((rows, k), MASKED, np.float32), top.logprobs]))
