"""A tiny model, batches, and five train steps of an algorithm, of PPO with a critic too: alone and
on ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from realhf.algorithms.critic import CriticInterface
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.preference import DPOInterface, RewardModelInterface
from realhf.algorithms.presets import CORRECTIONS, PRESETS
from realhf.algorithms.sft import SFTInterface
from realhf.algorithms.train_step import COMPONENTS
from realhf.api.config import GenConfig, OptimizerConfig
from realhf.api.model import CallContext, GenRequest, Model
from realhf.api.parallel import Parallel, WeightsNotGathered
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.parallel.ddp import DdpEngine
from realhf.backends.parallel.fsdp import FsdpEngine
from realhf.backends.parallel.process_groups import GroupRanks, TorchWorld, build_mesh, list_groups
from realhf.backends.training.packed_forward import PackedForward
from realhf.backends.training.torch_backend import ValueModel
from realhf.backends.training.torch_engine import TorchEngine

CPU = torch.device("cpu")
GROUPS = ([[9, 14, 6], [5, 5, 12]], [[8, 7], [6, 11, 4]], [[13, 2]], [[20]], [[7, 3, 9, 4], [5]])
"""Five batches; the third has fewer sequences than four ranks, the fourth one valid sequence
only."""
SPEC = MicroBatchSpec(2, 24)
PPO = {
    "algo": "ppo",
    "gae_lambda": 0.9,
    "ppo_n_minibatches": 2,
    "kl_ctl": 0.1,
    "kl_target": 1.0,
    "kl_horizon": 50.0,
}


def tiny_model(tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
        "num_key_value_heads": 1, "intermediate_size": 24, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape) if tied else LlamaConfig(**shape))
    return model.to(dtype).eval()


def batch(step: int, name: str = "") -> SequenceSample:
    """With ``mixed`` the tokens weigh differently in the components of the loss."""
    groups = GROUPS[step]
    g = torch.Generator().manual_seed(step)
    lengths = [n for group in groups for n in group]
    total = sum(lengths)
    n = len(lengths)
    tensors = {
        "packed_input_ids": torch.randint(0, 50, (total,), generator=g),
        "loss_mask": torch.rand(total, generator=g) < 0.6,
        "packed_logprobs": -3 * torch.rand(total - n, generator=g),
        "packed_ref_logprobs": -3 * torch.rand(total - n, generator=g),
        "rewards": torch.rand(n, generator=g),
        "outcome": torch.zeros(n, dtype=torch.uint8),
    }
    shifted = [[m - 1 for m in group] for group in groups]
    single = [[1] * len(group) for group in groups]
    seqlens = {
        "packed_input_ids": groups, "loss_mask": groups, "packed_logprobs": shifted,
        "packed_ref_logprobs": shifted, "rewards": single, "outcome": single,
    }  # fmt: skip
    if name == "mixed":
        tensors |= {key: torch.randint(0, 3, (total - n,), generator=g) / 2 for key in COMPONENTS}
        seqlens |= dict.fromkeys(COMPONENTS, shifted)
    return SequenceSample.from_tensors([f"t{i}" for i in range(len(groups))], tensors, seqlens)


SCORED = {"prox_logp_method": "actor_inf"}
PUBLISHED = {
    **{name: {"algo": name} for name in PRESETS},
    **{f"correction-{name}": {"correction": name, **SCORED} for name in CORRECTIONS if name != "none"},
    **{name: {"adv_estimator": name} for name in ("maxrl", "reinforce_pp_baseline")},
    "pass_at_k": {"adv_estimator": "pass_at_k", "pass_at_k": 2},
    "turns": {"credit": "turn", "loss_agg": "turn_mean_token_mean"},
    "opd-with-rewards": {"algo": "opd", "rl_weight": 1.0, "distill_weight": 0.5},
    "dpo": {},
    "reward_model": {},
}  # fmt: skip
"""Every preset and correction, and what else was published, with options of ``ppo``."""


def scored_batch(step: int) -> SequenceSample:
    """With everything that any algorithm reads: several rows of a rollout, a rollout that failed,
    two turns a row, and a policy that moved since it sampled, in every other sequence far enough to
    be masked."""
    sample = batch(step)
    g = torch.Generator().manual_seed(70 + step)
    ids = sample.seqlens["packed_input_ids"]
    single = sample.seqlens["rewards"]
    lengths = [n for group in ids for n in group]
    shifted = [[n - 1 for n in group] for group in ids]
    size = sum(lengths) - len(lengths)
    moved = torch.cat(
        [torch.full((n - 1,), (0.0005, 0.8)[row % 2]) for row, n in enumerate(lengths)]
    )
    sampled = torch.randn(size, generator=g) * 0.3 - math.log(50)
    turn = torch.cat([(torch.arange(n) >= n // 2).int() for n in lengths])
    outcome = torch.zeros(len(lengths), dtype=torch.uint8)
    outcome[-1] = 3
    more = {
        "packed_logprobs": sampled,
        "proximal_logprobs": sampled + moved * torch.randn(size, generator=g),
        "teacher_logprobs": sampled + torch.randn(size, generator=g),
        "feedback_logratios": torch.randn(size, generator=g),
        "values": torch.rand(size, generator=g),
        "turn_ids": torch.where(sample["loss_mask"], turn, -1).int(),
        "turn_rewards": torch.rand(2 * len(lengths), generator=g),
        "turn_states": torch.randint(0, 2, (2 * len(lengths),), generator=g),
        "rollout_index": torch.tensor(
            [max(0, row - 1) for group in ids for row in range(len(group))]
        ).int(),
        "outcome": outcome,
        "seq_no_eos_mask": torch.zeros(len(lengths), dtype=torch.bool),
    }
    rules = {key: shifted for key, tensor in more.items() if len(tensor) == size} | {
        "turn_ids": ids
    }
    rules |= {key: [[2] * len(group) for group in ids] for key in ("turn_rewards", "turn_states")}
    kept = sample.select(sample.keys - more.keys())
    lengths_of = {key: rules.get(key, single) for key in more}
    return kept.update(SequenceSample.from_tensors(sample.ids, more, lengths_of))


def published_steps(engine_of: Callable[[Any], Any], name: str) -> list[dict[str, float]]:
    """Two train steps of a row of ``PUBLISHED``, of a policy gradient with two updates each; the
    statistics."""
    network = ValueModel(tiny_model()) if name == "reward_model" else tiny_model()
    interface: Any
    if name == "dpo":
        interface = DPOInterface(beta=0.5)
    elif name == "reward_model":
        interface = RewardModelInterface(center=0.1)
    else:
        interface = PolicyGradientInterface(
            {**PUBLISHED[name], "ppo_n_minibatches": 2}, loss_scale_len=12
        )
    model = Model("actor", engine_of(network), None)
    found = []
    for step, number in enumerate((0, 4)):
        model.engine.version = step
        ranks = getattr(model.engine, "ranks", None)
        with (
            ranks.together(f"{name} {step}")
            if isinstance(ranks, GroupRanks)
            else contextlib.nullcontext()
        ):
            found.append(
                interface.train_step(
                    model, scored_batch(number), CallContext(step, 1000, SPEC, Path())
                )
            )
    return found


def published_on_ranks(
    world: TorchWorld, rank: int, size: int, parallel: Parallel
) -> dict[str, list[dict[str, float]]]:
    """The two steps of every algorithm on ranks."""
    return {
        name: published_steps(lambda model: engine_on(world, size, parallel, model), name)
        for name in PUBLISHED
    }


def algorithm(name: str) -> Any:
    if name == "sft":
        return SFTInterface()
    if name == "mixed":
        return PolicyGradientInterface(
            {
                "correction": "mis", "behav_imp_sequence_cap": 3.0, "behav_imp_sequence_floor": 0.3,
                "loss_agg": "prompt_mean_token_mean", "ppo_n_minibatches": 2, "kl_loss_coef": 0.1,
            }
        )  # fmt: skip
    return PolicyGradientInterface(
        {"algo": "grpo", "ppo_n_minibatches": 2, "kl_loss_coef": 0.1, "adv_norm": True}
    )


def engine_on(world: TorchWorld, size: int, parallel: Parallel, model: Any) -> Any:
    """An engine with copies of the model, or with the model cut."""
    options = {"optimizer": OptimizerConfig(lr=1e-2), "total_train_steps": 10}
    world.create_groups(list_groups(range(size), parallel, cut=parallel.fsdp > 1))
    ranks = GroupRanks(world, range(size), sharded=parallel.fsdp > 1, device=CPU)
    if parallel.fsdp == 1:
        return DdpEngine(model, None, ranks=ranks, role="actor", **options)
    mesh = build_mesh(world, range(size), parallel, ranks, "cpu")
    return FsdpEngine(model, None, ranks=ranks, mesh=mesh, role="actor", **options)


def one_shares_no_prefixes(world: TorchWorld, rank: int, size: int, parallel: Parallel) -> None:
    """The last rank has found that the model does not follow trees of rows, e.g. for want of
    memory."""
    if rank == size - 1:
        PackedForward._supports_trees = lambda self: False  # type: ignore[method-assign]
    engine_on(world, size, parallel, tiny_model())


def alone(model: Any) -> TorchEngine:
    return TorchEngine(model, None, optimizer=OptimizerConfig(lr=1e-2), total_train_steps=10)


def steps(
    engine: Any, name: str, which: Sequence[int], together: bool = True
) -> list[dict[str, float]]:
    """Train the batches ``which``; the statistics of each step."""
    interface = algorithm(name)
    model = Model("actor", engine, None)
    found = []
    for step in which:
        engine.version = step
        context = CallContext(step, 1000 + step, SPEC, Path())
        if together:
            with engine.ranks.together(f"step {step}"):
                found.append(interface.train_step(model, batch(step, name), context))
        else:
            found.append(interface.train_step(model, batch(step, name), context))
        engine.version = step + 1
    return found


def ppo_steps(actor: Any, critic: Any) -> list[dict[str, float]]:
    """Five steps of an actor and a critic; the statistics of both train calls of each."""
    policy = PolicyGradientInterface(PPO)
    values = CriticInterface(PPO)
    found = []

    def together(engine: Any, what: str) -> contextlib.AbstractContextManager[Any]:
        return (
            engine.ranks.together(what)
            if isinstance(engine.ranks, GroupRanks)
            else contextlib.nullcontext()
        )

    for step in range(len(GROUPS)):
        given = batch(step)
        context = CallContext(step, 1000 + step, SPEC, Path())
        actor.version = critic.version = step
        with together(critic, f"critic_inf {step}"):
            given = given.update(values.inference(Model("critic", critic, None), given, context)[0])
        with together(actor, f"actor_train {step}"):
            of_actor = policy.train_step(Model("actor", actor, None), given, context)
        with together(critic, f"critic_train {step}"):
            of_critic = values.train_step(Model("critic", critic, None), given, context)
        actor.version = critic.version = step + 1
        found.append({**of_actor, **{f"critic/{name}": value for name, value in of_critic.items()}})
    return found


def ppo_on_ranks(
    world: TorchWorld, rank: int, size: int, parallel: Parallel
) -> list[dict[str, float]]:
    """The same of a rank, which is given the whole batch."""
    actor = engine_on(world, size, parallel, tiny_model())
    return ppo_steps(actor, engine_on(world, size, parallel, ValueModel(tiny_model())))


def scores(engine: Any) -> list[float]:
    """Log-probabilities of a batch."""
    return engine.logprobs(batch(0), temperature=0.8, mb_spec=SPEC).tolist()


def tokens(engine: Any) -> list[list[int]]:
    """What the engine generates, greedily."""
    requests = [GenRequest(i, [3 + i, 5, 7]) for i in range(3)]
    outputs = engine.generator().generate(
        requests, GenConfig(max_new_tokens=6, temperature=0.0), stop_ids=[2], seed=1
    )
    return [output.token_ids for output in outputs]


def on_ranks(
    world: TorchWorld, rank: int, size: int, parallel: Parallel, name: str, tied: bool
) -> Mapping[str, Any]:
    """Five steps on ranks, and what the model says then."""
    engine = engine_on(world, size, parallel, tiny_model(tied))
    found: dict[str, Any] = {"stats": steps(engine, name, range(5))}
    with engine.ranks.together("scores"):
        found["scores"] = scores(engine)
        if parallel.fsdp > 1:
            engine.gather(here=rank != 1)
    if rank != 1 or parallel.fsdp == 1:
        found["tokens"] = tokens(engine)
        found["weights"] = {name: tensor.tolist() for name, tensor in engine.weights().items()}
    else:
        try:
            engine.generator()
        except RuntimeError as error:
            found["refused"] = str(error)
    return found


def released_on_ranks(world: TorchWorld, rank: int, size: int) -> Mapping[str, Any]:
    """Whole weights that are released before they are used, while they are, and after that."""
    engine = engine_on(world, size, Parallel(fsdp=size), tiny_model())
    found: dict[str, Any] = {}
    for number in range(2):
        with engine.ranks.together(f"whole weights {number}"):
            engine.gather()
        engine.release_generation()  # for another call, which came in between
        found[f"tokens {number}"] = [tokens(engine), tokens(engine)]
        found[f"names {number}"] = len(engine.weights())
        with engine.ranks.together(f"scores {number}"):
            engine.release_generation()
            scores(engine)
        found[f"refused {number}"] = []
        for use in (engine.generator, engine.weights):
            try:
                use()
            except WeightsNotGathered as error:
                found[f"refused {number}"].append(str(error))
    return found


def saved_by(
    world: TorchWorld, rank: int, size: int, parallel: Parallel, folder: Path
) -> list[str]:
    """Train two steps, score a batch and save; the files of this rank."""
    engine = engine_on(world, size, parallel, tiny_model())
    steps(engine, "grpo", range(2))
    with engine.ranks.together("scores"):
        scores(engine)
    folder.mkdir(exist_ok=True)
    return [path.name for path in engine.save_checkpoint(folder)]


def loaded_by(
    world: TorchWorld, rank: int, size: int, parallel: Parallel, folders: Sequence[Path]
) -> list[Any]:
    """Load each folder and go on from there: the statistics of the next step."""
    engine = engine_on(world, size, parallel, tiny_model())
    found = []
    for folder in folders:
        engine.load_checkpoint(folder)
        found.append((engine.version, steps(engine, "grpo", [2])[0]))
    return found


def loaded_by_another(
    world: TorchWorld, rank: int, size: int, parallel: Parallel, folder: Path
) -> None:
    """Load a folder into a model of another architecture."""
    engine_on(world, size, parallel, tiny_model(tied=False)).load_checkpoint(folder)


def copies_that_differ(world: TorchWorld, rank: int, size: int) -> list[str]:
    """What is said where every rank but the first has another weight."""
    model = tiny_model()
    if rank:
        with torch.no_grad():
            model.model.norm.weight[3] += 1
    try:
        engine_on(world, size, Parallel(dp=size), model)
    except RuntimeError as error:
        return [type(error).__name__, str(error)]
    return []
