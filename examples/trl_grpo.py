"""TRL's GRPOTrainer on our environment: TRL holds the model and the loss, the environment plays whole groups at once.

    make test-trl                                    # makes .venv-trl
    .venv/bin/python examples/first_run.py           # makes a policy to start from; any Hugging Face folder will do
    .venv/bin/aws-env --pool-size 8
    PYTHONPATH=. .venv-trl/bin/python examples/trl_grpo.py runs/grpo_aws/first_run/policy

A row of the dataset names a task; `PoolRollouts` plays it in as many sessions as a group has members, token by token
with the trainer's own model. For a model that calls tools, `GRPOTrainer(environment_factory=AwsToolEnv)` does the same
(`realhf.aws.client.trl_tool`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile

try:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed here: run this with a Python that has TRL, .venv-trl of make test-trl")

from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool
from realhf.aws.client.trl_rollout import PoolRollouts, episode_reward


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a policy on AWS tasks with TRL.")
    parser.add_argument("policy", help="a folder in Hugging Face format, with a tokenizer and its chat template")
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="where aws-env serves")
    parser.add_argument("--group-size", type=int, default=8, help="episodes of a task, and sessions of aws-env")
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 2, 3, 4], help="numbers of the tasks")
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    """Train, and print the mean reward of each step."""
    given = options()
    rows = [{"task_id": given.tasks[i % len(given.tasks)], "seed": i} for i in range(given.steps)]
    prompts = [[{"role": "user", "content": json.dumps(row)}] for row in rows]
    pool = MultiTurnEnvPool(given.url, given.group_size, max_turns=4, max_total_tokens=640, turn_tokens=40)
    with pool, tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            max_steps=given.steps,
            num_generations=given.group_size,
            per_device_train_batch_size=given.group_size,
            max_completion_length=640,
            learning_rate=1e-4,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
        )
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(given.policy),
            [episode_reward],
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            args=config,
            processing_class=AutoTokenizer.from_pretrained(given.policy),
            rollout_func=PoolRollouts(pool),
        )
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: reward {entry['rewards/episode_reward/mean']:.2f}, loss {entry['loss']:.4f}")


if __name__ == "__main__":
    main()
