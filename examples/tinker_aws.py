"""A training loop of its own on the AWS environment, by the client ``tinker``: groups of episodes of several commands.

    train-api --model realhf/aws/training/policy                                # docs/tinker.md
    python examples/tinker_aws.py http://127.0.0.1:8800 20

The environment server is started here, and ends with the loop. The second argument is the number of steps.
"""

from __future__ import annotations

import asyncio
import sys

from realhf.api.environment import TRAIN, AssistantMessage, Task
from realhf.aws.environment import SYSTEM_PROMPT, AwsEnvironment, AwsOptions, AwsTaskSet
from realhf.aws.server.program import EnvServerProcess

try:
    import tinker
    from tinker import types
except ModuleNotFoundError:
    sys.exit("run this with a Python that has the client: pip install -e '.[tinker]'")

TASKS, GROUP, TURNS = 2, 8, 4
Said = tuple[list[int], types.SampledSequence]


async def episode(env: AwsEnvironment, task: Task, sampler: tinker.SamplingClient) -> tuple[list[Said], float]:
    """Play once; return what was said to which prompt, and the sum of rewards."""
    tokenizer, said, total = sampler.get_tokenizer(), list[Said](), 0.0
    opening = await env.reset(task.payload, seed=task.seed)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, *opening.messages]
    for _ in range(TURNS):
        ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        answer = await sampler.sample(types.ModelInput.from_ints(ids), 1, types.SamplingParams(max_tokens=64))
        said.append((ids, answer.sequences[0]))
        text = tokenizer.decode(
            answer.sequences[0].tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        turn = await env.step(AssistantMessage(text, text=text))
        total += turn.reward or 0.0
        if turn.done:
            break
        messages = [*messages, {"role": "assistant", "content": text}, *turn.messages]
    return said, total


async def train(url: str, steps: int, env_url: str) -> list[float]:
    """Train, print the mean return of every step, and return them."""
    address = {"base_url": url, "api_key": "tml-an-example"}
    name = (await tinker.RestClient(**address).get_server_capabilities()).supported_models[0].model_name
    client = await tinker.ServiceClient(**address).create_lora_training_client(name, rank=16, seed=1)
    tasks, environments = AwsTaskSet(AwsOptions(), TRAIN), [AwsEnvironment(env_url) for _ in range(TASKS * GROUP)]
    templates, returns = [*tasks.group_of], []
    for step in range(steps):
        sampler = await client.save_weights_and_get_sampling_client()
        chosen = [templates[(TASKS * step + i) % len(templates)] for i in range(TASKS)]
        drawn = [tasks.instantiate(template, seed=step) for template in chosen for _ in range(GROUP)]
        seated = zip(environments, drawn, strict=True)
        played = await asyncio.gather(*(episode(env, task, sampler) for env, task in seated))
        returns.append(sum(total for _, total in played) / len(played))
        print(f"step {step + 1}: mean return {returns[-1]:.3f}")
        data = []
        for number, (said, total) in enumerate(played):
            group = [other for _, other in played[number - number % GROUP :][:GROUP]]
            for ids, each in said if total != sum(group) / GROUP else ():
                advantage = (total - sum(group) / GROUP) / len(played)
                padding, whole = [0.0] * (len(ids) - 1), types.ModelInput.from_ints([*ids, *each.tokens[:-1]])
                inputs = {"target_tokens": [*ids[1:], *each.tokens], "logprobs": [*padding, *each.logprobs]}
                inputs["advantages"] = [*padding, *[advantage] * len(each.tokens)]
                data.append(types.Datum(model_input=whole, loss_fn_inputs=inputs))
        if data:
            passed = client.forward_backward(data, "ppo")
            await client.optim_step(types.AdamParams(learning_rate=1e-3))
            await passed
    await asyncio.gather(*(env.close() for env in environments))
    return returns


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        sys.exit("give the address that train-api printed, and the number of steps")
    with EnvServerProcess(TASKS * GROUP) as server:
        asyncio.run(train(sys.argv[1], int(sys.argv[2]), server.url))
