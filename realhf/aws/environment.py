"""The AWS environment for training: its options, its task set, its server, and the client that
plays episodes on that server.

Each environment instance uses one session of the environment server (``workers.env_worker``). The
first ``aws ...`` command in the policy's text is run. The policy then reads a short answer that is
the same in every run (``observation_text``). Source: docs/reference/environment.md 2, 9.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from realhf.api.environment import (
    DEFAULT_FAULT_KINDS,
    HELD_OUT,
    AssistantMessage,
    DemonstrationProgram,
    DemonstrationRequest,
    EnvironmentDefinition,
    EnvironmentFailure,
    EnvironmentService,
    EnvironmentSpec,
    Opening,
    Task,
    Turn,
)
from realhf.api.option import MAX_SEED, option
from realhf.aws.messages import (
    NO_COMMAND,
    OBSERVATION_CHARS,
    command_of,
    command_turn,
    episode_task,
    message_turn,
    replay_of,
    task_opening,
    turn_info,
)
from realhf.aws.scripts import HABIT, RECOVERY, write_scripts
from realhf.aws.tasks.loader import (
    ALL_BUT_TEN,
    THE_TEN,
    TrainingTasks,
    instantiate,
    load_templates,
    training_tags,
)
from realhf.aws.tasks.task import TIERS, TaskError
from realhf.base.files import find_matching_files
from realhf.base.installation import PACKAGE
from realhf.base.text import shorten
from realhf.base.tls import split_certificate
from realhf.env.openenv_client import (
    EnvError,
    OpenEnvClient,
    failure_kind,
    fetch_metadata,
    split_token,
)


@dataclass
class AwsOptions:
    """The AWS environment server that the launcher starts, and the tasks that are trained on.

    SIMULATED trouble, for tests and benchmarks: step_latency_ms and the options whose names start
    with fault."""

    path: str = option("aws", "The environment; aws for this one.", choices=("aws",))
    pool_size: int = option(
        16,
        "Maximum number of concurrent sessions; each has a simulator of its own.",
        at_least=1,
        on_resume="free",
    )
    host: str = option("127.0.0.1", "Address that the server listens on.", on_resume="free")
    port: int = option(
        0,
        "Port that the server listens on; 0 means any free port.",
        at_least=0,
        at_most=65535,
        on_resume="free",
    )
    ministack_base_port: int = option(
        0,
        "First port of the simulators, which use consecutive ports; 0 means any free ports.",
        at_least=0,
        at_most=65535,
        on_resume="free",
    )
    max_steps: int = option(
        15, "Maximum number of commands in an episode; the server then ends it.", at_least=1
    )
    tiers: list[str] = option(
        ["warmup", "beginner", "intermediate"],
        "Tiers of the tasks to train on.",
        choices=TIERS,
    )
    tags: list[str] | None = option(
        None,
        "Tags of the templates to train on, of which a template needs any one; [] means all "
        "templates. Default: the tag 'starter' (what the built-in policy can learn) if each of the "
        "tiers has templates with it, otherwise all templates.",
    )
    split: str = option(
        "train",
        "Which templates to train on: train holds out one in five; all_but_ten holds out only "
        "the ten listed in realhf/aws/tasks/loader.py, which evaluations then play as well, in "
        "groups of their own (unseen-...).",
        choices=("train", ALL_BUT_TEN),
    )
    phrasings: bool = option(
        False,
        "Use additional phrasings (realhf/aws/tasks/phrasings.yaml) for training tasks and "
        "demonstrations. Evaluations use only those of the templates.",
    )
    slips: bool = option(
        False,
        "Let demonstrations of recovery (warm_start.recovery_fraction) recover from slips of the "
        "command line (a nonexistent operation, or a missing required option), which are not "
        "imitated.",
    )
    observation_chars: int = option(
        OBSERVATION_CHARS,
        "Maximum length of an answer as the policy reads it, in characters; longer ones keep "
        "their head and tail. With 200, ids that the solutions of three templates of the higher "
        "tiers need are cut out.",
        at_least=40,
    )
    show_ids: bool = option(
        False,
        "Show UUIDs and long hexadecimal ids to the policy. Otherwise they are replaced with "
        "fixed words, also in five templates of the higher tiers whose solutions name a key or a "
        "load balancer by its id.",
    )
    spare_turns: int | None = option(
        None,
        "Maximum number of turns in an episode beyond the commands of the task's solution and one "
        "look at each resource that may have drifted; rollout.max_turns still applies. Default: "
        "only rollout.max_turns. Without this limit, episodes of a failing policy take most of all "
        "tokens.",
        at_least=0,
    )
    chaos: bool = option(
        False,
        "Perturb some training and evaluation episodes (docs/reference/environment.md 7).",
    )
    step_latency_ms: float = option(
        0.0, "SIMULATED: additional latency of every step, in ms.", at_least=0, on_resume="free"
    )
    fault_rate: float = option(
        0.0,
        "SIMULATED: fraction of the steps that fail.",
        at_least=0,
        at_most=1,
        on_resume="warns",
    )
    fault_kinds: str = option(
        DEFAULT_FAULT_KINDS,
        "SIMULATED: kinds of failures (unavailable, disconnect, hang) with their weights.",
        on_resume="warns",
    )
    fault_seed: int = option(
        0,
        "SIMULATED: seed that decides which steps fail.",
        at_least=0,
        at_most=MAX_SEED,
        on_resume="warns",
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield a message for each of these: tags that a tier's templates do not have, a ``split``
        that makes no difference, and fault options without ``fault_rate``."""
        if not self.fault_rate and (self.fault_kinds, self.fault_seed) != (DEFAULT_FAULT_KINDS, 0):
            yield f"{name}.fault_kinds, {name}.fault_seed: no effect without {name}.fault_rate"
        if not self.tiers:
            yield f"{name}.tiers=[]: name at least one tier"
            return
        try:
            default_templates, chosen_templates = (
                TrainingTasks(
                    self.tiers, training_tags(self.tiers, self.tags, split), split
                ).group_of
                for split in ("train", self.split)
            )
        except TaskError as error:
            if self.tags is not None:
                yield f"{name}.tags={self.tags}: {error}"
            return
        if self.split != "train" and default_templates == chosen_templates:
            yield (
                f"{name}.split={self.split}: the templates of these tiers and tags are those of "
                f"split=train"
            )


def environment_server(options: AwsOptions) -> EnvironmentService:
    """Return the description of the environment server that a run starts."""
    argv = [
        "--pool-size",
        str(options.pool_size),
        "--ministack-base-port",
        str(options.ministack_base_port),
    ]
    argv += ["--max-steps", str(options.max_steps)]
    if options.step_latency_ms:
        argv += ["--step-latency-ms", str(options.step_latency_ms)]
    if options.fault_rate:
        argv += ["--fault-rate", str(options.fault_rate), "--fault-kinds", options.fault_kinds]
        argv += ["--fault-seed", str(options.fault_seed)]
    return EnvironmentService(
        "workers.env_worker", tuple(argv), host=options.host, port=options.port
    )


T = TypeVar("T")
SYSTEM_PROMPT = (
    "You operate an AWS account through the AWS CLI. Reply with exactly one command that starts "
    "with "
    "'aws ' and nothing else. You then see its output, and may send the next command, until the "
    "task is done. "
    "Leave the account as asked and nothing else behind."
)
"""System prompt of every policy that plays AWS episodes."""
_METADATA_S = 20.0
"""Deadline for the server's metadata, in seconds."""
_MESSAGE_TIMEOUT_S = 3600.0
"""Deadline for an answer on a session, in seconds. It is never reached, because the player's
deadline is shorter."""


class AwsTaskSet:
    """Task set of the templates with the configured tiers and tags; see
    ``realhf.api.environment.TaskSet``. ``split`` decides which instances of a template are drawn.

    With the option ``split=all_but_ten``, the ten templates that are not trained on are added to
    the held-out task set, in one group ``unseen-TIER`` per tier.
    """

    def __init__(self, options: AwsOptions, split: str) -> None:
        tags = training_tags(options.tiers, options.tags, options.split)
        tasks = TrainingTasks(options.tiers, tags, options.split)
        self.group_of: Mapping[str, str] = {
            str(number): tier for number, tier in tasks.group_of.items()
        }
        self.groups: Sequence[str] = tasks.groups
        if options.split == ALL_BUT_TEN and split == HELD_OUT:
            unseen = load_templates(options.tiers, tags=tags, split=THE_TEN)
            groups = {str(template.task_id): f"unseen-{template.tier}" for template in unseen}
            self.group_of = {**self.group_of, **groups}
            self.groups = (*self.groups, *dict.fromkeys(groups.values()))
        self._split = split
        self._chaos = options.chaos
        self._rephrased = options.phrasings
        self._spare_turns = options.spare_turns

    def instantiate(self, template_id: str, seed: int) -> Task:
        """See ``TaskSet.instantiate``. Training and held-out instances contain different resource
        names."""
        task = instantiate(int(template_id), seed, split=self._split, rephrased=self._rephrased)
        instance = episode_task(task, self._spare_turns, chaos=self._chaos, split=self._split)
        return replace(instance, group=self.group_of.get(template_id, instance.group))


class AwsEnvironment:
    """Environment that plays episodes on one session of the environment server at ``address``.

    The session is opened at the first reset. Alternatively the caller passes an open session as
    ``client``, and in ``reopen`` the function that replaces it when it is lost. ``level``: whether
    the last reward of an episode is its score (``reward_mode`` of the server); an environment that
    opens its own session asks the server.
    """

    def __init__(
        self,
        address: str,
        *,
        client: OpenEnvClient | None = None,
        reopen: Callable[[OpenEnvClient], Awaitable[None]] | None = None,
        level: bool = False,
        observation_chars: int = OBSERVATION_CHARS,
        show_ids: bool = False,
    ) -> None:
        address, self._tls = split_certificate(address)
        self._address, self._token = split_token(address)
        self._client = client
        self._own = client is None
        self._reopen = reopen or _reopen_session
        self._level = level
        self._chars = observation_chars
        self._show_ids = show_ids
        self._state_key = ""

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode. ``task``: reset arguments of the server, such as a complete task object
        (``{"task": {...}}``)."""
        client = await self._connect()
        opening = task_opening(
            (await _await_answer(client.reset(**task, seed=seed))).observation, info=replay_of(task)
        )
        self._state_key = opening.state_key
        return opening

    async def step(self, message: AssistantMessage) -> Turn:
        """Run the command in the policy's message. If the message contains no command, or one that
        the server rejects as invalid, nothing runs and the turn says so."""
        command = command_of(message)
        if command is None:
            return message_turn(NO_COMMAND, self._state_key)
        if self._client is None:
            raise EnvironmentFailure("lost", "the session is not open")
        try:
            result = await _await_answer(self._client.step(command))
        except _Rejected as error:
            return message_turn(f"error: {shorten(str(error), self._chars)}", self._state_key)
        if result.reward is None:
            raise EnvironmentFailure("internal", "the environment answered a step without a reward")
        turn = command_turn(
            result.observation,
            result.reward,
            result.done,
            final=self._level,
            observation_chars=self._chars,
            show_ids=self._show_ids,
            info=turn_info(command, result.observation),
        )
        self._state_key = turn.state_key
        return turn

    async def close(self) -> None:
        """Close the session."""
        if self._client is not None:
            await self._client.close()

    async def _connect(self) -> OpenEnvClient:
        if self._client is None or (self._own and not self._client.usable):
            await self.close()
            metadata = await fetch_metadata(self._address, self._token, _METADATA_S, self._tls)
            self._level = metadata.get("reward_mode") == "level"
            correlate = metadata.get("correlation") is True
            self._client = OpenEnvClient(
                self._address,
                message_timeout_s=_MESSAGE_TIMEOUT_S,
                token=self._token,
                tls=self._tls,
                correlate=correlate,
            )
        if not self._client.usable:
            await _await_answer(self._reopen(self._client))
        return self._client


class _Rejected(Exception):
    """The server rejected the command as invalid. The turn failed, not the environment."""


async def _reopen_session(client: OpenEnvClient) -> None:
    await client.close()
    await client.connect()


async def _await_answer(answer: Awaitable[T]) -> T:
    """Await an answer of the client. Raises EnvironmentFailure or _Rejected in place of the
    client's errors."""
    try:
        return await answer
    except EnvError as error:
        if error.code == "VALIDATION_ERROR":
            raise _Rejected(str(error)) from error
        raise EnvironmentFailure(failure_kind(error), str(error)) from error
    except (ConnectionError, TimeoutError) as error:
        raise EnvironmentFailure(failure_kind(error), str(error)) from error


def build(options: AwsOptions) -> EnvironmentSpec:
    """Return the specification of the AWS environment."""
    return EnvironmentSpec(
        "aws",
        make=lambda address: AwsEnvironment(
            address, observation_chars=options.observation_chars, show_ids=options.show_ids
        ),
        tasks=lambda split: AwsTaskSet(options, split),
        system_prompt=SYSTEM_PROMPT,
        concurrency=options.pool_size,
        demonstrations=DemonstrationProgram(
            "realhf.aws.training.sft_data",
            lambda request: demonstration_arguments(options, request),
            lambda request: demonstration_scripts(options, request),
            files=tuple(find_matching_files(PACKAGE, ("aws/tasks/**/*",))),
            packages=("ministack", "awscli"),
        ),
        shipped_policy=PACKAGE / "aws" / "training" / "policy",
        launch=environment_server(options),
    )


def demonstration_arguments(options: AwsOptions, request: DemonstrationRequest) -> tuple[str, ...]:
    """Return the command-line arguments of the program that generates demonstrations."""
    argv = ["--episodes-per-task", str(request.episodes_per_task), "--seed", str(request.seed)]
    argv += [
        "--mix",
        f"recovery={request.recovery_fraction}",
        f"habit={request.habit_fraction}",
        "--learn-mistakes",
    ]
    argv += [
        "--tiers",
        *options.tiers,
        "--tags",
        *training_tags(options.tiers, options.tags, options.split),
    ]
    if options.split != "train":
        argv += ["--split", options.split]
    if options.observation_chars != OBSERVATION_CHARS:
        argv += ["--observation-chars", str(options.observation_chars)]
    argv += ["--show-ids"] * options.show_ids
    argv += [f"--{name}" for name in ("slips", "phrasings") if getattr(options, name)]
    return tuple(argv)


def demonstration_scripts(
    options: AwsOptions, request: DemonstrationRequest
) -> Iterator[tuple[str, list[str]]]:
    """Yield (task description, commands) for each episode that the demonstration program would
    play."""
    scripts = write_scripts(
        request.episodes_per_task,
        request.seed,
        options.tiers,
        tags=training_tags(options.tiers, options.tags, options.split),
        split=options.split,
        mix={RECOVERY: request.recovery_fraction, HABIT: request.habit_fraction},
        learn_mistakes=True,
        slips=options.slips,
        rephrased=options.phrasings,
        shown=options.observation_chars,
    )
    for script in scripts:
        yield script.task.description, [line.command for line in script.lines]


DEFINITION = EnvironmentDefinition(AwsOptions, build)
