"""Data sets of the package ``reasoning_gym``: ``env.path=reasoning_gym env.dataset=NAME``.

A data set generates questions from seeds and judges answers by its own verifier. An episode is one
question and one answer, which stands between ``<answer>`` and ``</answer>``.

Source: reasoning_gym 0.1.25. Some of its verifiers evaluate the answer as a Python expression
(``eval``, ``sympy.parse_expr``). The answer is the policy's text, so such data sets are refused.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

from realhf.api.environment import (
    HABIT,
    SOLUTION,
    TRAIN,
    AssistantMessage,
    Demonstration,
    DemonstrationRequest,
    EnvironmentDefinition,
    EnvironmentFailure,
    EnvironmentSpec,
    Opening,
    Turn,
)
from realhf.api.option import option
from realhf.base.installation import import_extra
from realhf.base.text import suggest_names
from realhf.env.loader.tasks import SeedTaskSet
from realhf.env.loader.threads import Threads
from realhf.env.loader.validation import validate_number

EXTRA = "reasoning_gym"
"""Name of the extra of this package, and of the package itself."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympify)\s*\(")
"""Calls that run Python code in a string."""
_SIMPLIFIES = re.compile(r"\b(simplify|nsimplify)\s*\(")
"""Calls that run Python code in a string if they are those of sympy."""
_COMPOSITE = "composite"
"""Data set of the package that mixes others; ``env.mix`` does so with metrics of each."""
_MAX_ANSWER_CHARS = 4096
"""Maximum number of characters of an answer; a longer one is wrong."""
_FULL_SCORE = 1.0 - 1e-9
"""Minimum score of a right answer."""
_MAX_DRAWS = 1000
"""Maximum number of questions that are drawn for one demonstration."""
_SEED_BITS = 30
SYSTEM_PROMPT = (
    "Answer the question. Put the final answer, without any explanation, between <answer> and "
    "</answer>."
)


@dataclass
class ReasoningGymOptions:
    """A data set of the package ``reasoning_gym``."""

    needs: ClassVar[str] = "dataset"

    dataset: str = option("", "Name of the data set, such as leg_counting.")
    args: dict[str, Any] = option(
        {}, "Options of the data set's generator, such as env.args.max_animals=4."
    )
    partial_credit: bool = option(
        False,
        "Pay the verifier's scores below 1, too. Many verifiers pay a part for a text that only "
        "contains the right answer.",
    )
    timeout_s: float = option(
        20.0,
        "Generating a question or judging an answer takes at most this time (s).",
        above=0,
        at_most=3600,
        on_resume="free",
    )
    system_prompt: str = option(
        SYSTEM_PROMPT, "The system message; it should say that the answer stands in <answer> tags."
    )


def build(options: ReasoningGymOptions) -> EnvironmentSpec:
    """Return the specification of the environment.

    Raises ValueError that names the option for a missing package, an unknown data set, one whose
    verifier evaluates answers as Python, and options that its generator does not take.
    """
    if not options.dataset:
        raise ValueError("env.dataset is missing: the name of a data set of reasoning_gym")
    factory = import_extra("reasoning_gym.factory", EXTRA)
    known: Mapping[str, tuple[type[Any], type[Any]]] = factory.DATASETS
    if options.dataset not in known:
        raise ValueError(
            f"env.dataset={options.dataset}: reasoning_gym has no such data set"
            f"{suggest_names(options.dataset, sorted(known))}"
        )
    kind, config = known[options.dataset]
    _check_dataset(options, kind, config)
    generator = Generator(options.dataset, partial(_make_dataset, factory, options))
    try:
        generator.question(0)
    except Exception as error:
        raise ValueError(
            f"env.dataset={options.dataset}, env.args: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from None
    threads = Threads(f"reasoning_gym {options.dataset}")
    return EnvironmentSpec(
        f"reasoning_gym {options.dataset}",
        lambda _: ReasoningGymEnvironment(
            generator, threads, options.timeout_s, partial_credit=options.partial_credit
        ),
        partial(SeedTaskSet, options.dataset),
        system_prompt=options.system_prompt,
        demonstrate=partial(_demonstrate, generator),
        max_turns=1,
    )


def _demonstrate(generator: Generator, request: DemonstrationRequest) -> Iterator[Demonstration]:
    """Yield right answers that the verifier accepts, and as habits answers of other questions that
    it does not accept. One turn has no room for a recovery; a right answer takes its place."""
    rng = random.Random(f"reasoning_gym {request.seed}")
    tasks = SeedTaskSet(generator.name, TRAIN)
    answer = ""
    for kind in request.kinds():
        for _ in range(_MAX_DRAWS):
            task = tasks.instantiate(generator.name, rng.getrandbits(_SEED_BITS))
            dataset, entry = generator.question(task.seed)
            other = answer
            answer = str(entry.get("answer") or "").strip()
            text = other if kind == HABIT else answer
            is_right = bool(text) and _score(dataset, text, entry)[0] >= _FULL_SCORE
            if text and is_right == (kind != HABIT):
                yield Demonstration(
                    task,
                    (f"<answer>{text}</answer>",),
                    kind=HABIT if kind == HABIT else SOLUTION,
                    succeeds=is_right,
                )
                break
        else:
            raise ValueError(
                f"env.dataset={generator.name}: in {_MAX_DRAWS} questions there was no answer to "
                f"demonstrate; train from actor.path=FOLDER without actor.warm_start"
            )


def _make_dataset(factory: Any, options: ReasoningGymOptions, seed: int) -> Any:
    return factory.create_dataset(options.dataset, **{**options.args, "seed": seed, "size": 1})


def _check_dataset(options: ReasoningGymOptions, kind: type[Any], config: type[Any]) -> None:
    """Raise ValueError for a data set that is not served, or for options that it does not take."""
    if options.dataset == _COMPOSITE:
        raise ValueError(f"env.dataset={_COMPOSITE} is not served: mix environments with env.mix")
    for module in _find_modules(base.__module__ for base in kind.__mro__):
        source = inspect.getsource(module)
        if _EVALUATES.search(source) or ("sympy" in source and _SIMPLIFIES.search(source)):
            raise ValueError(
                f"env.dataset={options.dataset} is not served: its code evaluates text as Python, "
                f"and answers are the policy's text"
            )
    accepted = sorted({each.name for each in fields(config)} - {"seed", "size"})
    for name in options.args:
        if name not in accepted:
            raise ValueError(
                f"env.args.{name}: the data set {options.dataset} has no such option (it has "
                f"{', '.join(accepted)})"
            )


def _find_modules(names: Iterable[str]) -> Iterator[ModuleType]:
    """Yield the modules of the package among these, and those that they import from it, directly or
    through others."""
    waiting = [*names]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        # Packages only collect what their modules define.
        is_own = name.startswith(EXTRA) and not hasattr(module, "__path__")
        if module is None or name in seen or not is_own:
            continue
        seen.add(name)
        yield module
        for value in vars(module).values():
            if isinstance(value, ModuleType):
                waiting.append(value.__name__)
            elif inspect.isclass(value) or inspect.isroutine(value):
                waiting.append(str(value.__module__))


@dataclass(frozen=True)
class Generator:
    """Generator of the questions of a data set. All methods may block."""

    name: str
    """Name of the data set."""
    make: Any
    """Return the package's data set with one question, given a seed."""

    def question(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Return the package's data set of a seed, and its question."""
        dataset = self.make(seed)
        return dataset, dataset[0]


@dataclass
class ReasoningGymEnvironment:
    """Environment of one turn: a question of the data set, and the verdict of its verifier."""

    generator: Generator
    threads: Threads
    timeout_s: float
    """Limit in seconds of one call of the package."""
    partial_credit: bool
    """Whether scores below 1 are paid."""
    _asked: tuple[Any, dict[str, Any]] | None = field(default=None, init=False)

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Ask the question of a seed. Raises EnvironmentFailure."""
        del task
        dataset, entry = await self._call(partial(self.generator.question, seed))
        self._asked = (dataset, entry)
        return Opening([{"role": "user", "content": str(entry["question"])}])

    async def step(self, message: AssistantMessage) -> Turn:
        """Judge the answer, and end the episode. Raises EnvironmentFailure."""
        if self._asked is None:
            raise EnvironmentFailure("lost", "there is no episode: reset comes first")
        dataset, entry = self._asked
        answers = _ANSWER.findall(message.content)
        answer = answers[-1].strip() if answers else ""
        score = 0.0
        failed = False
        if answer and len(answer) <= _MAX_ANSWER_CHARS:
            score, failed = await self._call(partial(_score, dataset, answer, entry))
        solved = score >= _FULL_SCORE
        metrics = {
            "success": float(solved),
            "answered": float(bool(answer)),
            "verifier_failed": float(failed),
        }
        return Turn((), True, score if solved or self.partial_credit else 0.0, metrics=metrics)

    async def close(self) -> None:
        """Forget the episode."""
        self._asked = None

    async def _call(self, work: Any) -> Any:
        """Return the result of a call of the package. Raises EnvironmentFailure if it fails."""
        name = self.generator.name
        try:
            return await asyncio.wait_for(self.threads.run(work), self.timeout_s)
        except TimeoutError:
            raise EnvironmentFailure(
                "timeout", f"reasoning_gym {name}: no result within {self.timeout_s:g} s"
            ) from None
        except EnvironmentFailure:
            raise
        except Exception as error:
            raise EnvironmentFailure(
                "internal", f"reasoning_gym {name}: {type(error).__name__}: {error}"[:2000]
            ) from error


def _score(dataset: Any, answer: str, entry: Mapping[str, Any]) -> tuple[float, bool]:
    """Return the verifier's score, and whether the verifier failed on the answer.

    A verifier fails on texts that it cannot parse, so such an answer is wrong.
    """
    try:
        score = dataset.score_answer(answer, entry)
    except Exception:
        return 0.0, True
    return validate_number(score, "the score"), False


DEFINITION = EnvironmentDefinition(ReasoningGymOptions, build)
