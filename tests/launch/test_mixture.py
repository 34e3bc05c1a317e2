"""A mixture of environments on the command line: its options, and one line for each mistake."""

from __future__ import annotations

import json

import pytest

from realhf.api.config import ConfigError
from realhf.api.option import walk
from realhf.base.dataclass_json import to_json_value
from realhf.launch.__main__ import main
from realhf.launch.build import build_experiment
from realhf.launch.checks import check_config
from realhf.launch.compose import compose_config
from realhf.launch.help import experiment_help
from realhf.launch.resume import find_changes, plain_options

MIX = ("experiment=grpo", "actor.path=builtin_tiny", "env.mix=[sql,countdown]")
OWN = """
from realhf.api.environment import Opening, Turn

class Long:
    @staticmethod
    def tasks(split):
        return [{"word": word} for word in (("a", "b") if split == "train" else ("c", "d"))]

    async def reset(self, task, *, seed):
        return Opening([{"role": "user", "content": task["word"]}])

    async def step(self, message):
        return Turn(done=True, reward=1.0, metrics={"success": 1.0})

    async def close(self):
        pass
"""


def built(*arguments):
    composed = compose_config([*arguments, "trial_name=one"])
    check_config(composed.config)
    return build_experiment(composed)


def error(*arguments):
    with pytest.raises(ConfigError) as caught:
        built(*arguments)
    return str(caught.value)


@pytest.mark.slow
def test_the_options_of_each_environment_reach_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    own = ["experiment=grpo_async", "actor.path=builtin_tiny"]
    spec = built(
        *own,
        "env.mix=[sql, mine.py:Long, hard=countdown]",
        "env.weights=[2,1,1]",
        "env.of.sql.groups=[join]",
        "env.of.hard.partial_credit=0",
        "env.limits.hard.max_turns=1",
    ).spec
    assert spec.source.name == "mixture" and spec.rollout is not None
    options = spec.source.args["options"]
    assert options == spec.rollout.episodes.environment_options
    assert options["mix"] == ["sql", f"{tmp_path}/mine.py:Long", "hard=countdown"]
    assert options["weights"] == [2, 1, 1]
    assert options["of"]["sql"]["groups"] == ["join"]
    assert options["of"]["hard"]["partial_credit"] == 0
    assert options["limits"]["hard"] == {
        "max_turns": 1,
        "max_total_tokens": None,
        "max_new_tokens": None,
    }
    assert spec.source.args["environment"] == spec.rollout.episodes.environment
    json.dumps(to_json_value(spec))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["env.mix=[sql,contdown]"], "env.mix=[sql,contdown]: unknown environment 'contdown'"),
        (["env.mix=[sql]"], "env.mix=[sql]: a mixture needs at least two environments"),
        (["env.mix=sql"], "env.mix=sql: give a list, such as [sql,countdown]"),
        (["env.mix=[]"], "env.mix=[]: name at least two environments"),
        (["env.mix=[,]"], "env.mix=[,]: name at least two environments"),
        (["env=sql"], "env.mix=[sql,countdown], env=sql: choose one of them"),
        (["env.path=sql"], "env.mix=[sql,countdown], env.path=sql: choose one of them"),
        (["env.weights=[1]"], "env.weights=[1.0]: give one weight for each of the 2 environments"),
        (["env.weights=[1,-1]"], "env.weights=-1.0: must be positive"),
        (["env.weights=[1,0]"], "env.weights=0.0: must be positive"),
        (
            ["env.of.files.groups=[change]"],
            "option env.of.files.groups has no effect: env.mix has no environment 'files', but sql, "
            "countdown",
        ),
        (
            ["env.limits.files.max_turns=2"],
            "option env.limits.files.max_turns has no effect: env.mix has no environment 'files'",
        ),
        (["env.of.sql.grups=[join]"], "unknown option 'env.of.sql.grups'; did you mean"),
        (["env.of.sql.groups=[]"], "env.of.sql.groups=[]: name at least one group"),
        (["env.of.sql.max_rows=0"], "env.of.sql.max_rows=0: must be between 1 and 1000"),
        (
            ["env.limits.sql.max_turns=9"],
            "env.limits.sql.max_turns=9: more than rollout.max_turns=",
        ),
        (["env.limits.sql.max_turns=0"], "env.limits.sql.max_turns=0: must be at least 1"),
    ],
)
def test_a_mistake_is_one_line_with_its_cause(arguments, expected):
    names = {argument.partition("=")[0] for argument in arguments}
    base = [argument for argument in MIX if argument.partition("=")[0] not in names]
    text = error(*base, *arguments)
    assert text.startswith(expected) and "\n" not in text


@pytest.mark.slow
def test_options_of_a_mixture_without_one_are_refused():
    text = error("experiment=grpo", "env=sql", "env.of.sql.groups=[join]")
    assert text == (
        "option env.of.sql.groups has no effect without env.mix, which names several environments"
    )
    text = error("experiment=grpo_aws", "env.mix=[aws,sql]")
    assert text.startswith("env.mix=[aws,sql]: experiment grpo_aws has the environment aws; type")


@pytest.mark.slow
def test_the_sessions_of_a_server_are_an_option_of_its_environment():
    own = ("experiment=grpo_async", "actor.path=builtin_tiny", "async_rl.n_rollout_workers=3")
    mixed = error(*own, "env.mix=[aws,sql]", "env.of.aws.pool_size=4")
    assert mixed.endswith("and what the environment allows: env.of.aws.pool_size)")
    alone = error(*own, "env=sql", "rollout.sessions=4")
    assert alone.endswith("(rollout.sessions, and what the environment allows)")


@pytest.mark.slow
def test_supervised_training_on_a_mixture_has_no_shares():
    sft = ("experiment=sft", "env.mix=[sql,countdown]", "actor.path=builtin")
    (demonstrations, _) = built(*sft, "env.of.sql.groups=[join]").spec.jobs
    assert "[sql,countdown]" in demonstrations.argv
    for option in ("env.weights=[2,1]", "env.limits.sql.max_turns=2"):
        text = error(*sft, option)
        assert text.startswith(f"option {option.partition('=')[0]} has no effect in experiment sft")


@pytest.mark.slow
def test_the_help_of_a_mixture_lists_the_options_of_each_environment(capsys):
    text = experiment_help(["experiment=grpo", "env.mix=[sql,hard=countdown]"])
    for name in ("env.mix=[sql,hard=countdown]", "env.weights=[]", "env.of.sql.max_rows=10"):
        assert f"  {name}" in text
    assert "env.of.hard.partial_credit=" in text and "env.limits.hard.max_total_tokens=" in text
    assert main(["--help"]) == 0
    everything = capsys.readouterr().out
    assert "env.weights=[]" in everything and "env.limits.NAME.max_turns=" in everything


@pytest.mark.slow
def test_another_mixture_is_another_experiment_on_resume():
    mix = (*MIX, "trial_name=one")
    config = compose_config([*mix, "env.weights=[2,1]"]).config
    before = plain_options(config)
    assert find_changes(config, json.loads(json.dumps(before))) == []
    weights = compose_config([*mix, "env.weights=[1,2]"]).config
    (change,) = find_changes(weights, before)
    assert (change.name, change.on_resume) == ("env.weights", "refuses")
    other = compose_config([*MIX[:2], "env.mix=[sql,files]"]).config
    changes = {change.name: change.on_resume for change in find_changes(other, before)}
    assert changes["env.mix"] == changes["env.path"] == "refuses"


@pytest.mark.slow
def test_a_file_of_an_experiment_may_name_the_mixture(tmp_path):
    (tmp_path / "mixed.py").write_text(
        "from experiments.policy_gradient import Config, build, config_class\n"
    )
    (tmp_path / "mixed.yaml").write_text(
        "env:\n  mix: [sql, countdown]\n  weights: [3, 1]\n  of:\n    sql:\n      groups: [join]\n"
        "actor:\n  path: builtin_tiny\n"
    )
    spec = built(f"+experiment_path={tmp_path}/mixed.py").spec
    options = spec.source.args["options"]
    assert (options["weights"], options["of"]["sql"]["groups"]) == ([3, 1], ["join"])
    text = error(f"+experiment_path={tmp_path}/mixed.py", "env=countdown")
    assert text.startswith("env=countdown: experiment mixed has the environment [sql,countdown]")


@pytest.mark.slow
def test_every_option_of_a_mixture_is_described():
    config = compose_config(list(MIX)).config
    own = [entry for entry in walk(config) if entry.name.startswith("env.")]
    assert {"env.weights", "env.limits.sql.max_turns", "env.of.sql.groups"} <= {e.name for e in own}
    assert all(entry.option.about for entry in own)
