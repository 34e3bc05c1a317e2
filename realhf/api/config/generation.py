"""How tokens are sampled, and what samples them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

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
    stop_ids: list[int] = option(
        [],
        "These tokens end a turn, too, in place of the end that the chat template writes; by themselves that end, the "
        "tokenizer's end of a sequence and those of generation_config.json do.",
        at_least=0,
    )
    new_tokens_per_chunk: int | None = option(
        None,
        "An engine call returns after this many tokens and a longer turn goes on in the next call, so that rollouts "
        "in lockstep wait for a chunk and not for the longest turn.",
        at_least=1,
        on_resume="free",
    )

    def truncations(self) -> list[str]:
        """The options, as ``top_p=0.9``, that draw tokens from a cut distribution. Training refuses them: the trainer
        knows the log-probabilities of the whole distribution only. Evaluation may use them."""
        whole = {"top_p": 1.0, "top_k": 0, "min_new_tokens": 0}
        return [f"{name}={getattr(self, name)}" for name, value in whole.items() if getattr(self, name) != value]


@dataclass
class EngineConfig:
    """What samples tokens, in training and in evaluations (docs/asynchronous.md)."""

    name: str = option(
        "embedded",
        "This engine generates tokens; unless one is named, vllm those of a pretrained model where this machine shows "
        "a GPU and has vLLM.",
        choices=("embedded", "vllm"),
        on_resume="warns",
    )
    vllm_url: str | None = option(
        None,
        "Tokens come from the vLLM server at this URL; without one every worker that generates starts a server.",
        on_resume="free",
    )
    vllm_executable: str = option("vllm", "vLLM is started with this command.", on_resume="free")
    max_model_len: int | None = option(
        None,
        "A vLLM server that is started takes sequences of this many tokens; without a number, what an episode may hold "
        "(rollout.max_total_tokens).",
        at_least=1,
        on_resume="free",
    )
    gpu_memory_utilization: float | None = option(
        None,
        "A vLLM server that is started uses this share of a GPU's memory; without a number, what vLLM uses by itself.",
        above=0,
        at_most=1,
        on_resume="free",
    )
    tensor_parallel_size: int = option(
        1, "A vLLM server that is started spreads the model over this many devices.", at_least=1, on_resume="free"
    )
    kv_cache_gib: float | None = option(
        None,
        "The embedded engine keeps keys and values in at most this many GiB, and plays what does not fit after the "
        "rest; without a number, in half of what is free on a GPU that it shares with a trainer, in four fifths on one "
        "of its own, and on a CPU in what it needs.",
        above=0,
        on_resume="free",
    )

    def problems(self, name: str) -> Iterator[str]:
        """An option of vLLM does nothing for another engine, nor one of a server that is started for another server."""
        names = [every.name for every in fields(self)]
        own = {"embedded": {"name", "kv_cache_gib"}, "vllm": {*names} - {"kv_cache_gib"}}.get(self.name, {"name"})
        unused = {name: "name" for name in names if name not in own}
        if self.vllm_url is not None and self.name == "vllm":
            unused |= {name: "vllm_url" for name in own - {"name", "vllm_url"}}
        for option_name, cause in unused.items():
            if getattr(self, option_name) != getattr(EngineConfig, option_name):
                yield f"{name}.{option_name}: has no effect with {name}.{cause}={getattr(self, cause)}"
