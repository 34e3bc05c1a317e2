"""A training loop of its own, by the client ``tinker``: demonstrations of countdown, then its rewards.

    train-api --model models/smollm2_135m                                       # docs/tinker.md
    python examples/tinker_countdown.py http://127.0.0.1:8800 40

The second argument is the number of steps of each kind.
"""

from __future__ import annotations

import random
import sys

from realhf.api.environment import SOLUTION, TRAIN
from realhf.environments.countdown import CountdownTasks, demonstration, reward

try:
    import tinker
    from tinker import types
except ModuleNotFoundError:
    sys.exit("run this with a Python that has the client: pip install -e '.[tinker]'")

KEY, PROMPTS, GROUP, LEVEL = "tml-an-example", 8, 8, "two-small"


def datum(prompt: list[int], said: list[int], **inputs: list[float]) -> types.Datum:
    """A sequence to train on: numbers for what was said, and 0 for the prompt."""
    padded = {name: [0.0] * (len(prompt) - 1) + values for name, values in inputs.items()}
    whole = types.ModelInput.from_ints([*prompt, *said[:-1]])
    return types.Datum(model_input=whole, loss_fn_inputs={"target_tokens": [*prompt[1:], *said], **padded})


def train(url: str, steps: int) -> list[float]:
    """Train, print what is learned, and return the mean reward of every step."""
    service, rest = (kind(base_url=url, api_key=KEY) for kind in (tinker.ServiceClient, tinker.RestClient))
    name = rest.get_server_capabilities().result().supported_models[0].model_name
    client = service.create_lora_training_client(name, rank=16, seed=1).result()
    tokenizer, tasks = client.get_tokenizer(), CountdownTasks([LEVEL], TRAIN)

    def ids(text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

    def step(data: list[types.Datum], loss: str, rate: float) -> float:
        passed, stepped = client.forward_backward(data, loss), client.optim_step(types.AdamParams(learning_rate=rate))
        stepped.result()
        return passed.result().metrics["loss:sum"]

    for number in range(steps):
        data = []
        for seed in range(PROMPTS * number, PROMPTS * (number + 1)):
            shown = demonstration(tasks, LEVEL, seed, SOLUTION, random.Random(seed))
            prompt, said = ids(shown.task.payload["prompt"]), tokenizer.encode(shown.turns[0], add_special_tokens=False)
            said.append(tokenizer.eos_token_id)
            data.append(datum(prompt, said, weights=[1.0 / PROMPTS] * len(said)))
        print(f"demonstrations {number + 1}: loss {step(data, 'cross_entropy', 1e-3):.3f}")
    rewards = []
    for number in range(steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        rows = [tasks.instantiate(LEVEL, 10_000 + PROMPTS * number + i).payload for i in range(PROMPTS)]
        prompts, params = [ids(row["prompt"]) for row in rows], types.SamplingParams(max_tokens=24)
        sent = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
        data, earned = [], []
        for row, prompt, answer in zip(rows, prompts, sent, strict=True):
            said = answer.result().sequences
            texts = [
                tokenizer.decode(each.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                for each in said
            ]
            own = [reward(text, **row) for text in texts]
            mean, earned = sum(own) / GROUP, earned + own
            for each, value in zip(said, own, strict=True):
                if value != mean:
                    advantages = [(value - mean) / (PROMPTS * GROUP)] * len(each.tokens)
                    data.append(datum(prompt, each.tokens, logprobs=each.logprobs, advantages=advantages))
        rewards.append(sum(earned) / len(earned))
        print(f"policy gradient {number + 1}: mean reward {rewards[-1]:.3f}")
        if data:
            step(data, "importance_sampling", 3e-4)
    return rewards


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        sys.exit("give the address that train-api printed, and the number of steps")
    train(sys.argv[1], int(sys.argv[2]))
