"""The built-in policy that ships with an environment: who takes it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.sft import OUTDATED, build_warm_start, warm_start_recipe
from experiments.shipped_policy import main
from realhf.api.config import ConfigError
from realhf.aws.tasks.loader import instantiate
from realhf.backends.shipped_policy import PROVENANCE, find_shipped_policy
from realhf.base.installation import IMPORT_ROOT, PACKAGE
from realhf.launch.compose import compose_config

AWS = ("experiment=grpo_aws",)
SHIPPED = {
    AWS: PACKAGE / "aws" / "training" / "policy",
    ("experiment=grpo", "env=countdown"): PACKAGE / "environments" / "policies" / "countdown",
    ("experiment=grpo", "env=sql"): PACKAGE / "environments" / "policies" / "sql",
}
"""Where the policy lies that the jobs with these arguments begin with."""


@pytest.fixture(params=SHIPPED, ids=lambda job: job[-1])
def job(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


def first_policy(*arguments: str) -> Path | None:
    return build_warm_start(compose_config(arguments).config).artifact


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "arguments", [(), ("seed=7",), ("total_train_steps=3", "actor.optimizer.lr=1e-4")]
)
def test_a_run_whose_warm_start_is_made_from_the_same_takes_it(job, arguments):
    assert first_policy(*job, *arguments) == SHIPPED[job]


@pytest.mark.slow
def test_how_an_environment_is_served_makes_no_other_policy():
    for size in (2, 8):
        assert first_policy(*AWS, f"env.pool_size={size}") == SHIPPED[AWS]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "argument",
    [
        "warm_start.shipped=false",
        "warm_start.train_steps=399",
        "builtin.hidden_size=64",
        "env.tiers=[warmup]",
        "rollout.max_total_tokens=1000",
        "actor.dtype=bfloat16",
        "experiment=sft_aws",
    ],
)
def test_any_other_run_makes_its_own(argument):
    assert first_policy(*AWS, argument) != SHIPPED[AWS]


@pytest.mark.slow
def test_a_policy_says_what_it_was_made_from_and_is_small(job):
    folder = SHIPPED[job]
    provenance = json.loads((folder / PROVENANCE).read_text())
    assert provenance["made_from"] == json.loads(
        json.dumps(warm_start_recipe(compose_config(job).config))
    )
    assert provenance["git"]["commit"] and not provenance["git"]["modified"]
    assert provenance["command"].startswith("python -m experiments.shipped_policy ")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2.5e6


def test_a_file_that_was_not_shipped_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    content = {"made_from": {"seed": None}, "sha256": {"model.safetensors": "0" * 64}}
    (tmp_path / PROVENANCE).write_text(json.dumps(content))
    assert find_shipped_policy(tmp_path, {"seed": 1}) is None
    with pytest.raises(
        ConfigError,
        match=r"model.safetensors: SHA-256 .* shipped with 0000.*warm_start.shipped=false",
    ):
        find_shipped_policy(tmp_path, {"seed": None})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="of no such file"):
        find_shipped_policy(tmp_path, {"seed": None})
    (tmp_path / PROVENANCE).write_text("{")
    with pytest.raises(ConfigError, match=r"provenance.json: .*reinstall the package"):
        find_shipped_policy(tmp_path, {"seed": None})


@pytest.mark.slow
def test_an_environment_that_ships_none_is_one_line(capsys):
    assert (
        main(
            ["experiment=grpo", f"env.path={IMPORT_ROOT / 'docs/extend/examples/support_desk.py'}"]
        )
        == 2
    )
    assert (
        capsys.readouterr().err
        == "grpo: its environment has no folder for a policy that ships with it "
        "(EnvironmentSpec.shipped_policy)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("change", ["prompt", "task", "script"])
def test_a_policy_that_was_taught_other_things_is_not_taken_and_that_is_said(monkeypatch, change):
    if change == "prompt":
        monkeypatch.setattr("realhf.aws.environment.SYSTEM_PROMPT", "You operate an AWS account.")
    elif change == "task":
        reworded = lambda template, seed, rephrased: instantiate(template, seed, rephrased=True)
        monkeypatch.setattr("realhf.aws.scripts.instantiate", reworded)
    else:
        monkeypatch.setattr("realhf.aws.scripts.SHORTENED_SHARE", 0.0)
    spec = build_warm_start(compose_config(AWS).config)
    assert spec.artifact != SHIPPED[AWS] and spec.advice == (OUTDATED,)


@pytest.mark.slow
def test_a_policy_made_from_other_options_is_none_of_anybodys_mistakes():
    assert build_warm_start(compose_config([*AWS, "env.tiers=[warmup]"]).config).advice == ()
    assert build_warm_start(compose_config(AWS).config).advice == ()
