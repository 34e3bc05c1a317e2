"""Countdown: reach a number by arithmetic on given numbers, judged by a verifier that is a pure
function.

    answer  := step (separator step)*          separator: "," or a line break
    step    := sum ["=" value]
    sum     := product (("+" | "-") product)*
    product := atom (("*" | "/") atom)*
    atom    := number | "(" sum ")"
    value   := ["-"] number ["/" number]

``3*4=12, 12+5=17`` reaches 17 from 3, 4 and 5, and so does ``3*4+5``. A step takes numbers from a
pool, each once, and adds its value to the pool if that is a non-negative integer, so that a later
step may use it. A stated value must be right. Values are exact fractions.

The text is hostile input. Every number is taken from the pool as it is read, so no value exceeds
what the given numbers allow; length, depth and digits are bounded before anything is computed.

- *solution*: the steps that reach the target.
- *recovery*: a line of steps that misses it, and on the next line the right steps. Only the last
  line is judged.
- *habit*: an answer that fails. Most claim the target: the last step states it although its
  operation has another value. The others miss it honestly.

Solutions are drawn together with the puzzle, without a search.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from realhf.api.environment import (
    HABIT,
    HELD_OUT,
    RECOVERY,
    TRAIN,
    Demonstration,
    DemonstrationRequest,
    EnvironmentDefinition,
    EnvironmentSpec,
    Task,
)
from realhf.api.option import option
from realhf.base.installation import PACKAGE
from realhf.env.loader.single_turn import VerifierEnvironment, read_verifier
from realhf.env.loader.tasks import GroupedTaskSet, is_held_out
from realhf.env.loader.threads import Threads

MAX_ANSWER_CHARS = 240
"""Maximum length of an answer in characters; eight numbers with all steps written out need
fewer."""
MAX_DEPTH = 16
"""Maximum depth of nested parentheses."""
MAX_DIGITS = 18
_DIGITS = "0123456789"
_SYMBOLS = "+-*/()=,"


class ArithmeticRefused(ValueError):
    """Raised if a text is not valid arithmetic on the given numbers; the message states the
    reason."""


@dataclass(frozen=True)
class EvaluationResult:
    """Result of valid steps."""

    value: Fraction
    """Value of the last step."""
    operations: int
    """Number of operations."""


def evaluate(text: str, numbers: Iterable[int]) -> EvaluationResult:
    """Return the result of the steps in ``text``. Raises ArithmeticRefused for a syntax error, a
    number that is not available (any more), a wrong stated value, or a division by 0."""
    return _Reader(_tokens(text), Counter(numbers)).steps()


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_ANSWER_CHARS:
        raise ArithmeticRefused(f"the answer has more than {MAX_ANSWER_CHARS} characters")
    tokens: list[str] = []
    position = 0
    while position < len(text):
        character = text[position]
        end = position + 1
        if character in _DIGITS:
            while end < len(text) and text[end] in _DIGITS:
                end += 1
            if end - position > MAX_DIGITS or (character == "0" and end - position > 1):
                raise ArithmeticRefused("a number is too long or begins with 0")
            tokens.append(text[position:end])
        elif character in _SYMBOLS:
            tokens.append(character)
        elif character == "\n":
            tokens += [","] if tokens and tokens[-1] != "," else []
        elif character not in " \t\r":
            raise ArithmeticRefused(f"{character!r} is not allowed")
        position = end
    return tokens


class _Reader:
    """Recursive-descent parser that takes numbers from the pool as it reads them."""

    def __init__(self, tokens: list[str], pool: Counter[int]) -> None:
        self._tokens = tokens
        self._at = 0
        self._pool = pool
        self._depth = self._operations = 0

    def steps(self) -> EvaluationResult:
        """Parse all steps and return the value of the last one. Raises ArithmeticRefused."""
        value = self._step()
        while self._skip(","):
            value = self._step()
        if self._at < len(self._tokens):
            raise ArithmeticRefused(f"{self._tokens[self._at]!r} is not expected there")
        return EvaluationResult(value, self._operations)

    def _step(self) -> Fraction:
        value = self._sum()
        if self._skip("=") and self._value() != value:
            raise ArithmeticRefused("a step states a wrong value")
        if value.denominator == 1 and value >= 0:
            self._pool[value.numerator] += 1
        return value

    def _value(self) -> Fraction:
        sign = -1 if self._skip("-") else 1
        value = Fraction(sign * self._digits())
        return self._quotient(value, Fraction(self._digits())) if self._skip("/") else value

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._skip("+", "-"):
            term = self._product()
            value = value + term if sign == "+" else value - term
            self._operations += 1
        return value

    def _product(self) -> Fraction:
        value = self._atom()
        while sign := self._skip("*", "/"):
            factor = self._atom()
            value = value * factor if sign == "*" else self._quotient(value, factor)
            self._operations += 1
        return value

    def _atom(self) -> Fraction:
        if not self._skip("("):
            number = self._digits()
            if self._pool[number] < 1:
                raise ArithmeticRefused(f"{number} is not there, or is used up")
            self._pool[number] -= 1
            return Fraction(number)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ArithmeticRefused(f"more than {MAX_DEPTH} parentheses stand within each other")
        value = self._sum()
        if not self._skip(")"):
            raise ArithmeticRefused("a parenthesis is not closed")
        self._depth -= 1
        return value

    def _quotient(self, value: Fraction, divisor: Fraction) -> Fraction:
        if not divisor:
            raise ArithmeticRefused("a step divides by 0")
        return value / divisor

    def _digits(self) -> int:
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if not token or token[0] not in _DIGITS:
            raise ArithmeticRefused(f"a number is expected, not {token or 'the end'!r}")
        self._at += 1
        return int(token)

    def _skip(self, *expected: str) -> str:
        """Consume and return the next token if it is one of ``expected``; otherwise return ""."""
        if self._at < len(self._tokens) and self._tokens[self._at] in expected:
            self._at += 1
            return self._tokens[self._at - 1]
        return ""


PARTIAL_CREDIT = 0.1
_OPEN = "<answer>"
_CLOSE = "</answer>"


@dataclass(frozen=True)
class CountdownVerdict:
    """Verdict on a completion."""

    valid: bool
    """Whether the completion is valid arithmetic on the given numbers, with at least one
    operation."""
    solved: bool
    """Whether the completion is valid and reaches the target."""
    problem: str = ""
    """Why the task is not solved, in a sentence."""


def extract_answer(completion: str) -> str:
    """Return the judged part of a completion: the content of the last ``<answer>`` element, or the
    last line that is not blank. The text before is reasoning."""
    before, closing, _ = completion.rpartition(_CLOSE)
    if closing and _OPEN in before:
        return before.rpartition(_OPEN)[2].strip()
    return completion.rstrip().rpartition("\n")[2].strip()


def judge(completion: str, numbers: Sequence[int], target: int) -> CountdownVerdict:
    """Judge a completion against the ``numbers`` and the ``target`` of its row. Never raises."""
    try:
        result = evaluate(extract_answer(completion), numbers)
    except ArithmeticRefused as error:
        return CountdownVerdict(False, False, str(error))
    if not result.operations:
        return CountdownVerdict(False, False, "a number alone is no arithmetic")
    if result.value != target:
        return CountdownVerdict(
            True, False, f"the last step comes to {_format_value(result.value)}, not to {target}"
        )
    return CountdownVerdict(True, True)


def reward(
    completion: str,
    *,
    numbers: Sequence[int],
    target: int,
    partial_credit: float = PARTIAL_CREDIT,
    **row: Any,
) -> float:
    """Return 1 for steps that reach ``target`` from ``numbers``, each used at most once;
    ``partial_credit`` for right arithmetic on them that comes to something else; 0 for everything
    else. Other columns of the row do not matter."""
    verdict = judge(completion, numbers, target)
    return 1.0 if verdict.solved else partial_credit * verdict.valid


def _format_value(value: Fraction) -> str:
    text = str(value)
    return text if len(text) <= MAX_ANSWER_CHARS else "a very large number"


PROMPT_COLUMN = "prompt"
_MAX_DRAWS = 10_000


@dataclass(frozen=True)
class Level:
    """Properties of the puzzles of one difficulty level."""

    numbers: int
    """How many numbers are given."""
    max_number: int
    """Largest given number."""
    min_target: int
    """Smallest target."""
    max_target: int
    """Largest target, and largest intermediate value."""


LEVELS: Mapping[str, Level] = MappingProxyType(
    {
        "two-small": Level(2, 25, 1, 24),
        "two-large": Level(2, 40, 25, 100),
        "three-small": Level(3, 8, 1, 24),
        "three-large": Level(3, 12, 25, 60),
        "four-small": Level(4, 8, 1, 24),
        "four-large": Level(4, 12, 25, 60),
    }
)
"""Levels by name, easiest first. Each level is a template and a group of its own."""


@dataclass(frozen=True)
class Step:
    """One operation of a solution."""

    left: int
    """Left operand, from the pool."""
    operator: str
    """One of + - * /."""
    right: int
    """Right operand, from the pool."""
    value: int
    """Result, which is added to the pool."""

    def __str__(self) -> str:
        return f"{self.left}{self.operator}{self.right}={self.value}"


@dataclass(frozen=True)
class Puzzle:
    """A task instance with its solution."""

    numbers: tuple[int, ...]
    """Given numbers."""
    target: int
    """Number to reach."""
    solution: tuple[Step, ...]
    """Operations that reach the target, one fewer than there are numbers."""

    @property
    def split(self) -> str:
        """Split to which the puzzle belongs, by a stable hash of the target and of the numbers in
        any order."""
        return choose_split(self.numbers, self.target)


def choose_split(numbers: Iterable[int], target: int) -> str:
    """Return the only split in which these numbers with this target occur."""
    text = f"{' '.join(map(str, sorted(numbers)))} -> {target}"
    return HELD_OUT if is_held_out(text) else TRAIN


def list_operations(left: int, right: int) -> list[Step]:
    """Return every operation on two numbers whose result is a positive integer, except trivial ones
    (multiplication or division by 1). The larger number is the left operand."""
    high = max(left, right)
    low = min(left, right)
    operations = [Step(high, "+", low, high + low)]
    if high > low:
        operations.append(Step(high, "-", low, high - low))
    if low > 1:
        operations.append(Step(high, "*", low, high * low))
        if high % low == 0:
            operations.append(Step(high, "/", low, high // low))
    return operations


def draw_puzzle(level: Level, split: str, rng: random.Random) -> Puzzle:
    """Draw a puzzle of a level and ``split`` that cannot be solved with fewer operations than its
    solution has.

    Raises RuntimeError if no such puzzle is found for the level.
    """
    for _ in range(_MAX_DRAWS):
        numbers = tuple(rng.randint(1, level.max_number) for _ in range(level.numbers))
        solution = _draw_solution(numbers, level, rng)
        if solution and not _has_shortcut(numbers, solution[-1].value):
            puzzle = Puzzle(numbers, solution[-1].value, solution)
            if puzzle.split == split:
                return puzzle
    raise RuntimeError(f"{level} has no puzzle of the split {split!r} in {_MAX_DRAWS} draws")


def _draw_solution(numbers: Sequence[int], level: Level, rng: random.Random) -> tuple[Step, ...]:
    """Return random steps that use all numbers and whose result is within the bounds of the level;
    () if the drawn steps do not satisfy this."""
    pool = list(numbers)
    steps = []
    while len(pool) > 1:
        left, right = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        possible = [step for step in list_operations(left, right) if step.value <= level.max_target]
        if not possible:
            return ()
        step = rng.choice(possible)
        steps.append(step)
        pool.append(step.value)
    return tuple(steps) if pool[0] >= level.min_target else ()


def _has_shortcut(numbers: Sequence[int], target: int) -> bool:
    """Return whether one of the numbers is the target already, or a single operation reaches the
    target although the puzzle needs more."""
    if target in numbers:
        return True
    pairs = [(a, b) for i, a in enumerate(numbers) for b in numbers[i + 1 :]]
    return len(numbers) > 2 and any(
        step.value == target for a, b in pairs for step in list_operations(a, b)
    )


class CountdownTasks(GroupedTaskSet):
    """Task set of the levels for one split. Every seed draws another instance, and no combination
    of numbers and target occurs in both splits. Payloads are rows for ``reward``. Raises ValueError
    for an unknown level or split."""

    def __init__(
        self, levels: Iterable[str], split: str, partial_credit: float = PARTIAL_CREDIT
    ) -> None:
        super().__init__(
            {name: name for name in LEVELS}, [*LEVELS], levels, split, group_word="level"
        )
        self._partial_credit = partial_credit

    def puzzle(self, template_id: str, seed: int) -> Puzzle:
        """Return the puzzle for ``seed``, with its solution. Raises KeyError for a level that is
        not in the set."""
        level = LEVELS[self.group_of[template_id]]
        return draw_puzzle(
            level, self.split, random.Random(f"countdown {self.split} {template_id} {seed}")
        )

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the instance for ``seed``. Raises KeyError for a level that is not in the set."""
        puzzle = self.puzzle(template_id, seed)
        row = {
            PROMPT_COLUMN: prompt(puzzle.numbers, puzzle.target),
            "numbers": list(puzzle.numbers),
            "target": puzzle.target,
            "partial_credit": self._partial_credit,
        }
        return Task(
            f"{template_id}/{seed}", group=self.group_of[template_id], payload=row, seed=seed
        )


def prompt(numbers: Iterable[int], target: int) -> str:
    """Return the request to the policy."""
    return f"Reach {target} with {' '.join(map(str, numbers))}."


CLAIMED_SHARE = 0.6
"""Share of habits whose answer claims to reach the target."""
_SEED_BITS = 31


def demonstrations(tasks: CountdownTasks, request: DemonstrationRequest) -> Iterator[Demonstration]:
    """Yield the requested demonstrations in random order. Every level gets the rounded share of
    each kind."""
    rng = random.Random(f"countdown demonstrations {request.seed}")
    draws = [(level, kind) for level in tasks.groups for kind in request.kinds()]
    rng.shuffle(draws)
    for level, kind in draws:
        yield demonstration(tasks, level, rng.getrandbits(_SEED_BITS), kind, rng)


def demonstration(
    tasks: CountdownTasks, level: str, seed: int, kind: str, rng: random.Random
) -> Demonstration:
    """Return an answer of kind ``kind`` for the instance that ``seed`` draws."""
    puzzle = tasks.puzzle(level, seed)
    right = format_steps(puzzle.solution)
    if kind == HABIT:
        answer = (
            claim_target(puzzle, rng) if rng.random() < CLAIMED_SHARE else miss_target(puzzle, rng)
        )
    else:
        answer = f"{miss_target(puzzle, rng)}\n{right}" if kind == RECOVERY else right
    return Demonstration(
        tasks.instantiate(level, seed), (answer,), kind=kind, succeeds=kind != HABIT
    )


def format_steps(steps: tuple[Step, ...]) -> str:
    """Format steps as an answer."""
    return ", ".join(map(str, steps))


def miss_target(puzzle: Puzzle, rng: random.Random) -> str:
    """Return valid arithmetic that does not reach the target: the last operation is replaced."""
    last = puzzle.solution[-1]
    alternatives = [
        step for step in list_operations(last.left, last.right) if step.value != puzzle.target
    ]
    if not alternatives:  # 1 and 1, target 2: in this puzzle all other operations are trivial
        alternatives = [Step(last.left, "*", last.right, last.left * last.right)]
    return format_steps((*puzzle.solution[:-1], rng.choice(alternatives)))


def claim_target(puzzle: Puzzle, rng: random.Random) -> str:
    """Return steps whose last one claims to result in the target although its operation has another
    value."""
    last = puzzle.solution[-1]
    wrong = [sign for sign, value in _operator_values(last) if value != puzzle.target]
    return format_steps((*puzzle.solution[:-1], replace(last, operator=rng.choice(wrong))))


def _operator_values(step: Step) -> list[tuple[str, float]]:
    left = step.left
    right = step.right
    return [("+", left + right), ("-", left - right), ("*", left * right), ("/", left / right)]


SYSTEM_PROMPT = (
    "Reach the target with + - * / and the given numbers, each at most once. "
    "The last line of your reply is the steps, such as: 3*4=12, 12+5=17"
)


@dataclass
class CountdownOptions:
    """Countdown: reach a number by arithmetic on given numbers, in a single turn."""

    levels: list[str] = option(
        [*LEVELS], "Puzzles are drawn from these levels.", choices=tuple(LEVELS)
    )
    partial_credit: float = option(
        PARTIAL_CREDIT,
        "Right arithmetic that misses the target earns this much.",
        at_least=0,
        at_most=1,
    )


def build(options: CountdownOptions) -> EnvironmentSpec:
    """Return the environment with these options. Raises ValueError for an unknown level."""
    verifier = read_verifier(reward)
    threads = Threads("countdown")

    def tasks(split: str) -> CountdownTasks:
        return CountdownTasks(options.levels, split, options.partial_credit)

    training = tasks(TRAIN)
    return EnvironmentSpec(
        name="countdown",
        make=lambda _: VerifierEnvironment(verifier, PROMPT_COLUMN, threads),
        tasks=tasks,
        system_prompt=SYSTEM_PROMPT,
        demonstrate=lambda request: demonstrations(training, request),
        shipped_policy=PACKAGE / "environments" / "policies" / "countdown",
    )


DEFINITION = EnvironmentDefinition(CountdownOptions, build)
