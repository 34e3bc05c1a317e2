"""Judges the tokens of a policy by the policy itself, when it has been told what became of them (SDPO)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.algorithms.train_step import PredictedTokens, replace_keys, shifted_sample
from realhf.api.keys import FEEDBACK_PROMPT, FEEDBACK_RATIOS
from realhf.api.model import CallContext, Model
from realhf.api.sample import SequenceSample


class SelfTeacherInterface:
    """Computes ``feedback_logratios`` f32 (L-1): for every trainable token log p(token | feedback, what came before) -
    log p(token | what came before), at ``temperature``, under the weights of the model as they are; 0 elsewhere and in
    rows that were told nothing.

    It reads ``packed_input_ids``, ``prompt_mask``, ``loss_mask`` and ``feedback_prompt_ids``, the prompt of each row
    with the feedback in it (one id below 0: nothing). Both log-probabilities come from the same engine, so that nothing
    of what tells sampler and trainer apart is in their difference. It costs two forward passes over the rows that were
    told something. Source: Hübotter et al. 2026, Reinforcement Learning via Self-Distillation, the sampled token in the
    place of the whole vocabulary, the policy at the start of the step as its own teacher.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self._temperature = temperature

    def inference(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return the sample of ``feedback_logratios``, and ``told``, the fraction of the sequences with a trainable
        token that were told something."""
        tokens = PredictedTokens.of(sample)
        trains = tokens.having(tokens.mask)
        prompts = sample[FEEDBACK_PROMPT].cpu().split(np.asarray(sample.lengths(FEEDBACK_PROMPT).values).tolist())
        told = trains & torch.tensor([bool(len(ids)) and int(ids[0]) >= 0 for ids in prompts], dtype=torch.bool)
        ratios = torch.zeros(len(tokens.mask))
        chosen = tokens.mask & told[tokens.sequence]
        if bool(chosen.any()):
            with_feedback = told_rows(sample, prompts, told)
            own = PredictedTokens.of(with_feedback).mask
            before = self._logprobs(model, _of_rows(sample, told), context)
            ratios[chosen] = self._logprobs(model, with_feedback, context)[own] - before[chosen]
        stats = {"told": float(told.sum()) / max(1, int(trains.sum()))}
        return shifted_sample(sample, FEEDBACK_RATIOS, ratios), stats

    def _logprobs(self, model: Model, sample: SequenceSample, context: CallContext) -> Tensor:
        return model.engine.logprobs(sample, temperature=self._temperature, mb_spec=context.mb_spec).cpu()


def _of_rows(sample: SequenceSample, rows: Tensor) -> SequenceSample:
    """Return the tokens with a mask in ``rows``, bool (n sequences,), alone."""
    lengths = torch.from_numpy(np.asarray(sample.lengths("packed_input_ids").values))
    mask = sample["loss_mask"].cpu().bool() & torch.repeat_interleave(rows, lengths)
    return replace_keys(sample.select({"packed_input_ids", "loss_mask"}), per_token={"loss_mask": mask})


def told_rows(sample: SequenceSample, prompts: Any, told: Tensor) -> SequenceSample:
    """Return ``packed_input_ids`` and ``loss_mask`` of the rows in ``told``, bool (n sequences,), with their
    ``prompts`` in the place of the own ones: the trainable tokens stay, in their order. Other rows are left with their
    first token and without a mask. Raises ValueError where a row trains on a part of its prompt."""
    lengths = np.asarray(sample.lengths("packed_input_ids").values).tolist()
    columns = [sample[key].cpu().split(lengths) for key in ("packed_input_ids", "loss_mask", "prompt_mask")]
    ids_of, masks_of = list[Tensor](), list[Tensor]()
    for number, (ids, mask, prompt) in enumerate(zip(*columns, strict=True)):
        if not told[number]:
            ids_of.append(ids[:1])
            masks_of.append(torch.zeros(1, dtype=torch.bool))
            continue
        if bool((mask.bool() & prompt.bool()).any()):
            raise ValueError(f"sequence {number} trains on tokens of its own prompt, which feedback replaces")
        said = ~prompt.bool()
        ids_of.append(torch.cat((prompts[number].to(ids.dtype), ids[said])))
        masks_of.append(torch.cat((torch.zeros(len(prompts[number]), dtype=torch.bool), mask[said].bool())))
    sizes = iter([len(ids) for ids in ids_of])
    nested = [[next(sizes) for _ in inner] for inner in sample.seqlens["packed_input_ids"]]
    tensors = {"packed_input_ids": torch.cat(ids_of), "loss_mask": torch.cat(masks_of)}
    return SequenceSample.from_tensors(sample.ids, tensors, dict.fromkeys(tensors, nested))
