"""Chooses which agent plays: the built-in one, or a function of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realhf.api.chat import TemplateChat
from realhf.api.config import GenConfig
from realhf.api.rollout import RolloutOptions
from realhf.rollout.episode.request import Limits
from realhf.rollout.players.player import EpisodeAgent, TurnAgent


def make_agent(
    name: str,
    chat: TemplateChat,
    system_prompt: str,
    episodes: RolloutOptions,
    options: Mapping[str, Any] | None = None,
) -> EpisodeAgent:
    """Build the agent called ``name``, which plays as ``episodes`` say. ``options`` are the agent's own, which its
    function takes as keyword arguments. Raises ValueError for an agent that cannot be had."""
    check_whole_distribution(episodes.gen)
    limits = Limits(episodes.max_turns, episodes.max_total_tokens, episodes.gen.max_new_tokens)
    if not name and options:
        raise ValueError(f"the built-in agent has no options of its own: {', '.join(options)} would do nothing")
    if not name:
        return TurnAgent(chat, limits, system_prompt, keep_reasoning=episodes.keep_reasoning)
    from realhf.rollout.agents.black_box_agent import BlackBoxAgent, load_agent

    try:
        return BlackBoxAgent(load_agent(name, options), chat, limits, system_prompt)
    except ValueError as error:
        raise ValueError(f"rollout.agent={error}") from error


def check_whole_distribution(gen: GenConfig) -> None:
    """Raise ValueError for sampling options with which no policy gradient can be computed."""
    if cut := gen.truncations():
        raise ValueError(
            f"gen.{', gen.'.join(cut)}: training samples from the whole distribution (top_p=1, top_k=0, "
            "min_new_tokens=0)"
        )
