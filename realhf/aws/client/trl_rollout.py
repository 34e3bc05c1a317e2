"""``rollout_func`` for TRL's GRPOTrainer on MultiTurnEnvPool: multi-turn episodes with exact token
ids, played concurrently.

    pool = MultiTurnEnvPool(url, size=8, turn_tokens=64)
    trainer = GRPOTrainer(model, [episode_reward], rollout_func=PoolRollouts(pool),
        train_dataset=rows, ...)

A prompt specifies its task: JSON of reset arguments (``{"task_id": 1, "seed": 7}``), alone or as
the content of the last message. Source: docs/reference/environment.md 10.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from realhf.api.chat_template import TemplateChat
from realhf.api.model import GenOutput, GenRequest
from realhf.api.rollout import RolloutOutcome
from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool

if TYPE_CHECKING:
    import torch


def task_of_prompt(prompt: Any) -> dict[str, Any]:
    """Return the reset arguments that a prompt contains. Raises ValueError if it contains none."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(
            f'a prompt must be JSON of reset arguments such as {{"task_id": 1}}, not {text!r:.200}'
        )
    return arguments


def episode_reward(
    completions: Sequence[Any], episode_reward: Sequence[float | None], **_: Any
) -> list[float | None]:
    """Return the scores of the rollouts; a reward function for TRL. A failed rollout has None, not
    0."""
    return list(episode_reward)


class PoolRollouts:
    """A ``rollout_func`` for TRL: call it with ``(prompts, trainer)`` to play the rollouts.

    It returns a dict of columns with ``num_generations`` rows per task: ``prompt_ids``,
    ``completion_ids``, ``logprobs`` and ``env_mask`` (1 for sampled tokens), and for reward
    functions ``episode_reward`` (None: failed), ``achieved``, ``progress`` and ``status``. The
    completion of a failed rollout is a single end token with mask 0.
    """

    def __init__(
        self, pool: MultiTurnEnvPool, task_of: Callable[[Any], Mapping[str, Any]] = task_of_prompt
    ) -> None:
        self._pool = pool
        self._task_of = task_of

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play one rollout for every prompt and return the columns, with rows in the order of the
        prompts. Raises CapacityError or ConnectError when the pool cannot connect."""
        self._pool.connect()
        group_size = (
            trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        )
        tasks = [
            {"chaos": False, **self._task_of(prompt)}
            for prompt in _one_prompt_per_group(prompts, group_size)
        ]
        seeds = [int(task.pop("seed", 0)) for task in tasks]
        policy = TransformersPolicy(trainer, self._pool.turn_tokens)
        groups = self._pool.run_groups(tasks, policy, group_size=group_size, seeds=seeds)
        return _build_columns([outcome for group in groups for outcome in group], policy.chat)


class TransformersPolicy:
    """Policy that samples from the trainer's model with transformers' ``generate``, at the
    trainer's temperature."""

    def __init__(self, trainer: Any, max_new_tokens: int) -> None:
        # TRL's own option for template variables.
        kwargs = getattr(getattr(trainer, "args", None), "chat_template_kwargs", None)
        self.chat = TemplateChat(
            trainer.processing_class, system_prompt=None, template_kwargs=kwargs
        )
        self._trainer = trainer
        self._max_new_tokens = max_new_tokens
        self._pad = trainer.processing_class.pad_token_id

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """Sample the next turn of every request, as one batch of left-padded token sequences."""
        import torch

        model = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)
        longest = max(len(request.token_ids) for request in requests)
        rows = [[self._pad] * (longest - len(r.token_ids)) + list(r.token_ids) for r in requests]
        mask = [[0] * (longest - len(r.token_ids)) + [1] * len(r.token_ids) for r in requests]
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                generated = model.generate(
                    input_ids=torch.tensor(rows, device=model.device),
                    attention_mask=torch.tensor(mask, device=model.device),
                    max_new_tokens=self._max_new_tokens,
                    do_sample=True,
                    temperature=self._trainer.temperature,
                    top_k=0,
                    top_p=1.0,
                    eos_token_id=list(self.chat.stop_ids),
                    pad_token_id=self._pad,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
        finally:
            model.train(was_training)
        logits = torch.stack(generated.logits, dim=1).float() / self._trainer.temperature
        return [
            self._build_output(ids, row)
            for ids, row in zip(generated.sequences[:, longest:], logits, strict=True)
        ]

    def free(self, slots: Sequence[int]) -> None:
        """Do nothing: no state is kept between calls of ``generate``."""
        del slots

    def _build_output(self, ids: torch.Tensor, logits: torch.Tensor) -> GenOutput:
        """Return the output for one row of the batch. ``ids`` [n]: generated token ids, which are
        cut after the first stop id. ``logits`` [n, vocabulary]: logits divided by the
        temperature."""
        tokens = ids.tolist()
        ends = [position for position, token in enumerate(tokens) if token in self.chat.stop_ids]
        count = ends[0] + 1 if ends else len(tokens)
        chosen = logits[:count].log_softmax(-1).gather(-1, ids[:count, None]).squeeze(-1)
        return GenOutput(tokens[:count], chosen.tolist(), [0] * count, "stop" if ends else "length")


def _one_prompt_per_group(prompts: Sequence[Any], group_size: int) -> list[Any]:
    """Return one prompt per group: TRL passes each prompt ``num_generations`` times in a row.
    Raises ValueError if it did not."""
    groups = [
        list(prompts[start : start + group_size]) for start in range(0, len(prompts), group_size)
    ]
    if any(group != group[:1] * group_size for group in groups):
        raise ValueError(f"expected each prompt {group_size} times in a row (num_generations)")
    return [group[0] for group in groups]


def _build_columns(outcomes: Sequence[RolloutOutcome], chat: TemplateChat) -> dict[str, list[Any]]:
    rows = [outcome if outcome.valid and outcome.completion_ids else None for outcome in outcomes]
    end = list(chat.stop_ids[:1])
    return {
        "prompt_ids": [outcome.prompt_ids or end for outcome in outcomes],
        "completion_ids": [row.completion_ids if row else end for row in rows],
        "logprobs": [row.logprobs if row else [0.0] for row in rows],
        "env_mask": [[int(sampled) for sampled in row.loss_mask] if row else [0] for row in rows],
        "episode_reward": [outcome.reward for outcome in outcomes],
        "achieved": [outcome.achieved for outcome in outcomes],
        "progress": [outcome.progress for outcome in outcomes],
        "status": [outcome.status for outcome in outcomes],
    }
