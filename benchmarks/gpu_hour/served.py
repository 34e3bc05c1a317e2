"""A vLLM server beside the trainer: its log-probabilities, and new weights while it generates."""

from __future__ import annotations

import contextlib
import copy
import queue
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.gpu_hour.models import (
    build_model,
    choose_device,
    describe_shape,
    make_config,
    make_sample,
    save_for_server,
)
from benchmarks.gpu_hour.recording import Check, CheckFailed, Recorder, Setting
from benchmarks.gpu_hour.versions import describe_missing_vllm
from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.api.sample import MicroBatchSpec
from realhf.backends.training.torch_engine import TorchEngine
from realhf.backends.vllm.generation import VllmGenerator
from realhf.backends.vllm.server import VllmOptions, VllmServer
from realhf.base.tensor_digest import digest_tensors

_REQUESTS = 64
_PROMPT = 48
_NEW = 64
_LONG = 400
"""Tokens of the requests that are in play while weights change."""
_IN_FLIGHT = 16
"""Number of these."""
_UPDATES = 5
_MAX_LENGTH = 1024
_CACHE_BYTES = 2 << 30
_START_S = 240.0
_REQUEST_S = 240.0
_TOLERANCE = 2.5
"""The server's distance from exact arithmetic may be this many times that of the trainer in
bf16 ..."""
_SLACK = 0.002
"""... and this more."""
_CERTAIN = -0.2
"""Mean log-probability of a model that is too sure of its tokens to be compared."""
_SPEC = MicroBatchSpec(1, 4096)


@dataclass(frozen=True)
class Scored:
    """Distances between log-probabilities of the same tokens, each the mean of their absolute
    differences."""

    mean: float
    """Server and trainer."""
    p99: float
    """99th percentile of that difference, instead of the mean."""
    server_to_exact: float
    """Server and the trainer's model in fp32."""
    trainer_to_exact: float
    """Trainer and its model in fp32."""
    tokens: int
    """Number of tokens."""


class Trainer:
    """The trainer's model in bf16, in a folder for servers as well, and in fp32 to compare with."""

    def __init__(self, setting: Setting) -> None:
        device = choose_device(setting)
        self.name = describe_shape(setting)
        self.folder = setting.folder / "model"
        if setting.model is not None:
            self.name = setting.model.name
            self.folder = setting.model
            model: Any = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.bfloat16)
            model = model.eval().to(device)
        else:
            model = build_model(make_config(setting), device, torch.bfloat16)
            save_for_server(model, self.folder)
        # An engine names its attention in its model's configuration.
        config = copy.deepcopy(model.config)
        self.engine = TorchEngine(model, None, optimizer=None)
        with torch.device(device):
            exact: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self._exact = TorchEngine(exact, None, optimizer=None)
        self.vocabulary = int(model.config.vocab_size)
        self._version = 0

    def weights(self) -> dict[str, Tensor]:
        """Return the current weights."""
        return self.engine.weights()

    def change(self) -> None:
        """Change all weights a little, as a step does."""
        self._version += 1
        g = torch.Generator(self.engine.model.device).manual_seed(self._version)
        with torch.no_grad():
            for parameter in self.engine.model.parameters():
                noise = torch.empty_like(parameter).normal_(generator=g)
                parameter.mul_(1 + 0.02 * noise)

    def score(self, outputs: Mapping[int, GenOutput], prompts: Tensor) -> Scored:
        """Compare the log-probabilities that a server gave with this model's."""
        news = torch.tensor([outputs[row].token_ids for row in range(len(prompts))])
        served = torch.tensor([outputs[row].logprobs for row in range(len(prompts))])
        sample = make_sample(torch.cat([prompts, news], 1), prompts.shape[1], 1)

        def scores(engine: TorchEngine) -> Tensor:
            packed = engine.logprobs(sample, temperature=1.0, mb_spec=_SPEC).cpu().float()
            return packed.view(len(prompts), -1)[:, -news.shape[1] :]

        own = scores(self.engine)
        self._exact.model.load_state_dict(self.engine.model.state_dict())
        exact = scores(self._exact)
        off = (served - own).abs()
        return Scored(
            float(off.mean()),
            float(off.flatten().quantile(0.99)),
            float((served - exact).abs().mean()),
            float((own - exact).abs().mean()),
            news.numel(),
        )


class Client:
    """Requests to a server, whose outputs are collected by slot."""

    def __init__(self, generator: VllmGenerator) -> None:
        self.generator = generator
        self._done: queue.Queue[tuple[int, GenOutput | Exception]] = queue.Queue()

    def submit(self, slot: int, tokens: list[int], count: int) -> None:
        """Ask for ``count`` tokens; slot and seed are the same."""
        self.generator.submit(
            GenRequest(slot, tokens, seed=slot),
            GenConfig(max_new_tokens=count),
            (),
            lambda output: self._done.put((slot, output)),
        )

    @property
    def ready(self) -> bool:
        """Whether an output waits to be taken."""
        return not self._done.empty()

    def take(self) -> tuple[int, GenOutput]:
        """Wait for an output. Raises its error."""
        slot, output = self._done.get(timeout=_REQUEST_S)
        if isinstance(output, Exception):
            raise output
        return slot, output

    def sample(self, prompts: Tensor, count: int) -> dict[int, GenOutput]:
        """Return ``count`` tokens for each prompt."""
        for row, tokens in enumerate(prompts.tolist()):
            self.submit(row, tokens, count)
        outputs = dict(self.take() for _ in range(len(prompts)))
        if any(len(output.token_ids) != count for output in outputs.values()):
            raise CheckFailed("the server ended requests before they had all of their tokens")
        return outputs


def check_served(record: Recorder, setting: Setting) -> None:
    """Start servers one after the other, compare log-probabilities, and update weights."""
    if setting.vllm is None:
        record.skip("a vLLM server", describe_missing_vllm(setting))
        return
    with record.check("a model to serve", needed=True) as check:
        trainer = Trainer(setting)
        check.say(f"{trainer.name}, bfloat16", model=trainer.name)
    g = torch.Generator().manual_seed(7)
    prompts = torch.randint(3, trainer.vocabulary, (_REQUESTS, _PROMPT), generator=g)
    options = VllmOptions(
        dtype="bfloat16",
        max_model_len=_MAX_LENGTH,
        kv_cache_bytes=_CACHE_BYTES if setting.cuda else None,
        cuda=setting.cuda,
    )
    with _serve(record, setting, trainer, "fp32 logits", options) as client:
        _compare(record, trainer, client, prompts, "fp32 logits")
        _update(record, trainer, client, prompts)
    if setting.model is not None:
        trainer = Trainer(setting)  # servers start with the weights of the folder
    else:
        save_for_server(trainer.engine.model, trainer.folder)
    without = replace(options, arguments=("--hf-overrides", "{}"))
    with _serve(record, setting, trainer, "bf16 logits", without) as client:
        _compare(record, trainer, client, prompts, "bf16 logits", judged=False)
    if not setting.cuda:
        record.skip_on_cpu("Model Runner V1 beside V2", "V2 needs Triton, so the servers had V1")
        return
    with _serve(record, setting, trainer, "runner V1", replace(options, runner="v1")) as client:
        _compare(record, trainer, client, prompts, "runner V1")


@contextlib.contextmanager
def _serve(
    record: Recorder, setting: Setting, trainer: Trainer, name: str, options: VllmOptions
) -> Iterator[Client]:
    """Context manager that starts a server and yields a client for it."""
    assert setting.vllm is not None
    log = setting.folder / "vllm" / f"{name.replace(' ', '_')}.log"
    with contextlib.ExitStack() as stack:
        with record.check(f"a server starts, {name}", needed=True) as check:
            server = VllmServer(trainer.folder, executable=setting.vllm, log=log, options=options)
            stack.callback(server.stop)
            server.wait_until_up(_START_S if setting.cuda else 5 * _START_S)
            generator = VllmGenerator(server.url, version=0)
            stack.callback(generator.close)
            known = generator.describe_server()
            told = {
                key: str(known[key])
                for key in ("vllm", "torch", "runner", "dtype", "head_dtype")
                if key in known
            }
            way = "CUDA IPC" if generator._common_gpus else "host memory"
            check.say(
                ", ".join(f"{key} {value}" for key, value in told.items())
                + f"; weights through {way}",
                weights_through=way,
                **told,
            )
        yield Client(generator)


def _compare(
    record: Recorder,
    trainer: Trainer,
    client: Client,
    prompts: Tensor,
    name: str,
    *,
    judged: bool = True,
) -> None:
    """Sample seeded requests and compare their log-probabilities with the trainer's."""
    with record.check(f"log-probabilities, {name}") as check:
        start_s = time.monotonic()
        outputs = client.sample(prompts, _NEW)
        rate = len(prompts) * _NEW / (time.monotonic() - start_s)
        drawn = [value for output in outputs.values() for value in output.logprobs]
        certainty = sum(drawn) / len(drawn)
        if certainty > _CERTAIN:
            raise CheckFailed(
                f"tokens have a log-probability of {certainty:.2g} on average: a model without "
                "doubts shows no differences"
            )
        scored = trainer.score(outputs, prompts)
        figures = {"rate_tokens_per_s": rate, "mean_logprob": certainty}
        _say_scored(check, scored, judged=judged, **figures)


def _say_scored(check: Check, scored: Scored, *, judged: bool, **figures: float) -> None:
    check.say(
        f"|dlogp| of server and trainer: mean {scored.mean:.2g}, p99 {scored.p99:.2g}; from fp32: "
        f"server {scored.server_to_exact:.2g}, trainer {scored.trainer_to_exact:.2g}",
        mean=scored.mean,
        p99=scored.p99,
        server_to_fp32=scored.server_to_exact,
        trainer_to_fp32=scored.trainer_to_exact,
        tokens=scored.tokens,
        **figures,
    )
    limit = _TOLERANCE * scored.trainer_to_exact + _SLACK
    if judged and not scored.server_to_exact <= limit:
        raise CheckFailed(
            f"the server's log-probabilities are {scored.server_to_exact:.2g} from fp32 on "
            f"average, the trainer's {scored.trainer_to_exact:.2g}: at most {limit:.2g} is rounding"
        )


def _update(record: Recorder, trainer: Trainer, client: Client, prompts: Tensor) -> None:
    """Update weights while the server generates, and then with a wrong tensor."""
    generator = client.generator
    with record.check("weights change under load", needed=True) as check:
        outputs, pauses, seconds = _update_under_load(trainer, client, prompts)
        versions = [output.versions for output in outputs]
        if any(row != sorted(row) or len(row) != _LONG for row in versions):
            raise CheckFailed("a request has lost tokens, or has tokens of old weights after new")
        mixed = sum(len({*row}) > 1 for row in versions)
        if not mixed:
            raise CheckFailed("no request has tokens of two versions: it was not under load")
        check.say(
            f"{_UPDATES} updates in {_spread(seconds, 's')}, pauses {_spread(pauses, 'ms')}; all "
            f"{len(outputs)} requests go on, {mixed} with tokens of several versions; digests are "
            "the trainer's",
            pauses_ms=pauses,
            updates_s=seconds,
            requests=len(outputs),
            mixed_requests=mixed,
        )
    with record.check("log-probabilities after updates") as check:
        few = prompts[: _REQUESTS // 4]
        scored = trainer.score(client.sample(few, _NEW), few)
        _say_scored(check, scored, judged=True)
    with record.check("a wrong tensor is found") as check:
        weights = trainer.weights()
        name = sorted(name for name in weights if name.endswith("k_proj.weight"))[-1]
        spoilt = {**weights, name: weights[name].clone()}
        spoilt[name][-1, -1] += 0.5
        generator.load_weights(_UPDATES + 1, spoilt)
        wrong = _find_wrong(generator, weights)
        if wrong != [name]:
            raise CheckFailed(f"one number of {name} was wrong, and the digests blame {wrong}")
        try:
            generator.load_weights(_UPDATES + 2, {**weights, name: weights[name][1:]})
        except ValueError as error:
            check.say(f"by its digest: {name}; by its shape: {error}")
        else:
            raise CheckFailed(f"{name} of a wrong shape was accepted")


def _update_under_load(
    trainer: Trainer, client: Client, prompts: Tensor
) -> tuple[list[GenOutput], list[float], list[float]]:
    """Update weights ``_UPDATES`` times while requests are always in play. Return the outputs, the
    milliseconds that generation paused, and the seconds of each update."""
    rows = prompts.tolist()
    outputs: list[GenOutput] = []
    pauses: list[float] = []
    seconds: list[float] = []
    for slot in range(_IN_FLIGHT):
        client.submit(slot, rows[slot], _LONG)
    submitted = _IN_FLIGHT
    for version in range(1, _UPDATES + 1):
        time.sleep(0.3)
        trainer.change()
        weights = trainer.weights()
        start_s = time.monotonic()
        client.generator.load_weights(version, weights)
        seconds.append(time.monotonic() - start_s)
        pauses.append(client.generator.stats()["weight_pause_ms"])
        if wrong := _find_wrong(client.generator, weights):
            raise CheckFailed(f"version {version}: the server does not hold {', '.join(wrong[:3])}")
        while len(outputs) < submitted and client.ready:
            outputs.append(client.take()[1])
            client.submit(submitted, rows[submitted % len(rows)], _LONG)
            submitted += 1
    outputs += [client.take()[1] for _ in range(submitted - len(outputs))]
    return outputs, pauses, seconds


def _find_wrong(generator: VllmGenerator, weights: Mapping[str, Tensor]) -> list[str]:
    """Return the tensors whose digests the server reports otherwise. Raises CheckFailed if it
    reports few."""
    held = generator.weight_digests([*weights])
    proven = {name: tensor.digest for name, tensor in held.items() if tensor.proven}
    if len(proven) <= len(weights) // 2:
        raise CheckFailed(f"the server has digests of {len(proven)} of {len(weights)} tensors")
    expected = digest_tensors({name: weights[name] for name in proven})
    return [name for name, digest in proven.items() if digest != expected[name]]


def _spread(values: list[float], unit: str) -> str:
    return f"{min(values):.3g} to {max(values):.3g} {unit}"
