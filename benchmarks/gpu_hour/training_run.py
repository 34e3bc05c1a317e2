"""An asynchronous run with vLLM whose server is killed once, and whose launcher once, after which
the same command goes on."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil

from benchmarks.gpu_hour.recording import CheckFailed, Recorder, Setting
from benchmarks.gpu_hour.versions import describe_missing_vllm
from benchmarks.harness.killed_run import LAUNCHER, KilledRun, Stuck
from realhf.api.config import BuiltinModelConfig
from realhf.backends.builtin_policy import build_model, train_tokenizer

_STEPS = 6
_KILLED_AFTER = 1
"""Step after which the server is killed."""
_STOPPED_AFTER = 3
"""Step after which the launcher is killed."""
_STUCK_S = 150.0
"""Seconds within which a step must end, with the start of a server."""
_METRICS = (
    "time/step",
    "mismatch/abs_mean",
    "mismatch/abs_max",
    "staleness/max",
    "generation/weight_pause_ms",
    "device/actor_train/utilisation",
    "device/actor_train/peak_bytes",
)
"""Metrics of the last step (docs/metrics.md) that are figures, too, where they are there."""
_OPTIONS = (
    "rollout.max_turns=1",
    "rollout.max_total_tokens=256",
    "gen.max_new_tokens=24",
    "exp_ctrl.ckpt_freq_steps=1",
)


def check_run(record: Recorder, setting: Setting) -> None:
    """Play the run."""
    if setting.vllm is None:
        record.skip("a run with vLLM", describe_missing_vllm(setting))
        return
    limit_s = _STUCK_S if setting.cuda else 5 * _STUCK_S
    with record.check("a model for the run", needed=True) as check:
        policy = setting.folder / "policy"
        check.say(_make_policy(policy, setting))
    runs = setting.folder / "runs"
    runs.mkdir(exist_ok=True)
    # With a GPU the launcher takes vLLM and bf16 by itself.
    chosen = () if setting.cuda else ("engine.name=vllm",)
    run = KilledRun(
        runs,
        "hour",
        policy,
        *_OPTIONS,
        *chosen,
        f"engine.vllm_executable={setting.vllm}",
        steps=_STEPS,
        environment="countdown",
    )
    try:
        with record.check("the first step", needed=True) as check:
            run.start()
            _wait_for_step(run, _KILLED_AFTER, limit_s)
            check.say(f"experiment=grpo_async env=countdown, {_describe_engine(run)}")
        with record.check("its server is killed", needed=True) as check:
            start_s = time.monotonic()
            _kill_server(run)
            _wait_for_step(run, _STOPPED_AFTER, limit_s)
            check.say(
                f"kill -9; step {_STOPPED_AFTER} follows after {time.monotonic() - start_s:.0f} s; "
                f"{'; '.join(run.deaths()) or 'no worker died'}",
                recovery_s=time.monotonic() - start_s,
            )
        with record.check("its launcher is killed", needed=True) as check:
            run.stop(LAUNCHER, limit_s)
            if not run.kills[LAUNCHER]:
                raise CheckFailed("the run ended before its launcher was killed")
            verdict = run.verdict(run.wait(limit_s))
            if verdict.problems:
                raise CheckFailed("; ".join(verdict.problems))
            rows = run.rows()
            check.say(
                f"the same command goes on to step {_STEPS}; no sample was lost or trained twice",
                steps=len(rows),
                stop_s=verdict.stop_s[LAUNCHER],
                **{name: rows[-1][name] for name in _METRICS if name in rows[-1]},
            )
    finally:
        run.end()


def _make_policy(folder: Path, setting: Setting) -> str:
    """Write a policy with random weights and its tokenizer; return what it is."""
    width = 512 if setting.cuda else 64
    config = BuiltinModelConfig(
        vocab_size=512 if setting.cuda else 320,
        hidden_size=width,
        num_layers=8 if setting.cuda else 2,
        num_heads=width // (64 if setting.cuda else 32),
        intermediate_size=2 * width,
        max_positions=2048,
    )
    texts = [f"{a} + {b} = {a + b}" for a in range(20) for b in range(20)]
    tokenizer = train_tokenizer(texts, config.vocab_size, config.max_positions)
    model = build_model(
        config, config.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id, seed=1
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million random weights"


def _wait_for_step(run: KilledRun, step: int, limit_s: float) -> None:
    """Wait until the run has finished a step. Raises Stuck if it ends before, or takes longer than
    the limit."""
    deadline = time.monotonic() + limit_s
    while step not in run.finished_steps():
        if not run.running:
            raise Stuck(f"the run ended before step {step}: {run.tail()}")
        if time.monotonic() > deadline:
            raise Stuck(f"no step {step} within {limit_s:g} s: {run.tail()}")
        run.processes()
        time.sleep(0.05)


def _kill_server(run: KilledRun) -> None:
    """Send SIGKILL to the run's vLLM server. Raises CheckFailed if there is none."""
    for process in run.processes():
        try:
            words = process.cmdline()
            if "serve" in words and any(word.endswith("/vllm") for word in words[:2]):
                process.send_signal(signal.SIGKILL)
                return
        except psutil.NoSuchProcess:
            continue
    raise CheckFailed("the run has no vLLM server")


def _describe_engine(run: KilledRun) -> str:
    """Return how the run's server describes itself."""
    found = sorted((run.folder / "logs").glob("vllm-*.json"))
    known = json.loads(found[0].read_text(encoding="utf-8")) if found else {}
    told = [
        f"{name} {known[name]}"
        for name in ("vllm", "runner", "dtype", "head_dtype")
        if name in known
    ]
    return ", ".join(told) or "vLLM, which does not describe itself"
