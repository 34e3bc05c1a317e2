"""How tokens are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.api.config.option import option


@dataclass
class GenConfig:
    """Sampling. Rewards and log-probabilities are those of exactly this distribution."""

    max_new_tokens: int = option(64, "A turn ends after this many tokens.", at_least=1)
    min_new_tokens: int = option(0, "A turn has at least this many tokens; training needs 0.", at_least=0)
    temperature: float = option(1.0, "The logits are divided by this before a token is drawn.", above=0)
    top_p: float = option(
        1.0, "Tokens are drawn from the likeliest with this total probability; training needs 1.", above=0, at_most=1
    )
    top_k: int = option(
        0, "Tokens are drawn from this many of the likeliest, 0 from all; training needs 0.", at_least=0
    )
    new_tokens_per_chunk: int | None = option(
        None,
        "An engine call returns after this many tokens and a longer turn goes on in the next call, so that rollouts "
        "in lockstep wait for a chunk and not for the longest turn.",
        at_least=1,
    )

    def truncations(self) -> list[str]:
        """The options, as ``top_p=0.9``, that draw tokens from a cut distribution. Training refuses them: the trainer
        knows the log-probabilities of the whole distribution only. Evaluation may use them."""
        whole = {"top_p": 1.0, "top_k": 0, "min_new_tokens": 0}
        return [f"{name}={getattr(self, name)}" for name, value in whole.items() if getattr(self, name) != value]
