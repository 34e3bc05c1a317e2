"""What ``mode=check`` says of machines with 1, 2, 4 and 8 GPUs, through the launcher's own entry:
which engine samples, which GPU is for whom, what its memory holds, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import huggingface_hub.constants
import pytest

from realhf.api.config import ConfigError
from realhf.backends.builtin_policy import train_tokenizer
from realhf.launch import vllm_choice
from realhf.launch.__main__ import main
from realhf.launch.build import build_experiment, find_warnings
from realhf.launch.compose import compose_config
from realhf.scheduler.machine import KNOWN_GPUS, QUERY, Machine, plan_machine
from tests.api.chat.templates import QWEN3 as QWEN3_TEMPLATE
from tests.docs.commands import ROOT, commands_of
from tests.docs.test_commands import launched
from tests.docs.test_recipes import SHAPES
from workers.master_worker import count_gpus

RECIPES = ROOT / "docs" / "recipes.md"
GPU_PAGE = ROOT / "docs" / "gpu.md"
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
QWEN3_8B = SHAPES["Qwen/Qwen3-4B"] | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
SYNC = "experiment=grpo env=countdown model=qwen3_0_6b"
ASYNC = "experiment=grpo_async env=countdown model=qwen3_0_6b"
LARGER = "experiment=grpo env=countdown actor.path=Qwen/Qwen3-0.6B"
"""The same without gradient checkpointing."""
TWO = "actor.workers=[0,1] actor.backend=fsdp2"
FOUR = "actor.workers=[0,1,2,3] actor.backend=fsdp2"


class Plan(NamedTuple):
    """What a check has printed."""

    code: int
    lines: list[str]
    said: list[str]
    """Warnings, notes and errors."""

    @property
    def warnings(self) -> list[str]:
        start = "warning: "
        return [line.removeprefix(start) for line in self.said if line.startswith(start)]

    def line(self, name: str) -> str:
        """The line of this name, without the name; "" if there is none."""
        found = [line for line in self.lines if line.startswith(f"{name}: ")]
        assert len(found) <= 1
        return found[0].removeprefix(f"{name}: ") if found else ""

    @property
    def engine(self) -> str:
        return re.split(r"[ ,]", self.line("samples"))[0]

    @property
    def gpus(self) -> dict[str, list[int]]:
        """GPUs by worker."""
        pairs = re.findall(r"(\w+/\d+) on ((?:\d+(?: and )?)+)", self.line("GPUs"))
        return {name: [int(number) for number in text.split(" and ")] for name, text in pairs}

    @property
    def memory(self) -> dict[tuple[str, str, str], dict[str, float]]:
        """GiB of each part by process, role and device."""
        found = {}
        names = self.line("memory, estimated, GiB").split("  ")
        for line in self.lines:
            if parts := re.fullmatch(r"  (\S.*) (\w+) \(([\w ]+)\): (.*)  = [\d.e+]+", line):
                sizes = map(float, parts[4].split("  "))
                found[parts[1], parts[2], parts[3]] = dict(zip(names, sizes, strict=True))
        return found

    @property
    def devices(self) -> dict[str, tuple[float, float | None]]:
        """GiB in all and GiB free, by device."""
        found = {}
        for line in self.lines:
            if parts := re.match(r"  (GPU \d+|host): ([\d.]+) in all(?:, ([\d.]+) free)?", line):
                found[parts[1]] = (float(parts[2]), float(parts[3]) if parts[3] else None)
        return found


Check = Callable[..., Plan]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the models that the commands name, as far as a check reads them."""
    folder = tmp_path_factory.mktemp("planned")
    real = folder / "models" / "smollm2_135m"
    real.mkdir(parents=True)
    (real / "config.json").write_text(json.dumps(SMOLLM2))
    (real / "model.safetensors").write_bytes(b"")
    tokenizer = train_tokenizer((), 400, 8192)
    tokenizer.chat_template = QWEN3_TEMPLATE
    tokenizer.save_pretrained(real)
    for name, shape in {**SHAPES, "Qwen/Qwen3-8B": QWEN3_8B}.items():
        cached = folder / "hub" / f"models--{name.replace('/', '--')}"
        for path, text in (
            ("refs/main", "abc"),
            ("snapshots/abc/config.json", json.dumps(shape)),
        ):
            (cached / path).parent.mkdir(parents=True)
            (cached / path).write_text(text)
    return folder


@pytest.fixture
def check(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Check:
    """Return a function that checks options on a planned machine. No vLLM is installed here."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(vllm_choice, "IMPORT_ROOT", tmp_path)

    def run(machine: str, *options: str) -> Plan:
        words = [word for text in options for word in shlex.split(text)]
        code = main([*words, "mode=check", *([f"machine={machine}"] if machine else [])])
        out, err = capsys.readouterr()
        return Plan(code, out.splitlines(), err.splitlines())

    return run


def recipes() -> list[str]:
    """The options of every recipe of the page: of its launches, and of its targets of ``make``."""
    makefile = (ROOT / "Makefile").read_text()
    found = []
    for command in commands_of(RECIPES):
        if command.program == "make":
            (target, *_) = command.arguments
            rule = re.search(rf"^{target}: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
            if rule is None or "realhf.launch" not in rule[1]:
                continue
            recipe = rule[1].replace("\\\n", " ").partition("realhf.launch")[2]
            words = re.sub(r"\$\([^)]*\)", "", recipe).split()
            found.append(
                " ".join(word for word in words if not word.startswith(("seed=", "trial_name=")))
            )
        elif (options := launched(command)) is not None:
            found.append(" ".join(f"'{word}'" if "[" in word else word for word in options))
    return list(dict.fromkeys(found))


def trained_alone(recipe: str) -> bool:
    """Whether the policy of a recipe is the built-in one."""
    return "model=" not in recipe and "actor.path=" not in recipe


def test_the_page_has_a_command_for_each_recipe() -> None:
    table = RECIPES.read_text().partition("\n## ")[0]
    _, *rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(recipes()) == len(rows) == 8


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("machine", ["1xH100", "2xH100", "4xH100", "8xH100"])
@pytest.mark.parametrize("recipe", recipes())
def test_every_recipe_is_planned_on_every_machine(check: Check, recipe: str, machine: str) -> None:
    plan = check(machine, recipe)
    assert plan.code == 0
    count = int(machine[0])
    assert plan.line("machine").startswith(f"{count} x NVIDIA H100 80GB HBM3 (79.6 GiB, capability")
    small = trained_alone(recipe)
    assert plan.engine == ("embedded" if small else "vllm")
    dtype = "float32" if small else "bfloat16"
    assert f" in {dtype}" in plan.line("samples") and f" in {dtype}" in plan.line("trains")
    assert plan.warnings == []
    servers = "experiment=grpo_aws_async" in recipe
    if count == 1:
        assert plan.line("GPUs") == "all workers on GPU 0"
    else:
        expected = {"model_worker/0": [0]} | ({"generation/0": [1]} if servers else {})
        assert plan.gpus == expected
        idle = count - 1 - servers
        assert plan.line("GPUs").endswith(")" if idle else "on 1")
        assert (f"idle: {idle} of {count} (" in plan.line("GPUs")) == bool(idle)
    used = {f"GPU {number}" for numbers in plan.gpus.values() for number in numbers} or {"GPU 0"}
    assert {device for _, _, device in plan.memory} == plan.devices.keys()
    assert plan.devices.keys() - {"host"} == used
    check_fits(plan)


def check_fits(plan: Plan) -> None:
    """Each GPU has what is planned for it. Of another machine's host memory nothing is known."""
    for device, (needed, free) in plan.devices.items():
        assert needed > 0
        assert free is None if device == "host" else needed < 79.02 == free


class Layout(NamedTuple):
    """A row of the page's table of layouts."""

    machine: str
    options: str
    engine: str
    trainers: str
    servers: str


def layouts() -> list[Layout]:
    """The rows of the page's table of layouts."""
    table = GPU_PAGE.read_text().partition("| machine | options |")[2].partition("\n\n")[0]
    rows = []
    for line in table.splitlines()[2:]:
        machine, options, engine, trainers, servers = (
            cell.strip() for cell in line.strip("|").split("|")
        )
        (command,) = re.findall("`([^`]+)`", options)
        rows.append(Layout(machine.strip("`"), command, engine, trainers, servers))
    return rows


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", layouts())
def test_usual_layouts_are_planned_as_the_page_says(check: Check, layout: Layout) -> None:
    plan = check(layout.machine, "env=countdown", layout.options)
    assert plan.code == 0 and plan.engine == layout.engine.partition(",")[0]
    expected = ["engine.name=embedded"] * layout.engine.endswith("with a warning")
    assert [line.split(" ")[0] for line in plan.warnings] == expected
    if layout.machine == "cpu":
        assert plan.line("machine") == "no GPU, as planned by machine=cpu"
        assert not plan.line("GPUs") and plan.devices.keys() == {"host"}
        assert plan.devices["host"][1] is None, "of that host nothing is known"
        return
    if layout.machine.startswith("1x"):
        assert plan.line("GPUs") == "all workers on GPU 0" and not plan.gpus
        assert layout.trainers == layout.servers == "0"
    else:
        written = {
            kind: ", ".join(
                "+".join(map(str, numbers))
                for name, numbers in plan.gpus.items()
                if name.startswith(kind)
            )
            for kind in ("model_worker/", "generation/")
        }
        assert [*written.values()] == [layout.trainers, layout.servers]
        assert "idle" not in plan.line("GPUs")
        assert len({number for numbers in plan.gpus.values() for number in numbers}) == int(
            layout.machine[0]
        )
    for process, _, device in plan.memory:
        assert device == "host" or int(device.removeprefix("GPU ")) in plan.gpus.get(process, [0])
    check_fits(plan)
    servers = [
        parts
        for (process, _, _), parts in plan.memory.items()
        if process.startswith(("generation/", "vllm of "))
    ]
    size = 7.49 if "qwen3_4b" in layout.options else 1.11
    share = 2 if "tensor_parallel_size=2" in layout.options else 1
    assert len(servers) == share * len(layout.servers.split(", ") if layout.servers else ())
    assert not plan.line("weights"), "NCCL has to be asked for"
    for parts in servers:
        assert parts["weights"] == pytest.approx(size / share, rel=0.01)
        assert 0.2 < parts["keys, values"] < 70, "what it gets, not what all episodes need at once"


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("machine", "options", "said"),
    [
        (
            "2xH100",
            f"{ASYNC} {TWO}",
            r"allocation.gpus=\[\]: actor trains on 2 workers, .*2 model worker\(s\) and "
            r"1 generation worker\(s\) need 3 GPUs, machine=2xH100 has 2; allocation.gpus with "
            "allocation.share",
        ),
        (
            "8xH100",
            f"{ASYNC} {FOUR} async_rl.n_generation_workers=4 engine.tensor_parallel_size=2",
            r"allocation.gpus=\[\]: .*\(of 2 GPUs each, engine.tensor_parallel_size\) need 12 "
            "GPUs, machine=8xH100 has 8",
        ),
        (
            "1xH100",
            f"{ASYNC} engine.tensor_parallel_size=2",
            "engine.tensor_parallel_size=2: the server needs as many GPUs, machine=1xH100 has 1$",
        ),
        (
            "8xH100",
            f"{SYNC} {FOUR} engine.tensor_parallel_size=2",
            "engine.tensor_parallel_size=2: is an option of vLLM, which serves an actor of several "
            r"workers in asynchronous experiments only \(async_rl.enabled=true\)",
        ),
        (
            "4xH100",
            f"{SYNC} {TWO} engine.name=vllm",
            "engine.name=vllm: a synchronous run serves actor on one worker",
        ),
        (
            "2xH100",
            f"{ASYNC} async_rl.n_generation_workers=3",
            "async_rl.n_generation_workers=3: 3 vLLM servers would share GPU 1, and each takes "
            "what it finds free; start fewer, or give each at most "
            "engine.gpu_memory_utilization=0.3",
        ),
        (
            "1xH100",
            f"{ASYNC} async_rl.n_generation_workers=2 engine.gpu_memory_utilization=0.6",
            "async_rl.n_generation_workers=2: 2 vLLM servers would share GPU 0, and each takes 0.6 "
            r"of its memory \(engine.gpu_memory_utilization\)",
        ),
        (
            "2xH100",
            f"{ASYNC} allocation.gpus=[0,2]",
            r"allocation.gpus=\[0, 2\]: machine=2xH100 has 2 GPUs, so there is no number 2$",
        ),
        (
            "1xT4",
            SYNC,
            "actor.dtype=bfloat16: a GPU of machine=1xT4 has compute capability 7.5, and vLLM "
            "computes in bfloat16 from 8.0; use actor.dtype=float32 or engine.name=embedded",
        ),
        (
            "1xH100",
            f"{SYNC} actor.dtype=float16",
            r"actor.dtype=float16: unknown \(known: float32, bfloat16\)",
        ),
        (
            "cpu",
            f"{SYNC} engine.name=vllm engine.vllm_runner=v2",
            "engine.vllm_runner=v2: Model Runner V2 needs Triton and a GPU, and no GPU is visible",
        ),
        (
            "4xH100",
            f"{ASYNC} {TWO} actor.lora.rank=8",
            "actor.lora.rank=8: backend fsdp2 cuts a model of which all weights train",
        ),
        (
            "4xH100",
            f"{ASYNC} {TWO} actor.optimizer.offload=true",
            "actor.optimizer.offload=true: backend fsdp2 cuts moments over workers",
        ),
        (
            "4xH100",
            f"{ASYNC} {TWO} actor.compile=true",
            "actor.compile=true: backend fsdp2 gathers blocks as it goes and does not compile them",
        ),
        (
            "2xH100",
            f"{SYNC} {TWO} actor.parallel.tp=2",
            "actor.parallel.tp=2: no backend cuts layers",
        ),
        (
            "1xH100",
            f"{SYNC} actor.experts=true engine.name=vllm",
            "actor.experts=true: vLLM keeps a tensor for each expert .*; use engine.name=embedded",
        ),
        (
            "1xH100",
            "experiment=grpo_async env=countdown actor.path=Qwen/Qwen3-4B",
            r"vLLM does not fit next to the trainer of actor on a GPU of 79.6 GiB with 79 free: .* "
            r"to vLLM for weights of 7.49; give it a GPU of its own \(allocation.gpus\), train",
        ),
        (
            "1xH100",
            "experiment=grpo env=countdown actor.path=Qwen/Qwen3-4B engine.name=embedded",
            r"GPU 0 has 79.0 GiB free, and this run is estimated to take \S+, most of it for "
            r"moments of actor \(30\): train adapters \(actor.lora.rank\); or divide it over "
            r"several workers \(actor.backend=fsdp2 actor.workers=\[0,1\]\); or set "
            "actor.optimizer.offload=true; or",
        ),
        (
            "1xL4",
            f"{SYNC} engine.name=embedded mb_spec.max_tokens_per_mb=65536 ppo.kl_loss_coef=0"
            " actor.gradient_checkpointing=false",
            r"GPU 0 has 21.9 GiB free, and this run is estimated to take \S+, most of it for "
            r"activations of actor \(\S+\): set actor.gradient_checkpointing=true; or lower "
            r"mb_spec.max_tokens_per_mb \(to 4096 or more\); or ",
        ),
        (
            "1xL4",
            f"{SYNC} rollout.max_total_tokens=40000 rollout.max_turns=2",
            "rollout.max_total_tokens=40000: keys and values of one episode take 4.27 GiB of GPU "
            "0, and vLLM has .* for them besides its weights of 1.11; lower it, give the server",
        ),
        (
            "1xH100",
            f"{ASYNC} async_rl.weights=nccl",
            "async_rl.weights=nccl: the trainer and the servers share GPU 0, and NCCL needs a GPU",
        ),
        ("8xH900", SYNC, r"machine=8xH900: there is no record of a GPU 'H900' \(known are B200, "),
        ("0xH100", SYNC, "machine=0xH100: plans for 1 to 64 GPUs, and `cpu` for a machine without"),
        (
            "there.csv",
            SYNC,
            "machine=there.csv: neither COUNTxMODEL, such as 8xH100 .*No such file",
        ),
    ],
)
def test_what_a_machine_cannot_do_is_refused_in_one_line(
    check: Check, machine: str, options: str, said: str
) -> None:
    plan = check(machine, options)
    assert plan.code == 2 and plan.lines == []
    (line,) = plan.said
    assert re.match(f"config error: {said}", line), line


@pytest.mark.slow
def test_what_a_machine_does_badly_is_warned_of(check: Check, folder: Path, tmp_path: Path) -> None:
    emulated = check("1xT4", SYNC, "engine.name=embedded")
    assert emulated.code == 0 and emulated.warnings == [
        "actor.dtype=bfloat16: a GPU of machine=1xT4 has compute capability 7.5 and "
        "emulates bfloat16, which GPUs multiply from 8.0 on; rows are padded, and "
        "actor.dtype=float32 is as fast"
    ]
    for size, warned in ((512, True), (100, True), (256, False)):
        model = tmp_path / f"heads-{size}"
        model.mkdir()
        for file in (folder / "models" / "smollm2_135m").iterdir():
            (model / file.name).symlink_to(file)
        (model / "config.json").unlink()
        (model / "config.json").write_text(json.dumps(SMOLLM2 | {"head_dim": size}))
        plan = check("1xH100", f"experiment=grpo env=countdown actor.path={model}")
        assert plan.code == 0 and len(plan.warnings) == warned
        assert all(
            line.startswith(
                f"actor.path={model}: its attention heads have size {size}, and torch's"
            )
            for line in plan.warnings
        )


@pytest.mark.slow
def test_a_model_of_8b_on_two_of_four_gpus_is_refused_on_each(check: Check) -> None:
    """It ended in the second micro-batch of its second step."""
    options = f"experiment=grpo_async env=countdown actor.path=Qwen/Qwen3-8B {TWO}"
    plan = check("4xH100", options, "async_rl.n_generation_workers=2")
    assert plan.code == 2 and plan.lines == [] and len(plan.said) == 2
    for number, line in enumerate(plan.said):
        assert line.startswith(f"config error: GPU {number} has 79.0 GiB free, and this run is ")
        assert "divide it over more workers (actor.workers); or train adapters (actor.lora" in line
        assert "offload" not in line, "fsdp2 refuses that"
    assert "(no reference) or give it another worker" in plan.said[0] != plan.said[1]
    graph = main([*options.split(), "mode=graph"])
    assert graph == 0, "where nothing is loaded nothing has to fit"
    larger = check("4xB200", options, "async_rl.n_generation_workers=2").memory
    first = larger["model_worker/0", "actor", "GPU 0"]
    other = larger["model_worker/1", "actor", "GPU 1"]
    assert first["unsharded"] == other["unsharded"] > 4, "embedding, head, and blocks in use"
    assert first["copy"] > 15.2 and other["copy"] == 0, "the first worker publishes"


@pytest.mark.slow
def test_a_model_whose_size_is_not_known_is_planned_as_far_as_it_is(check: Check) -> None:
    plan = check("2xH100", "experiment=grpo_async env=countdown actor.path=owner/other")
    assert plan.code == 0 and not plan.memory
    unknown = (
        "  generation/0 actor (GPU 1): the size of owner/other is not known, since it is not here"
    )
    assert f"{unknown} yet (`hf download owner/other config.json`)" in plan.lines
    assert "  GPU 1: at least 0.00 in all, 79.02 free" in plan.lines


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_trace_is_made_of_what_does_not_fit(check: Check, engine: str) -> None:
    """Since it tells what takes the memory."""
    options = f"experiment=grpo env=countdown actor.path=Qwen/Qwen3-8B engine.name={engine}"
    given = [*options.split(), "mode=check", "machine=1xH100"]
    with pytest.raises(ConfigError):
        list(find_warnings(build_experiment(compose_config(given))))
    built = build_experiment(compose_config([*given, "trace=true"]))
    said = "GPU 0 has 79.0" if engine == "embedded" else "vLLM does not fit next to the trainer"
    assert [line[: len(said)] for line in find_warnings(built)] == [said]


def warned(machine: Machine, *options: str) -> list[str]:
    """What a launch of options, or a check, warns of on a machine."""
    words = [word for text in options for word in shlex.split(text)]
    return list(find_warnings(build_experiment(compose_config(words, machine=machine))))


@pytest.mark.slow
def test_a_run_goes_by_the_memory_that_no_process_uses(check: Check) -> None:
    """After a crash, the old processes hold theirs for a while."""
    assert check("1xH100", SYNC).code == 0  # in the folder of models
    whole = KNOWN_GPUS["H100"]
    busy = Machine((replace(whole, free_bytes=8 << 30),))
    embedded = f"{SYNC} engine.name=embedded mb_spec.max_tokens_per_mb=16384"
    for options, said in (
        (embedded, "GPU 0 has 8.0 GiB free, this run is estimated to take "),
        ("experiment=grpo env=countdown actor.path=Qwen/Qwen3-0.6B", "GPU 0 has 8.0 GiB free"),
    ):
        (line,) = warned(busy, options)
        assert line.startswith(said) and line.endswith("end them (`nvidia-smi` lists them)")
        assert warned(Machine((whole,)), options) == []
        with pytest.raises(ConfigError):
            warned(busy, options, "mode=check")
    large = "experiment=grpo env=countdown actor.path=Qwen/Qwen3-8B engine.name=embedded"
    for machine in (busy, Machine((whole,))):
        with pytest.raises(ConfigError, match=r"GPU 0 has 79\.0 GiB free"):
            warned(machine, large)
    unknown = Machine((replace(whole, free_bytes=None, total_bytes=None),))
    assert warned(unknown, large) == []


@pytest.mark.slow
def test_a_model_that_was_not_counted_is_warned_of(
    check: Check, folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "other"
    model.mkdir()
    for file in (folder / "models" / "smollm2_135m").iterdir():
        (model / file.name).symlink_to(file)
    (model / "config.json").unlink()
    for kind, code in (("llama", 2), ("mistral", 0)):
        (model / "config.json").write_text(json.dumps(QWEN3_8B | {"model_type": kind}))
        for engine in ("vllm", "embedded"):
            options = f"experiment=grpo env=countdown actor.path={model} engine.name={engine}"
            plan = check("1xH100", options)
            assert plan.code == code, plan.said
            (line,) = (line for line in plan.said if not line.startswith("note: "))
            said = "GPU 0 has 79.0 GiB free" if engine == "embedded" else "vLLM does not fit"
            assert line.startswith(f"{'config error' if code else 'warning'}: {said}")
    assert plan.memory["model_worker/0", "actor", "GPU 0"]["moments"] > 50


@pytest.mark.slow
def test_a_launcher_without_a_gpu_says_what_it_chose_for_hosts_that_may_have_some(
    check: Check,
) -> None:
    """On a login node everything looked as on a CPU, and on joined hosts it was."""
    given = ("experiment=grpo_async env=countdown actor.path=Qwen/Qwen3-0.6B scheduler=slurm",)
    (warned,) = check("", *given).warnings
    assert warned == (
        "engine.name=embedded and actor.dtype=float32: chosen because the launcher sees no GPU "
        "here, whatever its hosts have; on hosts with GPUs name engine.name=vllm "
        "actor.dtype=bfloat16, or see by mode=check machine=8xH100 what a launcher on such a host "
        "chooses"
    )
    (half,) = check("", *given, "actor.dtype=bfloat16").warnings
    assert half.startswith("engine.name=embedded: chosen because") and "actor.dtype" not in half
    there = check("8xH100", *given)
    assert there.warnings == [] and (there.code, there.engine) == (0, "vllm")
    named = check("", *given, "actor.dtype=bfloat16", "engine.name=vllm")
    assert named.warnings == [] and named.code == 0
    small = check("", "experiment=grpo_async env=countdown scheduler=slurm")
    assert small.warnings == [] and small.code == 0


@pytest.mark.slow
def test_a_server_on_several_gpus_has_as_much_on_each(check: Check) -> None:
    """Of those the trainer uses one, so that the other has room that nobody takes."""
    plan = check("2xH100", SYNC, "engine.tensor_parallel_size=2")
    name = "vllm of model_worker/0"
    first, second = (plan.memory[name, "actor", f"GPU {number}"] for number in range(2))
    assert first == second and first["weights"] == pytest.approx(0.555, rel=0.01)
    alone = check("1xH100", SYNC).memory[name, "actor", "GPU 0"]
    assert alone["weights"] == pytest.approx(1.11, rel=0.01)
    assert 20 < alone["keys, values"] < first["keys, values"] < 40


@pytest.mark.slow
def test_an_engine_is_planned_with_what_it_gets(check: Check) -> None:
    """32 or 256 episodes of 4,096 tokens would take 14 or 112 GiB."""
    embedded = check("1xH100", SYNC, "engine.name=embedded").memory
    beside = embedded["model_worker/0", "actor", "GPU 0"]["keys, values"]
    assert 30 < beside < 40, "half of what training leaves"
    own = check("2xH100", ASYNC, "engine.name=embedded").memory
    assert 60 < own["generation/0", "actor", "GPU 1"]["keys, values"] < 0.8 * 79
    asked = check("2xH100", ASYNC, "engine.gpu_memory_utilization=0.5").memory
    assert 35 < asked["generation/0", "actor", "GPU 1"]["keys, values"] < 36
    # A server reserves what it gets, however little its episodes need.
    for machine, device, sizes in (
        ("1xH100", "GPU 0", (25, 33)),
        ("2xH100", "GPU 1", (68, 70)),
    ):
        few = check(machine, ASYNC, "async_rl.n_rollout_workers=1 rollout.sessions=8")
        assert few.code == 0, few.said
        server = few.memory["generation/0", "actor", device]
        assert sizes[0] < server["keys, values"] < sizes[1] and server["activations"] == 3
    bounded = check("2xH100", ASYNC, "engine.name=embedded", "engine.kv_cache_gib=3").memory
    assert bounded["generation/0", "actor", "GPU 1"]["keys, values"] == 3
    url = ("engine.name=vllm", "engine.vllm_url=http://127.0.0.1:1")
    running = check("2xH100", ASYNC, *url).memory
    assert not any(process.startswith("generation/") for process, _, _ in running), "not here"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "needed", "said"),
    [
        (
            f"{LARGER} mb_spec.max_tokens_per_mb=25000",
            93,
            "set engine.gpu_memory_utilization (vLLM takes 34 GiB)",
        ),
        (
            f"{LARGER} engine.gpu_memory_utilization=0.85",
            84,
            ": lower engine.gpu_memory_utilization (vLLM takes 67.7 GiB); or ",
        ),
        (
            f"{ASYNC} async_rl.n_generation_workers=2 engine.gpu_memory_utilization=0.45",
            87,
            ": lower engine.gpu_memory_utilization (vLLM takes 35.8 GiB); or start fewer "
            "generation workers (async_rl.n_generation_workers); or generate on a GPU without a ",
        ),
    ],
)
def test_what_a_server_reserves_counts(check: Check, options: str, needed: int, said: str) -> None:
    plan = check("1xH100", options)
    assert plan.code == 2 and plan.lines == []
    (line,) = (line for line in plan.said if not line.startswith("note: "))
    (found,) = re.findall(r"^config error: GPU 0 has .* estimated to take ([\d.]+), most", line)
    assert said in line
    assert float(found) == pytest.approx(needed, abs=3)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "parts"), [(1, 1), (2, 2), (4, 2)])
def test_more_gpus_than_heads_of_keys_do_not_divide_them(
    check: Check, tmp_path: Path, count: int, parts: int
) -> None:
    """Two heads of keys: from the third GPU on, vLLM has each of them twice."""
    model = tmp_path / "two_heads"
    model.mkdir()
    for file in Path("models/smollm2_135m").iterdir():
        (model / file.name).symlink_to(file.resolve())
    shape = SMOLLM2 | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 4_000_000}))
    tokens = 3_000_000
    options = f"experiment=grpo_async env=countdown actor.path={model} rollout.max_turns=2"
    plan = check(
        "8xL4",
        options,
        f"rollout.max_total_tokens={tokens} engine.tensor_parallel_size={count}",
    )
    (line,) = (line for line in plan.said if "episode take" in line)
    size = tokens * 30 * 2 * 2 * 128 * 2 / parts / 2**30
    assert f"keys and values of one episode take {size:.3g} GiB" in line


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "share"), [("1xH100", 0.23), ("2xH100", 0.46)])
def test_the_share_that_is_named_for_two_servers_fits(
    check: Check, machine: str, share: float
) -> None:
    """Beside a trainer it is smaller."""
    options = f"{ASYNC} async_rl.n_generation_workers=2"
    refused = check(machine, options)
    named = f"engine.gpu_memory_utilization={share}"
    halves = check(machine, options, "engine.gpu_memory_utilization=0.5")
    assert halves.code == 2 and "each takes 0.5 of its memory" in halves.said[-1]
    assert halves.said[-1].endswith(f"give each at most {named}"), "a context is beside each"
    assert refused.code == 2 and refused.said[-1].endswith(f"give each at most {named}")
    plan = check(machine, options, named)
    assert plan.code == 0 and plan.warnings == []


@pytest.mark.slow
def test_a_server_does_not_know_of_the_critic_beside_it(check: Check) -> None:
    """It starts with half of what its own trainer leaves."""
    options = "env=countdown actor.path=Qwen/Qwen3-0.6B actor.gradient_checkpointing=true"
    servers = [
        check("1xB200", f"experiment={name}", options).memory["generation/0", "actor", "GPU 0"]
        for name in ("grpo_async", "ppo_async")
    ]
    assert servers[0] == servers[1]


@pytest.mark.slow
def test_embedded_engines_share_what_is_free_on_their_gpu(check: Check) -> None:
    """Each measures what is free when it needs it, so that they never have more than all of it."""
    given = (ASYNC, "engine.name=embedded rollout.max_total_tokens=8192")
    given += ("actor.gradient_checkpointing=true",)
    (alone,) = (
        parts["keys, values"]
        for (process, _, _), parts in check("2xH100", *given).memory.items()
        if process.startswith("generation/")
    )
    for count in (2, 3):
        plan = check("2xH100", *given, f"async_rl.n_generation_workers={count}")
        assert plan.code == 0 and plan.warnings == []
        each = {
            parts["keys, values"]
            for (process, _, _), parts in plan.memory.items()
            if process.startswith("generation/")
        }
        (size,) = each
        assert alone < count * size < 79.02 - count * 1.11
        assert plan.devices["GPU 1"][0] < 79.02
    two = "async_rl.n_generation_workers=2"
    fixed = check("2xH100", *given, two, "engine.kv_cache_gib=60")
    assert fixed.code == 2 and fixed.said[-1].endswith(
        "most of it for keys, values of actor (60): lower engine.kv_cache_gib; or start fewer "
        "generation workers (async_rl.n_generation_workers); or lower rollout.max_total_tokens; or "
        "take a smaller model"
    ), "it is not lowered to what is free"
    for helps in (
        f"{two} engine.kv_cache_gib=37",
        "engine.kv_cache_gib=60",
        f"{two} engine.kv_cache_gib=60 rollout.max_total_tokens=2048",
    ):
        assert check("2xH100", *given, helps).code == 0


@pytest.mark.slow
def test_a_machine_is_planned_from_what_its_driver_printed(check: Check, tmp_path: Path) -> None:
    there = tmp_path / "there.csv"
    there.write_text(
        "0, GPU-a, NVIDIA A100-SXM4-80GB, 81920, 40960, 8.0\n"
        "1, GPU-b, NVIDIA L4, 23034, 22500, 8.9\n"
    )
    plan = check(str(there), ASYNC)
    assert plan.line("machine").startswith(
        "1 x NVIDIA A100-SXM4-80GB (80.0 GiB, capability 8.0), 1 x NVIDIA L4 (22.5 GiB"
    )
    assert plan.gpus == {"model_worker/0": [0], "generation/0": [1]}
    assert [plan.devices[f"GPU {number}"][1] for number in range(2)] == [40.0, 21.97]
    there.write_text("NVIDIA-SMI has failed\n")
    (line,) = check(str(there), ASYNC).said
    assert line.endswith(f"the file holds something else than what `{' '.join(QUERY)}` prints")
    assert " ".join(QUERY) in GPU_PAGE.read_text()


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("machine", "options", "count"),
    [
        ("1xH100", SYNC, 1),
        ("2xH100", SYNC, 1),
        ("2xH100", ASYNC, 2),
        ("2xH100", f"{SYNC} engine.tensor_parallel_size=2", 2),
        ("8xH100", f"{ASYNC} {FOUR} engine.tensor_parallel_size=2", 6),
        ("cpu", ASYNC, 0),
    ],
)
def test_tokens_are_divided_by_the_gpus_on_which_a_run_computes(
    check: Check, machine: str, options: str, count: int
) -> None:
    """By ``throughput/tokens_per_second_per_gpu``."""
    built = build_experiment(compose_config(options.split(), machine=plan_machine(machine)))
    plan = built.plan(built.spec, 0.0)
    assert count_gpus(plan, on_gpu=machine != "cpu") == count
    elsewhere = replace(plan, gpus={}, network=replace(plan.network, bind="10.0.0.1"))
    assert count_gpus(elsewhere, on_gpu=True) == 0, "other hosts assign them"


@pytest.mark.slow
def test_only_a_check_plans_for_another_machine(check: Check) -> None:
    with pytest.raises(ValueError, match="mode=graph"):
        compose_config([*ASYNC.split(), "mode=graph", "machine=8xH100"])
    here = check("", ASYNC)
    assert here.code == 0 and not here.line("machine") and here.engine == "embedded"
    assert here.devices["host"][1] is not None


def test_known_gpus_are_those_of_the_page() -> None:
    (names,) = re.findall(r"`COUNTxMODEL` \(([^)]+)\)", GPU_PAGE.read_text().replace("\n", " "))
    assert names.split(", ") == [*KNOWN_GPUS]
    assert plan_machine("2xrtx4090") == Machine((KNOWN_GPUS["RTX4090"],) * 2, "2xrtx4090")
    assert plan_machine("cpu") == Machine(plan="cpu")
    total = KNOWN_GPUS["H100"].total_bytes
    assert total is not None and total >> 20 == 81559
