"""What the parts of a plan do on a tiny policy: calls that score and train on a fixed batch,
episodes of a first step, drawn tasks, and the files of jobs. Equal parts of several experiments are
computed once.

A part whose plan differs and whose result is equal to the bit reads an option without acting on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from realhf.algorithms.inference import LogprobInterface
from realhf.api.config import BuiltinModelConfig
from realhf.api.experiment import (
    ExperimentSpec,
    InterfaceType,
    JobSpec,
    MFCDef,
    ModelSpec,
    RolloutOptions,
)
from realhf.api.keys import TURN_IDS
from realhf.api.model import CallContext, Model
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.builtin_policy import build_builtin_policy
from realhf.backends.training.torch_backend import TorchBackend, ValueModel
from realhf.base.dataclass_json import to_json_value
from realhf.data.chat_dataset import ChatDataset, ChatDatasetSource
from realhf.dataflow.model_host import call_interfaces
from realhf.env.curriculum import TaskSource
from realhf.rollout import demonstrations
from realhf.rollout.interface import EnvRolloutInterface

LOSS = "loss"
BATCH = "batch"
FILE = "file"
TINY = BuiltinModelConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
GROUPS = [[12, 20, 15, 9, 14], [10, 18, 14, 11, 13], [8, 8, 16, 9, 9], [11, 7, 12, 10, 10]]
REWARDS = [
    1.0,
    0.0,
    25.0,
    0.5,
    0.5,
    1.0,
    0.0,
    1.0,
    -0.5,
    -0.5,
    0.0,
    1.0,
    0.0,
    1.0,
    1.0,
    0.5,
    0.5,
    0.5,
    0.5,
    0.5,
]
OUTCOME = [0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
ROWS = [0, 1, 2, 3, 3] * len(GROUPS)
"""The last two sequences of each group are rows of one rollout."""
STEPS = 3
DAMAGED_STEPS = 4
"""Train steps at the beginning, before that of the end, and steps after it with weights that are no
numbers."""
ROWS_OF_DATA = 40
TASKS = 2
DRAWS = 4
UNTIMED = ("seconds", "per_second")
Part = Callable[[ExperimentSpec], dict[str, Any]]
Key = Callable[[ExperimentSpec], Any]
"""What the result of a part follows from, as JSON can hold it."""


class Difference(NamedTuple):
    """By what an effect was seen: its kind, and the first thing that differs."""

    kind: str
    detail: str


class ActingParts:
    """Computes in ``folder`` what plans do. Results are kept by the part of the plan that they
    follow from."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._folder = folder
        self.policy = folder / "policy"
        self.reward_model = folder / "reward_model"
        transformers_logging.disable_progress_bar()
        build_builtin_policy(None, self.policy, TINY, seed=0)
        self._results: dict[str, dict[str, Any]] = {}
        self._files: dict[str, Any] = {}
        self._talks = folder / "talks.jsonl"
        self._write_talks()
        self.computed = 0
        self._make_reward_model()
        self._sample = self._fixed_batch()

    def difference(self, plain: ExperimentSpec, other: ExperimentSpec) -> Difference | None:
        """What the second plan does otherwise than the first, None where nothing is seen."""
        for kind, key, compute in self._parts():
            keys = [
                json.dumps([compute.__name__, key(spec)], sort_keys=True) for spec in (plain, other)
            ]
            if keys[0] == keys[1]:
                continue
            one, two = [
                self._result(name, compute, spec)
                for name, spec in zip(keys, (plain, other), strict=True)
            ]
            if one != two:
                return Difference(kind, first_difference(one, two))
        return None

    def again(self, spec: ExperimentSpec) -> bool:
        """Whether every part that was computed for a plan gives the same, to the bit, a second
        time."""
        for _, key, compute in self._parts():
            name = json.dumps([compute.__name__, key(spec)], sort_keys=True)
            if name in self._results and compute(spec) != self._results[name]:
                return False
        return True

    def _parts(self) -> Iterator[tuple[str, Key, Part]]:
        yield LOSS, self._training, self.trains
        yield LOSS, self._warm_training, self.trains_before
        yield BATCH, self._drawing, self.draws
        yield BATCH, self._episodes, self.plays
        yield BATCH, self._evaluation, self.evaluates
        yield FILE, self._jobs, self.makes

    def _result(self, name: str, compute: Part, spec: ExperimentSpec) -> dict[str, Any]:
        if name not in self._results:
            self.computed += 1
            self._results[name] = compute(spec)
        return self._results[name]

    # ---- calls that score and train

    def _training(self, spec: ExperimentSpec) -> dict[str, Any]:
        models = {role: placeless(model) for role, model in spec.models.items()}
        calls = [
            {**to_json_value(call), "timeout_s": 0, "n_seqs": 0} for call in scoring_calls(spec)
        ]
        return {"models": models, "calls": calls, "steps": spec.total_train_steps}

    def trains(self, spec: ExperimentSpec) -> dict[str, Any]:
        """Statistics, outputs and weights of the calls of some steps on the fixed batch."""
        calls = scoring_calls(spec)
        models = self._models(spec, {call.model_role for call in calls})
        interfaces = call_interfaces(calls)
        found: dict[str, Any] = {}
        sample = self._sample
        steps = [*range(STEPS), max(STEPS, spec.total_train_steps - 1)]
        steps += [steps[-1] + 1 + number for number in range(DAMAGED_STEPS)]
        whole = len(steps) - DAMAGED_STEPS
        for number, step in enumerate(steps):
            if number == whole:
                trained = {
                    role: model for role, model in models.items() if spec.models[role].trainable
                }
                found["weights"] = {
                    role: digest(model.engine.weights()) for role, model in trained.items()
                }
                damage(trained.values())
            sample = self._sample if number < whole else sample
            for call in calls:
                if number >= whole and call.interface_type is not InterfaceType.TRAIN_STEP:
                    continue
                # asks a server; the batch has what one would say
                if call.interface == "served_logprob":
                    continue
                model = models[call.model_role]
                interface = interfaces[call.name][1]
                model.engine.version = step
                context = self._context(step, call.mb_spec)
                saved = [0]
                with seeded(step), counted_saves(saved):
                    inputs = sample.select([key for key in call_keys(call) if key in sample.keys])
                    result = getattr(interface, call.interface_type.value)(model, inputs, context)
                outputs, stats = parted(result)
                if number >= whole:
                    found[f"{call.name}@{step}"] = {"stop": stats.get("stop", "")}
                    continue
                entry = {name: plain(value) for name, value in stats.items()}
                if outputs is not None:
                    entry |= {key: digest({key: outputs[key]}) for key in sorted(outputs.keys)}
                    sample = sample.select(sample.keys - outputs.keys).update(outputs)
                found[f"{call.name}@{step}"] = {**untimed(entry), "saved_for_backward": saved[0]}
        return found

    def _models(self, spec: ExperimentSpec, roles: set[str]) -> dict[str, Model]:
        found: dict[str, Model] = {}
        for role, model in sorted(spec.models.items(), key=lambda item: bool(item[1].base_of)):
            if role not in roles and role != "actor":
                continue
            if model.base_of:
                engine: Any = found[model.base_of].engine.base()  # pyright: ignore[reportAttributeAccessIssue]
            else:
                local = replace(
                    model,
                    path=str(self._path_of(model)),
                    backend="torch",
                    compile=False,
                    tokens_of="",
                )
                engine = TorchBackend("cpu").build(
                    local, seed=1, total_train_steps=spec.total_train_steps
                )
            found[role] = Model(
                role, engine, engine.tokenizer, model.chat_template_kwargs, model.tool_parser
            )
        return found

    def _path_of(self, model: ModelSpec) -> Path:
        return (
            self.reward_model
            if model.role == "reward_model" and not model.trainable
            else self.policy
        )

    def _context(self, step: int, mb_spec: MicroBatchSpec) -> CallContext:
        return CallContext(step, step, mb_spec, self._folder)

    def _warm_training(self, spec: ExperimentSpec) -> list[dict[str, Any]]:
        return [self._training(before) for before in spec.before]

    def trains_before(self, spec: ExperimentSpec) -> dict[str, Any]:
        """What the experiments before this one do on the fixed batch."""
        return {before.name: self.trains(before) for before in spec.before}

    # ---- what is drawn and played

    def _drawing(self, spec: ExperimentSpec) -> list[Any]:
        found = []
        for every in (*spec.before, spec):
            args = {name: value for name, value in every.source.args.items() if name != "path"}
            rows = every.source.dataset_args
            rows = rows and {**rows, "path": ""}
            tokens = {
                role: [m.chat_template_kwargs, m.tool_parser] for role, m in every.models.items()
            }
            found.append(
                [every.source.name, args, rows, every.n_seqs, every.seed, to_json_value(tokens)]
            )
        return found

    def draws(self, spec: ExperimentSpec) -> dict[str, Any]:
        """The first batches of tasks, or of rows of the data set."""
        found: dict[str, Any] = {}
        for every in (*spec.before, spec):
            batches: list[Any] = []
            source: Any
            if every.source.name == "tasks":
                source = TaskSource(seed=every.seed, **every.source.args)
            elif every.source.name == "jsonl_chat":
                source = ChatDatasetSource(seed=every.seed, path=str(self._talks))
            else:
                continue
            for _ in range(DRAWS):
                items = source.next_batch(every.n_seqs)
                batches.append([[item.id, to_json_value(dict(item.metadata))] for item in items])
                if every.source.name == "tasks":
                    source.record(list(results_of(items)))
            found[every.name] = {"batches": batches}
            if every.source.dataset_args is not None:
                tokenizer = self._models(every, set())["actor"].tokenizer
                args = {**every.source.dataset_args, "path": str(self._talks)}
                rows = ChatDataset(tokenizer=tokenizer, **args)
                sample = rows.load(["a", "b", "c"], [0, 1, 2])
                found[every.name]["tokens"] = digest(
                    {key: sample[key] for key in sorted(sample.keys)}
                )
        return found

    def _episodes(self, spec: ExperimentSpec) -> Any:
        played = playing_call(spec)
        if played is None:
            return None
        actor = spec.models[played.model_role]
        return [
            self._options(played),
            to_json_value(actor.engine),
            to_json_value(actor.chat_template_kwargs),
            actor.tool_parser,
            actor.dtype,
            played.resample,
            sorted(played.output_keys),
        ]

    def _options(self, played: MFCDef) -> dict[str, Any]:
        """The arguments of the call that plays, in an environment without a server."""
        args = dict(played.interface_args)
        if args["environment"] == "aws":
            args |= {"environment": "files", "environment_options": {"groups": ["one_call"]}}
        return args

    def plays(self, spec: ExperimentSpec) -> dict[str, Any]:
        """The episodes of the first step: their tokens, rewards and statistics."""
        played = playing_call(spec)
        assert played is not None
        model = self._models(spec, {played.model_role})[played.model_role]
        interface = EnvRolloutInterface(**self._options(played))
        try:
            with seeded(0):
                sample, stats = interface.generate(
                    model, self._tasks(self._options(played)), self._context(0, MicroBatchSpec())
                )
        finally:
            interface.close()
        keys = {key: digest({key: sample[key]}) for key in sorted(sample.keys)}
        return untimed(
            {"tokens": stats["generated_tokens"], **keys, **{k: plain(v) for k, v in stats.items()}}
        )

    def _tasks(self, options: Mapping[str, Any]) -> SequenceSample:
        items = TaskSource(
            1, options["environment"], options["environment_options"], "uniform"
        ).next_batch(TASKS)
        names = sorted({name for item in items for name in item.metadata})
        metadata = {name: [item.metadata[name] for item in items] for name in names}
        return SequenceSample.from_tensors([item.id for item in items], {}, {}, metadata)

    def _evaluation(self, spec: ExperimentSpec) -> Any:
        wanted = spec.evaluation
        return wanted and [to_json_value(wanted.args), to_json_value(wanted.interim_args)]

    def evaluates(self, spec: ExperimentSpec) -> dict[str, Any]:
        """The reports of an evaluation in the middle and of the last one, by episodes of one
        turn."""
        wanted = spec.evaluation
        assert wanted is not None
        model = self._models(spec, {"actor"})["actor"]
        options = RolloutOptions(
            "files", 1, 16, {"groups": ["one_call"]}, max_turns=1, max_total_tokens=900
        )
        options = replace(options, gen=replace(options.gen, max_new_tokens=1))
        interface = EnvRolloutInterface(**options.to_args())
        try:
            with seeded(0):
                context = self._context(0, MicroBatchSpec())
                reports = [
                    interface.evaluate(model, args or wanted.args, context)
                    for args in (wanted.interim_args, wanted.args)
                ]
        finally:
            interface.close()
        return {"interim": to_json_value(reports[0]), "last": to_json_value(reports[1])}

    # ---- files

    def _jobs(self, spec: ExperimentSpec) -> Any:
        jobs = [job for every in (*spec.before, spec) for job in every.jobs]
        return [self._job(job) for job in jobs]

    def _job(self, job: JobSpec) -> Any:
        return [job.module, [text for text in job.argv if not text.startswith("/")]]

    def makes(self, spec: ExperimentSpec) -> dict[str, Any]:
        """The files that the jobs before a run make; of demonstrations on a simulator, their
        command."""
        jobs = [job for every in (*spec.before, spec) for job in every.jobs]
        for job in jobs:
            if (name := json.dumps(self._job(job))) not in self._files:
                self._files[name] = self._made(
                    job, self._folder / f"made{len(self._files)}-{job.name}"
                )
        return {job.name: self._files[json.dumps(self._job(job))] for job in jobs}

    def _made(self, job: JobSpec, out: Path) -> Any:
        if job.module == "realhf.backends.builtin_policy":
            given = dict(zip(job.argv[::2], job.argv[1::2], strict=True))
            names = {name: int(given[f"--{name.replace('_', '-')}"]) for name in asdict(TINY)}
            taught = self._talks if "--demonstrations" in given else None
            build_builtin_policy(taught, out, BuiltinModelConfig(**names), int(given["--seed"]))
            return {
                file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                for file in sorted(out.iterdir())
            }
        if job.module == "realhf.rollout.demonstrations" and "files" in job.argv:
            argv = [str(out) if text == "{artifact}" else text for text in job.argv]
            said = io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                code = demonstrations.main(argv)
            if code != 0:
                raise RuntimeError(said.getvalue().strip().splitlines()[-1])
            return hashlib.sha256(out.read_bytes()).hexdigest()
        return None

    # ---- the fixed batch

    def _write_talks(self) -> None:
        rows = []
        for number in range(ROWS_OF_DATA):
            said = {"role": "assistant", "content": f"cat file{number}"}
            rows.append({"messages": [{"role": "user", "content": f"Read file {number}."}, said]})
        self._talks.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def _make_reward_model(self) -> None:
        engine = TorchBackend("cpu").build(
            ModelSpec("actor", str(self.policy)), seed=0, total_train_steps=1
        )
        model = ValueModel(engine.model)
        with torch.no_grad():
            model.value_head.weight.copy_(torch.randn_like(model.value_head.weight))
        model.save_pretrained(self.reward_model)
        engine.tokenizer.save_pretrained(self.reward_model)

    def _fixed_batch(self) -> SequenceSample:
        """Groups of random tokens, the second half of each sequence sampled in two turns. Sampler,
        reference and others said something near what the policy says, some by more than a clip
        range; one rollout failed, one was cut off, and one reward lies beyond the bound of
        rewards."""
        generator = torch.Generator().manual_seed(0)
        lengths = [n for group in GROUPS for n in group]
        n = sum(lengths)
        ids = [f"s{number}@0" for number in range(len(GROUPS))]
        tokens = torch.randint(10, 200, (n,), generator=generator)
        mask = torch.tensor([place >= size // 2 for size in lengths for place in range(size)])
        turn = torch.tensor(
            [turn_of(place, size) for size in lengths for place in range(size)]
        ).int()
        sample = SequenceSample.from_tensors(
            ids, {"packed_input_ids": tokens}, {"packed_input_ids": GROUPS}
        )
        model = self._models(ExperimentSpecs.plain, {"actor"})["actor"]
        scored, _ = parted(
            LogprobInterface("own").inference(model, sample, self._context(0, MicroBatchSpec()))
        )
        assert scored is not None
        sampled = torch.cat([part[1:] for part in mask.split(lengths)])

        def near(spread: float) -> torch.Tensor:
            noise = torch.randn(n - len(lengths), generator=generator)
            return (scored["own"] + spread * noise) * sampled

        failed = torch.tensor(OUTCOME) != 0
        versions = torch.where(sampled, torch.arange(len(sampled)) % 2 - 1, -1).int()
        shifted = [[size - 1 for size in group] for group in GROUPS]
        one = [[1] * len(group) for group in GROUPS]
        two = [[2] * len(group) for group in GROUPS]
        told = [[size // 2 + 3 for size in group] for group in GROUPS]
        keys: dict[str, tuple[torch.Tensor, Any]] = {
            "packed_input_ids": (tokens, GROUPS),
            "loss_mask": (mask, GROUPS),
            "prompt_mask": (~mask, GROUPS),
            TURN_IDS: (turn, GROUPS),
            "packed_logprobs": (near(0.6), shifted),
            "packed_ref_logprobs": (near(0.5), shifted),
            "teacher_logprobs": (near(0.5), shifted),
            "packed_versions": (versions, shifted),
            "env_rewards": (torch.tensor(REWARDS).masked_fill(failed, math.nan), one),
            "outcome": (torch.tensor(OUTCOME, dtype=torch.uint8), one),
            "seq_no_eos_mask": (torch.arange(len(lengths)) % 7 == 1, one),
            "rollout_index": (torch.tensor(ROWS).int(), one),
            "turn_rewards": (torch.rand(2 * len(lengths), generator=generator), two),
            "turn_states": (torch.arange(2 * len(lengths)) % 2, two),
            "feedback_prompt_ids": (
                torch.randint(10, 200, (sum(map(sum, told)),), generator=generator),
                told,
            ),
        }
        return SequenceSample.from_tensors(
            ids,
            {key: tensor for key, (tensor, _) in keys.items()},
            {key: sizes for key, (_, sizes) in keys.items()},
        )


class ExperimentSpecs:
    """The plan of a role that only scores."""

    plain = ExperimentSpec("scores", {"actor": ModelSpec("actor", "")}, (), None, 1, 1, 1, Path())  # type: ignore[arg-type]


def placeless(model: ModelSpec) -> dict[str, Any]:
    """A role without where it lies and which processes hold it: a path is only told from another
    path."""
    told = to_json_value(model)
    return {
        **told,
        "path": "",
        "tokens_of": "",
        "workers": [],
        "parallel": {},
        "engine": {},
        "backend": "",
        "compile": False,
    }


def scoring_calls(spec: ExperimentSpec) -> list[MFCDef]:
    """Calls of the graph and of rollout workers that do not play, those that train last."""
    every = [*(spec.rollout.calls if spec.rollout else ()), *spec.mfcs]
    kept = [call for call in every if call.interface_type is not InterfaceType.GENERATE]
    return sorted(kept, key=lambda call: call.interface_type is InterfaceType.TRAIN_STEP)


def playing_call(spec: ExperimentSpec) -> MFCDef | None:
    """The call that plays episodes, with what rollout workers are told of them."""
    if spec.rollout is not None:
        call = spec.rollout.calls[0]
        return replace(call, interface_args=spec.rollout.episodes.to_args())
    return next((call for call in spec.mfcs if call.interface == "env_rollout"), None)


def call_keys(call: MFCDef) -> list[str]:
    """The keys that a call reads."""
    return [*call.input_keys, *call.optional_input_keys]


def turn_of(place: int, size: int) -> int:
    """The turn of a token: none in the first half, then the first and the second."""
    return -1 if place < size // 2 else int(place >= 3 * size // 4)


def results_of(items: Sequence[Any]) -> Iterator[Any]:
    """What a batch of tasks came to, the same for each task whenever it is drawn."""
    from realhf.api.source import SampleResult

    for number, item in enumerate(items):
        hard = int(hashlib.sha256(str(item.metadata["template"]).encode()).hexdigest(), 16) % 4
        achieved = [member < hard for member in range(4)]
        rewards = [float(won) + 0.1 * (number % 3) for won in achieved]
        yield SampleResult(id=item.id, metadata=item.metadata, rewards=rewards, achieved=achieved)


def parted(result: Any) -> tuple[SequenceSample | None, Mapping[str, Any]]:
    """What a call answered as (outputs, statistics)."""
    if isinstance(result, SequenceSample):
        return result, {}
    if isinstance(result, tuple):
        return result[0], result[1]
    return None, result.stats | {"grad_norm": result.grad_norm} if hasattr(
        result, "stats"
    ) else result


def plain(value: Any) -> Any:
    """A statistic that can be compared: a number that is none counts as equal to itself."""
    return repr(value)


def untimed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics without those of clocks."""
    return {name: value for name, value in entry.items() if not name.endswith(UNTIMED)}


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names, types, shapes and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        held = tensor.detach().cpu().contiguous()
        found.update(f"{name} {held.dtype} {tuple(held.shape)}".encode())
        found.update(held.view(torch.uint8).numpy().tobytes() if held.numel() else b"")
    return found.hexdigest()[:16]


def first_difference(one: Any, two: Any, where: str = "") -> str:
    """The first entry of two results that differs, with both values."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for name in [*one, *(name for name in two if name not in one)]:
            if one.get(name) != two.get(name):
                return first_difference(
                    one.get(name), two.get(name), f"{where}/{name}" if where else str(name)
                )
    texts = [str(value) for value in (one, two)]
    return f"{where}: {texts[0][:40]} -> {texts[1][:40]}"


def damage(models: Any) -> None:
    """Make no number of every weight, so that each update is left out."""
    with torch.no_grad():
        for model in models:
            for tensor in model.engine.weights().values():
                if tensor.is_floating_point():
                    tensor.fill_(math.nan)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Begin as a call of a worker does."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    yield


@contextlib.contextmanager
def counted_saves(count: list[int]) -> Iterator[None]:
    """Count the tensors that are kept for the backward pass."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        count[0] += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
