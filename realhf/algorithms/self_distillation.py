"""Self-distillation (SDPO): the policy with feedback in its prompt is the teacher of the policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.algorithms.train_step import PredictedTokens, build_shifted_sample, replace_keys
from realhf.api.keys import FEEDBACK_PROMPT, FEEDBACK_RATIOS
from realhf.api.model import CallContext, Model
from realhf.api.sample import SequenceSample


class SelfTeacherInterface:
    """Inference call that compares the policy with feedback in its prompt to the policy without.

    Computes ``feedback_logratios`` f32 (L-1): log p(token | feedback, context) - log p(token |
    context) for every trainable token, at ``temperature``, under the current weights of the model;
    0 elsewhere and in sequences without feedback.

    Reads ``packed_input_ids``, ``prompt_mask``, ``loss_mask`` and ``feedback_prompt_ids``, the
    prompt of each sequence with the feedback in it (a single negative id: no feedback). Both
    log-probabilities come from the same engine, so that their difference contains no mismatch
    between generator and trainer. It costs two forward passes over the sequences with feedback.

    Source: Hübotter et al. 2026, Reinforcement Learning via Self-Distillation; here for the sampled
    token instead of the whole vocabulary, with the policy at the start of the step as the teacher.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self._temperature = temperature

    def inference(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return the sample with ``feedback_logratios``, and the statistic ``told``.

        ``told`` is the fraction of the sequences with a trainable token that have feedback.
        """
        tokens = PredictedTokens.from_sample(sample)
        trains = tokens.sequences_with(tokens.mask)
        prompts = (
            sample[FEEDBACK_PROMPT]
            .cpu()
            .split(np.asarray(sample.lengths(FEEDBACK_PROMPT).values).tolist())
        )
        has_feedback = trains & torch.tensor(
            [bool(len(ids)) and int(ids[0]) >= 0 for ids in prompts], dtype=torch.bool
        )
        log_ratios = torch.zeros(len(tokens.mask))
        mask = tokens.mask & has_feedback[tokens.sequence]
        if bool(mask.any()):
            with_feedback = replace_prompts(sample, prompts, has_feedback)
            teacher_mask = PredictedTokens.from_sample(with_feedback).mask
            student_logprobs = self._logprobs(
                model, _mask_other_rows(sample, has_feedback), context
            )
            teacher_logprobs = self._logprobs(model, with_feedback, context)
            log_ratios[mask] = teacher_logprobs[teacher_mask] - student_logprobs[mask]
        stats = {"told": float(has_feedback.sum()) / max(1, int(trains.sum()))}
        return build_shifted_sample(sample, FEEDBACK_RATIOS, log_ratios), stats

    def _logprobs(self, model: Model, sample: SequenceSample, context: CallContext) -> Tensor:
        return model.engine.logprobs(
            sample, temperature=self._temperature, mb_spec=context.mb_spec
        ).cpu()


def _mask_other_rows(sample: SequenceSample, rows: Tensor) -> SequenceSample:
    """Return the tokens, with ``loss_mask`` set to False outside ``rows``, bool (n_sequences,)."""
    lengths = torch.from_numpy(np.asarray(sample.lengths("packed_input_ids").values))
    mask = sample["loss_mask"].cpu().bool() & torch.repeat_interleave(rows, lengths)
    return replace_keys(
        sample.select({"packed_input_ids", "loss_mask"}), per_token={"loss_mask": mask}
    )


def replace_prompts(sample: SequenceSample, prompts: Any, rows: Tensor) -> SequenceSample:
    """Return ``packed_input_ids`` and ``loss_mask`` with the prompts of ``rows``, bool
    (n_sequences,), replaced.

    ``prompts`` has the token ids of a prompt per sequence. The trainable tokens and their order do
    not change. Sequences outside ``rows`` are reduced to their first token, which is not in the
    mask. Raises ValueError if a sequence trains on tokens of its prompt.
    """
    lengths = np.asarray(sample.lengths("packed_input_ids").values).tolist()
    columns = [
        sample[key].cpu().split(lengths) for key in ("packed_input_ids", "loss_mask", "prompt_mask")
    ]
    new_ids = list[Tensor]()
    new_masks = list[Tensor]()
    for number, (ids, mask, prompt_mask) in enumerate(zip(*columns, strict=True)):
        if not rows[number]:
            new_ids.append(ids[:1])
            new_masks.append(torch.zeros(1, dtype=torch.bool))
            continue
        if bool((mask.bool() & prompt_mask.bool()).any()):
            raise ValueError(
                f"sequence {number} trains on tokens of its own prompt, which feedback replaces"
            )
        after_prompt = ~prompt_mask.bool()
        new_ids.append(torch.cat((prompts[number].to(ids.dtype), ids[after_prompt])))
        new_masks.append(
            torch.cat(
                (torch.zeros(len(prompts[number]), dtype=torch.bool), mask[after_prompt].bool())
            )
        )
    sizes = iter([len(ids) for ids in new_ids])
    nested = [[next(sizes) for _ in inner] for inner in sample.seqlens["packed_input_ids"]]
    tensors = {"packed_input_ids": torch.cat(new_ids), "loss_mask": torch.cat(new_masks)}
    return SequenceSample.from_tensors(sample.ids, tensors, dict.fromkeys(tensors, nested))
