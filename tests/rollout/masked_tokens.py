"""Turns that are sampled under the grammars of answers, from random logits and from a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from realhf.api.chat_template import TemplateChat
from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.embedded.continuous_batching import ContinuousGenerator
from realhf.backends.embedded.token_masks import TokenMasks, mask_logits
from tests.api.chat.templates import QWEN3

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CLOSING = '"}],'
"""Characters that random logits favour, because turns would not end otherwise."""
PAGES = Path(__file__).parents[2] / "docs"


@cache
def words_chat(*, special_tags: bool = False) -> TemplateChat:
    """A chat with a vocabulary as those of GPT-2, SmolLM2 and Qwen: byte-level BPE, whose tokens are
    words, white space of any length and several signs at once. Its tags are tokens, special ones if
    asked for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [page.read_text("utf-8") for page in sorted(PAGES.glob("*.md"))]
    texts += ['{"a": [{"b": "c"}, {"d": 12}], "e": null}\n{\n  "f": true\n}'] * 50
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(TAGS))
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    if special_tags:
        made.add_special_tokens({"additional_special_tokens": [*CONTROL[1:], *TAGS]})
    made.chat_template = QWEN3
    return TemplateChat(made)


@cache
def masks_of(chat: TemplateChat) -> TokenMasks:
    return TokenMasks(chat._tokenizer, chat.stop_ids, len(chat._tokenizer) + 11)


@cache
def _favoured(chat: TemplateChat) -> torch.Tensor:
    """What is added to random logits: more for tokens that close something and for ends of turns."""
    names = [chat._tokenizer.decode([token]) for token in range(len(chat._tokenizer))]
    closes = [any(sign in name for sign in CLOSING) for name in names]
    bonus = torch.where(torch.tensor([*closes, *[False] * 11]), 4.0, 0.0)
    bonus[list(chat.stop_ids)] = 4.0
    return bonus


def sample_turn(
    chat: TemplateChat, grammar: str, seed: int, begin: Sequence[int] = (), limit: int = 400
) -> tuple[list[int], bool]:
    """Return the ids of a turn that begins with ``begin`` and goes on as random logits sample it
    under a grammar, and whether a stop id has ended it within ``limit`` tokens."""
    masks = masks_of(chat)
    mask = masks.start(grammar, begin)
    generator = torch.Generator().manual_seed(seed)
    ids = list(begin)
    while len(ids) < limit:
        packed = masks.allocate(1)
        mask.fill(packed[0])
        logits = 2 * torch.randn(1, len(_favoured(chat)), generator=generator) + _favoured(chat)
        masked = mask_logits(logits, [0], packed)
        token = int(torch.multinomial(masked.softmax(-1)[0], 1, generator=generator))
        ids.append(token)
        if token in chat.stop_ids:
            return ids, True
        mask.accept(token)
    return ids, False


class MaskedTokens:
    """A ``TokenSource`` whose turns the embedded engine samples from a model, under the grammars of
    the requests. ``outputs`` are its results."""

    def __init__(self, chat: TemplateChat, model: Any, config: GenConfig) -> None:
        self.engine = ContinuousGenerator(model, masks=masks_of(chat))
        self.outputs: list[GenOutput] = []
        self._stop_ids = chat.stop_ids
        self._config = config

    async def generate(self, request: GenRequest) -> GenOutput:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[GenOutput | Exception] = loop.create_future()

        def finish(result: GenOutput | Exception) -> None:
            loop.call_soon_threadsafe(done.set_result, result)

        self.engine.submit(request, self._config, self._stop_ids, finish)
        result = await done
        if isinstance(result, Exception):
            raise result
        self.outputs.append(result)
        return result

    def free(self, slots: Sequence[int]) -> None:
        self.engine.free(slots)
