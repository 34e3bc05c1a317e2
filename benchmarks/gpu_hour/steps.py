"""Train steps of GRPO: seconds, utilisation, and peak memory beside the plan and the trace of
``mode=check trace=true``."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_hour.models import (
    build_model,
    choose_device,
    describe_shape,
    make_config,
    make_sample,
)
from benchmarks.gpu_hour.recording import CheckFailed, Recorder, Setting
from benchmarks.harness.gpu_figures import Shape, timed, train_operations
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.api.config import OptimizerConfig
from realhf.api.model import CallContext, Model
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.device_use import peak_of
from realhf.backends.training.torch_engine import TorchEngine
from realhf.base.installation import IMPORT_ROOT

GIB = 2**30
_GROUP = 8
_MICRO_BATCHES = 2
"""Full micro-batches of a step, as in the trace."""
_TRACE_S = 120.0
_ROW = re.compile(r"^  (?P<name>actor_train|plan)\s+(?P<cells>[\d.\s]+)$")
_KERNELS = re.compile(r"actor_train: (?P<kernels>\d+) kernels and (?P<waits>\d+) waits")
_MARGIN = 0.1
"""Fraction by which a step may take more than the plan."""


@dataclass(frozen=True)
class StepShape:
    """Shape of a step's batch."""

    budget: int
    """Positions of a micro-batch."""
    prompt: int
    """Tokens of a prompt, which a group of sequences shares."""
    new: int
    """Tokens that each sequence has of its own."""

    @property
    def groups(self) -> int:
        """Number of groups."""
        return -(-_MICRO_BATCHES * self.budget // (self.prompt + _GROUP * self.new))

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return _GROUP * self.groups

    def operations(self, shape: Shape) -> float:
        """Return the operations of a train step in which prompts are computed once."""
        length = self.prompt + self.new
        whole = train_operations(shape, [length] * self.rows, self.rows * self.new)
        shared = [self.prompt] * (self.rows - self.groups)
        return whole - train_operations(shape, shared, 0)

    def draw(self, vocabulary: int) -> SequenceSample:
        """Return random rollouts."""
        g = torch.Generator().manual_seed(self.budget)
        stems = torch.randint(3, vocabulary, (self.groups, self.prompt), generator=g)
        tails = torch.randint(3, vocabulary, (self.rows, self.new), generator=g)
        ids = torch.cat([stems.repeat_interleave(_GROUP, 0), tails], 1)
        predicted = (self.rows, self.prompt + self.new - 1)
        return make_sample(
            ids,
            self.prompt,
            _GROUP,
            packed_logprobs=-torch.rand(predicted, generator=g),
            packed_versions=torch.zeros(predicted, dtype=torch.int32),
            rewards=torch.rand(self.rows, generator=g),
        )


@dataclass(frozen=True)
class Expected:
    """What ``mode=check trace=true`` says about the step."""

    plan_gib: float
    """Memory by the plan."""
    traced_gib: float
    """Peak of the step on a pretended GPU."""
    kernels: int
    """Kernels of a micro-batch."""
    waits: int
    """Waits of the host for the GPU in a micro-batch."""


def check_steps(record: Recorder, setting: Setting) -> None:
    """Take steps with small and large micro-batches."""
    shapes = (
        [StepShape(4096, 512, 512), StepShape(16_384, 512, 512)]
        if setting.cuda
        else [StepShape(256, 32, 32), StepShape(1024, 32, 32)]
    )
    config = make_config(setting)
    folder = setting.folder / "shape"
    config.save_pretrained(folder)
    # A trace reads shapes only: of tokenizer and weights it looks whether they are there.
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").touch()
    traces = [_start_trace(setting, folder, shape) for shape in shapes]
    try:
        device = choose_device(setting)
        with record.check("a model to train", needed=True) as check:
            model = build_model(config, device, torch.bfloat16)
            options = OptimizerConfig(lr=1e-6)
            engine = TorchEngine(model, None, optimizer=options, total_train_steps=1000)
            rows = "without padding" if engine._forward.packs else "padded"
            check.say(
                f"{describe_shape(setting)}, bfloat16{f', rows {rows}' if setting.cuda else ''}"
            )
        for shape, trace in zip(shapes, traces, strict=True):
            _check_step(record, setting, engine, shape, trace)
    finally:
        for trace in traces:
            trace.kill()
            trace.wait()


def _start_trace(setting: Setting, folder: Path, shape: StepShape) -> subprocess.Popen[str]:
    """Start the trace of a step like ``shape``, in another process."""
    command = [
        *(sys.executable, "-m", "realhf.launch", "experiment=grpo_async", "env=countdown"),
        *("mode=check", "trace=true", "engine.name=embedded", "ppo.kl_loss_coef=0"),
        *(f"actor.path={folder}", f"fileroot={setting.folder / 'runs'}"),
        f"rollout.max_total_tokens={shape.prompt + shape.new}",
        *(f"mb_spec.max_tokens_per_mb={shape.budget}", f"ppo.group_size={_GROUP}"),
    ]
    return subprocess.Popen(
        command, cwd=IMPORT_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _read_trace(setting: Setting, trace: subprocess.Popen[str]) -> Expected:
    """Wait for a trace and return what it says. Raises CheckFailed."""
    text, _ = trace.communicate(timeout=_TRACE_S if setting.cuda else 5 * _TRACE_S)
    print(text, flush=True)
    rows = {
        found["name"]: float(found["cells"].split()[-1])
        for line in text.splitlines()
        if (found := _ROW.match(line))
    }
    kernels = _KERNELS.search(text)
    if trace.returncode or len(rows) != 2 or kernels is None:
        last = (text.strip().splitlines() or ["no output"])[-1]
        raise CheckFailed(f"mode=check trace=true ended with {trace.returncode}: {last}")
    return Expected(
        rows["plan"], rows["actor_train"], int(kernels["kernels"]), int(kernels["waits"])
    )


def _check_step(
    record: Recorder,
    setting: Setting,
    engine: TorchEngine,
    shape: StepShape,
    trace: subprocess.Popen[str],
) -> None:
    """Take steps of one shape, if they fit."""
    name = f"steps, micro-batches of {shape.budget}"
    expected: Expected | None = None
    with record.check(f"their trace, {shape.budget}") as check:
        expected = _read_trace(setting, trace)
        check.say(
            f"plan {expected.plan_gib:.2f} GiB, traced {expected.traced_gib:.2f} GiB, "
            f"{expected.kernels} kernels and {expected.waits} waits in a micro-batch",
            plan_gib=expected.plan_gib,
            traced_gib=expected.traced_gib,
            kernels=expected.kernels,
            waits=expected.waits,
        )
    if setting.cuda and expected is not None:
        # What the model takes already is in the trace as well.
        free = (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()) / GIB
        if expected.traced_gib > 0.95 * free:
            reason = f"they take {expected.traced_gib:.1f} GiB by their trace, {free:.1f} are free"
            record.skip(name, reason)
            return
    with record.check(name) as check:
        result, figures = _measure(setting, engine, shape)
        if expected is not None and "peak_gib" in figures:
            result += f"; plan {expected.plan_gib:.2f}, traced {expected.traced_gib:.2f}"
        check.say(result, **figures)
        peak = figures.get("peak_gib", 0.0)
        if expected is not None and peak > (1 + _MARGIN) * expected.plan_gib:
            raise CheckFailed(
                f"{result}: the plan is {100 * (1 - expected.plan_gib / peak):.0f} % too low, so "
                "mode=check may accept what does not fit"
            )


def _measure(
    setting: Setting, engine: TorchEngine, shape: StepShape
) -> tuple[str, dict[str, float]]:
    """Take steps and return what they took, as text and figures."""
    config: Any = engine.model.config
    sample = shape.draw(config.vocab_size)
    train = PolicyGradientInterface({})
    spec = MicroBatchSpec(1, shape.budget)
    actor: Any = engine
    stats: dict[str, float] = {}

    def step() -> None:
        context = CallContext(engine.version, 1, spec, Path())
        stats.update(train.train_step(Model("actor", actor, None), sample, context))
        engine.version += 1

    finish = torch.cuda.synchronize if setting.cuda else lambda: None
    step()  # with it, the optimizer's moments are allocated
    if setting.cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(step, rounds=3 if setting.cuda else 1, warm_up=0, finish=finish)
    if not stats["n_updates"]:
        raise CheckFailed("the steps made no update: a gradient is not finite")
    operations = shape.operations(Shape.of(config))
    tokens = shape.rows * (shape.prompt + shape.new)
    figures = {
        "step_s": seconds.median,
        "rate_tokens_per_s": seconds.rate(tokens),
        "operations": operations,
        "grad_norm": stats["grad_norm"],
    }
    result = f"{seconds.median:.3g} s, {seconds.rate(tokens):,.0f} tokens/s"
    if not setting.cuda:
        return f"{result}; peak memory and utilisation are not on a CPU", figures
    figures["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    figures["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    known = peak_of(torch.cuda.get_device_name())
    if known:
        figures["utilisation"] = seconds.rate(operations) / known
        result += f", {100 * figures['utilisation']:.0f} % of the data sheet's operations"
    return f"{result}, peak {figures['peak_gib']:.2f} GiB", figures
