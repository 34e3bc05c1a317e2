"""``critic_inf`` and ``critic_train`` alone on a worker: values of the states in which tokens were
sampled, and one step on their returns, against the same in plain torch."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from realhf.base.hf_config import VALUE_HEAD_FILE
from tests.mfc.graph_calls import CRITIC_STEP, DISCOUNT, KL_REWARD, LAMBDA, TRAIN_OUTCOME
from tests.mfc.mfc_bench import as_lists, random_tokens, replaced, sequences, shortened

pytestmark = pytest.mark.slow

GROUPS = [[9, 30, 2], [17, 5]]


class PlainCritic(torch.nn.Module):
    """The decoder of a folder with a linear head, in float64."""

    def __init__(self, folder):
        super().__init__()
        self.decoder = AutoModel.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
        self.value_head = torch.nn.Linear(self.decoder.config.hidden_size, 1, dtype=torch.float64)
        self.value_head.load_state_dict(
            {k: v.double() for k, v in load_file(folder / VALUE_HEAD_FILE).items()}
        )

    def forward(self, ids):
        """The value of the state before each token but the first, (L-1,)."""
        return self.value_head(self.decoder(input_ids=ids[None]).last_hidden_state[0, :-1])[:, 0]


def test_values_are_the_head_on_a_plain_forward_of_the_decoder(bench, critic_folder):
    sample = random_tokens(GROUPS)
    outputs, stats = bench.run("critic_inf", sample)
    assert (
        as_lists(outputs.seqlens) == {"values": [[8, 29, 1], [16, 4]]}
        and outputs["values"].dtype == torch.float32
    )
    critic = PlainCritic(critic_folder)
    with torch.no_grad():
        rows = [critic(ids) for ids in sequences(sample, "packed_input_ids")]
    masks = [mask[1:] for mask in sequences(sample, "loss_mask")]
    expected = torch.cat(
        [torch.where(mask, row, 0.0) for mask, row in zip(masks, rows, strict=True)]
    ).float()
    assert expected[expected != 0].std() > 0.5
    torch.testing.assert_close(outputs["values"], expected, atol=1e-4, rtol=1e-4)
    assert stats["n_tokens"] == sum(map(sum, GROUPS))


def returns_of(sample):
    """Advantage plus value of each sampled token of the rollouts that did not fail, by the
    recursion of Schulman et al. 2016. The reward of a token is minus the KL term, and at the last
    one also the episode's."""
    rows = zip(
        *(
            sequences(sample, key)
            for key in ("loss_mask", "packed_logprobs", "packed_ref_logprobs", "values")
        ),
        sample["rewards"].tolist(),
        TRAIN_OUTCOME,
        strict=True,
    )
    found = []
    for mask, behaviour, reference, values, reward, code in rows:
        if code:
            continue
        sampled = mask[1:]
        earned = (-KL_REWARD * (behaviour - reference)[sampled].double()).tolist()
        earned[-1] += reward
        value = values[sampled].tolist()
        advantage = following = 0.0
        own = []
        for place in reversed(range(len(value))):
            delta = earned[place] + DISCOUNT * following - value[place]
            advantage = delta + DISCOUNT * LAMBDA * advantage
            following = value[place]
            own.insert(0, advantage + value[place])
        found.append(own)
    return found


def one_plain_step(critic, sample):
    """Half the mean squared distance to the normalised returns, and a step of AdamW on it."""
    returns = returns_of(sample)
    flat = torch.tensor([value for own in returns for value in own], dtype=torch.float64)
    mean = float(flat.mean())
    std = float(flat.std(correction=0))
    valid = [row for row, code in enumerate(TRAIN_OUTCOME) if code == 0]
    ids = [sequences(sample, "packed_input_ids")[row] for row in valid]
    masks = [sequences(sample, "loss_mask")[row][1:] for row in valid]
    predicted = torch.cat([critic(row)[mask] for row, mask in zip(ids, masks, strict=True)])
    loss = ((predicted - (flat - mean) / std) ** 2 / 2).mean()
    betas = (CRITIC_STEP.beta1, CRITIC_STEP.beta2)
    adamw = torch.optim.AdamW(
        critic.parameters(),
        lr=CRITIC_STEP.lr,
        betas=betas,
        eps=CRITIC_STEP.eps,
        weight_decay=CRITIC_STEP.weight_decay,
    )
    loss.backward()
    norm = math.sqrt(
        sum(float(p.grad.square().sum()) for p in critic.parameters() if p.grad is not None)
    )
    adamw.step()
    return {
        "loss": float(loss.detach()),
        "grad_norm": norm,
        "return_mean": mean,
        "return_std": std,
        "return_running_mean": mean,
        "return_running_std": std,
        "n_values": float(len(flat)),
    }


def test_a_step_is_that_of_plain_torch(fresh, critic_folder, train_sample):
    sample = train_sample()
    outputs, stats = fresh.run("critic_train", sample)
    assert outputs is None and (stats["n_updates"], stats["skipped"]) == (1, 0)
    plain = PlainCritic(critic_folder)
    expected = one_plain_step(plain, sample)
    assert {name: stats[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert stats["lr"] == pytest.approx(CRITIC_STEP.lr)
    trained = PlainCritic(fresh.export("critic", "critic trained"))
    before = PlainCritic(critic_folder)
    stepped = dict(plain.named_parameters())
    moved = 0.0
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(parameter, stepped[name], atol=2e-5, rtol=0, msg=name)
        moved = max(moved, float((parameter - before.get_parameter(name)).detach().abs().max()))
    assert moved > 50 * 2e-5


def test_values_after_a_step_are_in_units_of_the_returns_that_it_saw(
    fresh, critic_folder, train_sample
):
    sample = train_sample(1)
    stats = fresh.run("critic_train", sample).stats
    outputs = fresh.run("critic_inf", sample, step=1).outputs
    critic = PlainCritic(fresh.export("critic", "critic in units"))
    with torch.no_grad():
        rows = [critic(ids) for ids in sequences(sample, "packed_input_ids")]
    masks = [mask[1:] for mask in sequences(sample, "loss_mask")]
    said = torch.cat([row[mask] for row, mask in zip(rows, masks, strict=True)])
    expected = (said * stats["return_running_std"] + stats["return_running_mean"]).float()
    sampled = outputs["values"][torch.cat(masks)]
    torch.testing.assert_close(sampled, expected, atol=1e-4, rtol=1e-4)


def test_the_actor_does_not_move_with_the_critic(fresh, train_sample):
    sample = random_tokens(GROUPS, seed=1)
    before = fresh.run("actor_inf", sample).outputs["proximal_logprobs"]
    fresh.run("critic_train", train_sample())
    assert torch.equal(fresh.run("actor_inf", sample).outputs["proximal_logprobs"], before)


def test_samples_of_several_owners_are_joined(fresh, train_sample):
    sample = random_tokens(GROUPS, seed=2)
    of_one = fresh.run("critic_inf", sample, n_owners=1).outputs["values"]
    assert torch.equal(fresh.run("critic_inf", sample).outputs["values"], of_one)
    stats = fresh.run("critic_train", train_sample(2)).stats
    fresh.restore()
    assert fresh.run("critic_train", train_sample(2), n_owners=1).stats == stats


@pytest.mark.parametrize(
    ("call", "spoil", "words"),
    [
        (
            "critic_inf",
            lambda s: shortened(s, "loss_mask"),
            "loss_mask of sample 'g1@3' has 10 entries",
        ),
        (
            "critic_inf",
            lambda s: replaced(s, "packed_input_ids", s["packed_input_ids"] + 400),
            "critic has the tokens",
        ),
        (
            "critic_train",
            lambda s: replaced(s, "values", s["values"] * torch.nan),
            "a value is not finite",
        ),
        (
            "critic_train",
            lambda s: replaced(s, "rewards", s["rewards"] * torch.nan),
            "reward that is not finite",
        ),
        ("critic_train", lambda s: shortened(s, "values"), "values of sample 'g1@3' has 9 entries"),
    ],
    ids=["a short mask", "unknown tokens", "values of NaN", "rewards of NaN", "too few values"],
)
def test_a_bad_input_is_one_error_and_the_next_call_is_served(
    fresh, train_sample, call, spoil, words
):
    assert words in fresh.error_of(call, spoil(train_sample(3)))
    stats = fresh.run(call, train_sample(3)).stats
    assert stats.get("n_tokens", 1) and stats.get("skipped", 0) == 0


@pytest.mark.parametrize(("call", "key"), [("critic_inf", "loss_mask"), ("critic_train", "values")])
def test_a_key_that_its_owner_does_not_have_is_named(bench, train_sample, call, key):
    assert f"does not hold {key} of g" in bench.error_of(call, train_sample(4), lost=key)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", ["critic_inf", "critic_train"])
def test_a_worker_that_is_killed_in_the_call_is_named(bench, train_sample, call):
    assert "'model_worker/1' died" in bench.error_of_kill(call, train_sample(5))
