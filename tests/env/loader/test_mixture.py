"""A mixture is one environment that plays the tasks of several."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from realhf.api.environment import (
    HELD_OUT,
    TRAIN,
    AssistantMessage,
    DemonstrationRequest,
    EnvironmentDefinition,
    EnvironmentFailure,
    EnvironmentPart,
    EnvironmentService,
    EnvironmentSpec,
    Opening,
    Task,
    TaskLimits,
    TaskRemark,
    Turn,
)
from realhf.api.option import option
from realhf.env.loader.load import build_environment, load_definition, passport_file
from realhf.env.loader.mixture import (
    define_mixture,
    mix_environments,
    mixture_reference,
    name_members,
    own_payload,
    split_mixture,
)
from realhf.rollout.demonstrations import play_demonstrations
from realhf.rollout.group_player import held_out_tasks

MIX = "[sql,countdown]"
OPTIONS = {"mix": ["sql", "countdown"]}


def test_a_reference_lists_the_environments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = f"{Path('mine.py').resolve()}:Mine"
    folder = f"harbor:{Path('shell').resolve()}"
    reference = mixture_reference(["sql", " mine.py:Mine", "hard=countdown", "harbor:shell"])
    assert reference == f"[sql,{own},hard=countdown,{folder}]"
    assert split_mixture(reference) == ("sql", own, "hard=countdown", folder)
    assert name_members(split_mixture(reference)) == {
        "sql": "sql",
        "Mine": own,
        "hard": "countdown",
        "shell": folder,
    }
    named = ["here=harbor:shell", "tools=mcp:python server.py"]
    assert mixture_reference(named) == f"[here={folder},tools=mcp:python server.py]"
    assert mixture_reference(split_mixture(reference)) == reference
    assert split_mixture("sql") == split_mixture(own) == ()


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        (["sql"], "at least two environments; env=NAME chooses a single one"),
        (["sql", "sql"], "two environments are called 'sql'"),
        (["sql", "my-env.py"], "'my-env' cannot be its name in the mixture"),
        (["sql", "overall=countdown"], "'overall' cannot be its name"),
        (["sql", "class=countdown"], "'class' cannot be its name"),
        (["sql", "nothing"], "unknown environment 'nothing'"),
    ],
)
def test_members_that_cannot_be_mixed(members, problem):
    with pytest.raises(ValueError, match=problem):
        load_definition(mixture_reference(members))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"weights": [1]}, r"env.weights=\[1.0\]: give one weight for each of the 2"),
        ({"weights": [1, 0]}, "env.weights=0.0: must be positive"),
        ({"of": {"sql": {"groups": []}}}, r"env.of.sql.groups=\[\]: name at least one group"),
        ({"of": {"sql": {"grups": ["join"]}}}, "env.of.sql.grups is unknown"),
        ({"of": {"files": {}}}, "env.of.files is unknown"),
        ({"limits": {"sql": {"max_turns": 0}}}, "env.limits.sql.max_turns=0: must be at least 1"),
    ],
)
def test_options_are_checked_as_if_each_environment_were_alone(options, problem):
    with pytest.raises(ValueError, match=problem):
        build_environment(MIX, {**OPTIONS, **options})


def test_a_mixture_has_the_tasks_of_all_its_environments():
    options = {
        "weights": [3, 1],
        "of": {"countdown": {"levels": ["two-small"]}},
        "limits": {"sql": {"max_turns": 2, "max_total_tokens": 300}},
    }
    spec = build_environment(MIX, {**OPTIONS, **options})
    assert {name: part.share for name, part in spec.parts.items()} == {
        "sql": 0.75,
        "countdown": 0.25,
    }
    for split in (TRAIN, HELD_OUT):
        tasks = spec.tasks(split)
        alone = {
            "sql": build_environment("sql", {}).tasks(split),
            "countdown": build_environment("countdown", {"levels": ["two-small"]}).tasks(split),
        }
        assert dict(tasks.group_of) == {
            f"{name}/{template}": f"{name}/{group}"
            for name, each in alone.items()
            for template, group in each.group_of.items()
        }
        assert {*tasks.group_of.values()} == {*tasks.groups}
        for template, group in tasks.group_of.items():
            name, _, own = template.partition("/")
            task = tasks.instantiate(template, 7)
            single = alone[name].instantiate(own, 7)
            assert (own_payload(task), task.seed) == (single.payload, single.seed)
            assert (task.environment, task.group, task.id) == (name, group, f"{name}/{single.id}")
            assert task.limits == (TaskLimits(2, 300) if name == "sql" else TaskLimits())


@pytest.mark.slow
def test_the_scripted_solvers_solve_their_tasks_in_a_mixture():
    spec = build_environment("[countdown,sql]", {"mix": ["countdown", "sql"]})
    assert spec.demonstrate is not None
    scripts = [*spec.demonstrate(DemonstrationRequest(1, seed=3))]
    rows = asyncio.run(play_demonstrations(spec, scripts))
    assert all(row["achieved"] for row in rows)
    prompts = {name: build_environment(name, {}).system_prompt for name in ("sql", "countdown")}
    for row in rows:
        name = row["task_id"].partition("/")[0]
        first = row["messages"][0]
        assert (first["role"] == "system") == bool(prompts[name])
        assert not prompts[name] or first["content"] == prompts[name]


def test_an_environment_without_a_solver_leaves_the_mixture_without_one():
    assert build_environment("[aws,sql]", {"mix": ["aws", "sql"]}).demonstrate is None


def test_each_environment_is_evaluated_up_to_the_same_number_of_templates():
    spec = build_environment(MIX, OPTIONS)
    tasks = held_out_tasks(spec, HELD_OUT, episodes_per_task=2, templates=3)
    alone = [
        task
        for name in ("sql", "countdown")
        for task in held_out_tasks(build_environment(name, {}), HELD_OUT, 2, 3)
    ]
    assert [own_payload(task) for task in tasks] == [task.payload for task in alone]
    assert [task.template.partition("/")[2] for task in tasks] == [task.template for task in alone]


class Recorder:
    """Environment of one template that records what happens to its instances."""

    def __init__(self, name: str, log: list[str], address: str = "") -> None:
        self.name = name
        self.log = log
        log.append(f"{name} made{address and f' at {address}'}")

    async def reset(self, task, *, seed):
        self.log.append(f"{self.name} reset {task['number']} {seed}")
        return Opening([{"role": "user", "content": "go"}])

    async def step(self, message):
        return Turn([], done=True, reward=1.0, metrics={"success": 1.0})

    async def close(self):
        self.log.append(f"{self.name} closed")
        if self.name == "b":
            raise EnvironmentFailure("internal", "b does not close")


class NumberedTasks:
    def __init__(self, groups: tuple[str, ...]) -> None:
        self.group_of = {group if len(groups) > 1 else "only": group for group in groups}
        self.groups = groups

    def instantiate(self, template_id, seed):
        group = self.group_of[template_id]
        return Task(f"only@{seed}", group, {"number": seed}, seed=seed)


def recorded(
    log: list[str], name: str, groups: tuple[str, ...] = ("all",), **fields: Any
) -> EnvironmentPart:
    spec = EnvironmentSpec(
        name, lambda url: Recorder(name, log, url), lambda split: NumberedTasks(groups), **fields
    )
    return EnvironmentPart(spec, 0.5)


def test_an_instance_of_each_environment_is_made_when_needed_and_closed_with_all():
    async def play() -> None:
        env = spec.make("http://server")
        tasks = spec.tasks(TRAIN)
        with pytest.raises(EnvironmentFailure, match="no episode was started"):
            await env.step(AssistantMessage("hello"))
        for template, seed in (("a/only", 1), ("b/only", 2), ("a/only", 3)):
            task = tasks.instantiate(template, seed)
            opening = await env.reset(task.payload, seed=task.seed)
            assert [message["role"] for message in opening.messages] == (
                ["system", "user"] if template == "b/only" else ["user"]
            )
            assert (await env.step(AssistantMessage("hello"))).done
        with pytest.raises(EnvironmentFailure, match="b does not close"):
            await env.close()
        await env.close()

    log: list[str] = []
    server = EnvironmentService("some.module")
    spec = mix_environments(
        {
            "a": recorded(log, "a", launch=server, concurrency=4),
            "b": recorded(log, "b", system_prompt="be brief", deterministic=False),
        }
    )
    assert spec.launch == replace(server, section="env.of.a")
    assert (spec.concurrency, spec.deterministic) == (4, False)
    asyncio.run(play())
    assert log == [
        "a made at http://server",
        "a reset 1 1",
        "b made",
        "b reset 2 2",
        "a reset 3 3",
        "a closed",
        "b closed",
    ]


@dataclass
class PatientOptions:
    """Options of an environment that fails at the call that they name."""

    fails_at: str = option("reset", "The call that fails.")
    timeout_s: float = option(1.0, "Time that a call has.")


class Patient(Recorder):
    """Environment that names its options when it fails."""

    def __init__(self, fails_at: str) -> None:
        super().__init__("patient", [], "")
        self._fails_at = fails_at

    async def reset(self, task, *, seed):
        self._fail("reset")
        return await super().reset(task, seed=seed)

    async def step(self, message):
        self._fail("step")
        return await super().step(message)

    async def close(self):
        self._fail("close")

    def _fail(self, call: str) -> None:
        if call == self._fails_at:
            raise EnvironmentFailure(
                "timeout", f"{call}: nothing within env.timeout_s=1 s of other.env.timeout_s"
            )


def patient(options: PatientOptions) -> EnvironmentSpec:
    def tasks(split: str) -> NumberedTasks:
        if options.fails_at == split:
            raise ValueError(f"env.fails_at={split}: no tasks, env.other is not an option")
        return NumberedTasks(("all",))

    async def examine(task):
        return [TaskRemark("longer than env.timeout_s=1 allows")]

    return EnvironmentSpec("patient", lambda url: Patient(options.fails_at), tasks, examine=examine)


@pytest.mark.parametrize("call", ["reset", "step", "close"])
def test_failures_name_the_options_as_the_mixture_has_them(call: str) -> None:
    """The user gave them to an entry of the mixture, where ``env.timeout_s`` is unknown."""
    definitions = {
        "slow": EnvironmentDefinition(PatientOptions, patient),
        "other": EnvironmentDefinition(PatientOptions, patient),
    }
    mixture = define_mixture(["slow=x", "other=y"], definitions)
    options = mixture.options()
    options.of.slow.fails_at = call
    options.of.other.fails_at = HELD_OUT
    spec = mixture.build(options)
    task = spec.tasks(TRAIN).instantiate("slow/only", 1)

    async def play() -> None:
        env = spec.make("")
        try:
            await env.reset(task.payload, seed=1)
            await env.step(AssistantMessage("hello"))
        finally:
            await env.close()

    with pytest.raises(EnvironmentFailure) as failure:
        asyncio.run(play())
    assert failure.value.kind == "timeout"
    assert str(failure.value) == (
        f"{call}: nothing within env.of.slow.timeout_s=1 s of other.env.timeout_s"
    )
    with pytest.raises(
        ValueError, match=r"^env\.of\.other\.fails_at=heldout: no tasks, env\.other"
    ):
        spec.tasks(HELD_OUT)

    async def examine() -> None:
        assert spec.examine is not None
        (remark,) = await spec.examine(task)
        assert remark.text == "longer than env.of.slow.timeout_s=1 allows"

    asyncio.run(examine())


@pytest.mark.parametrize(
    ("groups", "labels"),
    [
        (("all",), ("a",)),
        (("",), ("a",)),
        (("a",), ("a",)),
        (("b",), ("a/b",)),
        (("a", "b"), ("a/a", "a/b")),
        (("all", "b"), ("a/all", "a/b")),
    ],
)
def test_no_group_of_several_has_the_name_of_its_environment(groups, labels):
    spec = mix_environments({"a": recorded([], "a", groups), "z": recorded([], "z")})
    tasks = spec.tasks(TRAIN)
    assert tasks.groups == (*labels, "z")
    assert [*tasks.group_of.values()] == [*tasks.groups]
    assert [tasks.instantiate(key, 1).group for key in tasks.group_of] == [*tasks.groups]


def test_whether_an_episode_may_be_resumed_is_a_matter_of_its_environment():
    spec = mix_environments({"a": recorded([], "a"), "b": recorded([], "b", deterministic=False)})
    tasks = spec.tasks(TRAIN)
    answers = [spec.is_deterministic(tasks.instantiate(f"{name}/only", 1)) for name in "ab"]
    assert answers == [True, False]


async def test_each_environment_examines_its_own_tasks():
    async def examine(task: Task) -> list[TaskRemark]:
        return [TaskRemark(f"{task.id} of {task.environment!r}: {task.payload['number']}")]

    spec = mix_environments({"a": recorded([], "a"), "b": recorded([], "b", examine=examine)})
    tasks = spec.tasks(TRAIN)
    assert spec.examine is not None
    remarks = [await spec.examine(tasks.instantiate(f"{name}/only", 3)) for name in "ab"]
    assert remarks == [[], [TaskRemark("only@3 of '': 3")]]
    assert mix_environments({name: recorded([], name) for name in "ab"}).examine is None


def test_an_error_names_the_option_of_the_mixture(tmp_path):
    folder = tmp_path / "mine"
    members = ["sql", f"harbor:{folder}"]
    reference = mixture_reference(members)
    options = {"mix": members, "of": {"mine": {"tasks": ["none"]}}}
    shutil.copytree(Path(__file__).parents[3] / "examples" / "harbor", folder)
    with pytest.raises(ValueError, match=r": env\.of\.mine\.tasks: .*mine has no task 'none'$"):
        build_environment(reference, options)


def test_two_environments_with_servers_are_refused():
    server = EnvironmentService("some.module")
    parts = {name: recorded([], name, launch=server) for name in ("a", "b")}
    with pytest.raises(ValueError, match="a and b each need a server"):
        mix_environments(parts)


def test_a_mixture_has_no_passport():
    with pytest.raises(ValueError, match="a mixture has no passport"):
        passport_file(MIX)
