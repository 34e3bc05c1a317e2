"""Countdown: steps of arithmetic and hostile text, the verifier, the levels, and the environment
with its solver."""

from __future__ import annotations

import ast
import asyncio
import json
import operator
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.environment import (
    HELD_OUT,
    SPLITS,
    TRAIN,
    AssistantMessage,
    DemonstrationRequest,
    Environment,
    EnvironmentFailure,
    EnvironmentSpec,
    Task,
    Turn,
)
from realhf.api.option import problems
from realhf.environments.countdown import (
    LEVELS,
    MAX_ANSWER_CHARS,
    MAX_DEPTH,
    PARTIAL_CREDIT,
    ArithmeticRefused,
    CountdownOptions,
    CountdownTasks,
    choose_split,
    evaluate,
    extract_answer,
    judge,
    list_operations,
    reward,
)
from realhf.registry import environments
from tests.cheapest import cheapest

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def reference(node: ast.AST) -> tuple[Fraction, list[int]]:
    """The value of a parsed expression and the numbers in it: the independent formula."""
    if isinstance(node, ast.Expression):
        return reference(node.body)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), [node.value]
    assert isinstance(node, ast.BinOp), ast.dump(node)
    (left, used), (right, too) = reference(node.left), reference(node.right)
    return OPERATORS[type(node.op)](left, right), used + too


def python_says(text: str) -> tuple[Fraction, list[int]] | None:
    try:
        return reference(ast.parse(text, mode="eval"))
    except (SyntaxError, AssertionError, KeyError, ZeroDivisionError):
        return None


numbers = st.integers(0, 30)
expressions = st.recursive(
    numbers.map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map("".join),
        inner.map(lambda text: f"({text})"),
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(expressions)
def test_an_expression_comes_to_what_python_says(text: str):
    """Random expressions, with every number they need in the pool: the same exact fraction, or a
    refusal by both."""
    expected = python_says(text)
    assert len(text) <= MAX_ANSWER_CHARS
    if expected is None:
        with pytest.raises(ArithmeticRefused):
            evaluate(text, range(31))
        return
    found = evaluate(text, expected[1])
    assert found.value == expected[0]
    assert found.operations == len(expected[1]) - 1


@pytest.mark.slow
@given(expressions, st.data())
def test_a_number_too_few_is_refused(text: str, data: st.DataObject):
    """Without one of the numbers that an expression uses, it is refused."""
    expected = python_says(text)
    if expected is None:
        return
    less = list(expected[1])
    less.remove(data.draw(st.sampled_from(less)))
    with pytest.raises(ArithmeticRefused):
        evaluate(text, less)


@pytest.mark.slow
@given(st.text(alphabet="0123456789+-*/()=, \n", max_size=30), st.lists(numbers, max_size=5))
def test_random_text_is_accepted_only_as_python_would(text: str, pool: list[int]):
    """Any text is refused or evaluated. One expression without a stated value is evaluated as
    Python does, and uses only what the pool holds."""
    try:
        found = evaluate(text, pool)
    except ArithmeticRefused:
        return
    if "," not in text and "=" not in text and "\n" not in text.strip():
        expected = python_says(text.strip())
        assert expected is not None
        assert found.value == expected[0]
        assert not Counter(expected[1]) - Counter(pool)


@pytest.mark.slow
@given(st.lists(st.integers(1, 20), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_a_chain_of_steps_comes_to_what_its_nested_form_does(pool: list[int], rng):
    """Steps that hand their values on equal the one expression in which every value is replaced by
    its step."""
    steps = []
    nested = [(value, str(value)) for value in pool]
    while len(nested) > 1:
        (left, first), (right, second) = (nested.pop(rng.randrange(len(nested))) for _ in range(2))
        if left < right:
            (left, first), (right, second) = (right, second), (left, first)
        sign = rng.choice("+-*")
        value = {"+": left + right, "-": left - right, "*": left * right}[sign]
        steps.append(f"{left}{sign}{right}={value}")
        nested.append((value, f"({first}{sign}{second})"))
    assert (
        evaluate(", ".join(steps), pool).value == evaluate(nested[0][1], pool).value == nested[0][0]
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3*4=12, 12+5=17", 17),
        ("3 * 4 = 12,\n12 + 5 = 17", 17),
        ("3*4=12\n\n12+5", 17),
        ("3*4+5=17", 17),
        ("5-4=1, 3-1", 2),
        ("4-5=-1", -1),
        ("3/4=3/4", Fraction(3, 4)),
        ("3/4=6/8", Fraction(3, 4)),
        ("5*(3/4)", Fraction(15, 4)),
        ("3-4-5", -6),
        ("3/4/5", Fraction(3, 20)),
    ],
)
def test_right_steps(text: str, value: Fraction):
    assert evaluate(text, [3, 4, 5]).value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ",",
        "3,",
        ",3",
        "3+",
        "+3",
        "-3+4",
        "3 4",
        "3(4)",
        "(3)4",
        "3+4=8",
        "3+4=",
        "3+4==7",
        "3+4=7=7",
        "=7",
        "3*4=12, 3+5=8",
        "3*4=12, 12+5=17, 12+1",
        "4-5=-1, -1+3",
        "3/4=3/4, 3/4",
        "3/0",
        "3/(4-4)",
        "3/4=3/0",
        "3**4",
        "3^4",
        "3//4",
        "3%4",
        "3e4",
        "3.0+4",
        "0x3+4",
        "3_4",
        "03+4",
        "3+4#",
        "3+4;",
        "a+3",
        "__import__('os')",
        "3+4 if 1 else 5",
        "٣+٤",  # Arabic digits
        "３+４",  # full-width digits
        "³+4",
        "3−4",  # the minus sign of typography
        "3×4",
        "3\x004",
        "3+\u200b4",
        "3+4\x0b",
        "\ud800",
        "(3+4",
        "3+4)",
        "()",
        "(" * (MAX_DEPTH + 1) + "3" + ")" * (MAX_DEPTH + 1),
        "(" * 100_000,
        "9" * 19,
        "9" * 200,
        "3+" * 100 + "3",
        "3*" * 1_000_000,
        "9" * 5_000_000,
    ],
)
def test_what_is_no_right_step_is_refused_at_once(text: str):
    def step() -> None:
        with pytest.raises(ArithmeticRefused) as refused:
            evaluate(text, [3, 4, 5])
        assert len(str(refused.value)) < 120

    assert cheapest(step, 0.1) < 0.1


def test_a_given_number_may_be_large_and_depth_may_be_used_up():
    """The limits stand where the text is longer than arithmetic needs, not before."""
    most = 10**18 - 1
    assert evaluate(f"{most}*{most}", [most, most]).value == most * most
    assert evaluate("(" * MAX_DEPTH + "3" + ")" * MAX_DEPTH, [3]).value == 3
    with pytest.raises(ArithmeticRefused, match="characters"):
        evaluate(" " * MAX_ANSWER_CHARS + "3", [3])


def test_a_number_that_is_given_twice_may_be_used_twice():
    assert evaluate("7*7", [7, 7]).value == 49
    with pytest.raises(ArithmeticRefused, match="used up"):
        evaluate("7*7", [7, 8])


ROW = {"numbers": [3, 4, 5], "target": 17, "prompt": "not read", "level": "not read"}


@pytest.mark.parametrize(
    ("completion", "earned"),
    [
        ("3*4=12, 12+5=17", 1.0),
        ("(3*4)+5", 1.0),
        ("thinking: 3+4=9?\n3*4+5\n\n", 1.0),
        ("<answer>3*4=12\n12+5=17</answer> done", 1.0),
        ("<answer>3+4</answer> no, <answer> 3*4+5 </answer>", 1.0),
        ("3+4+5=12", PARTIAL_CREDIT),
        ("3*4+5\n3+4", PARTIAL_CREDIT),
        ("<answer>3*4+5</answer><answer>3+4</answer>", PARTIAL_CREDIT),
        ("3*4+5=17 done", 0.0),
        ("12+5=17", 0.0),
        ("3+4=17", 0.0),
        ("17", 0.0),
        ("3", 0.0),
        ("3+3+3+4+4", 0.0),
        ("", 0.0),
        ("<answer></answer>", 0.0),
        ("</answer>3*4+5<answer>", 0.0),
    ],
)
def test_what_a_completion_earns(completion: str, earned: float):
    assert reward(completion, **ROW) == earned
    assert judge(completion, ROW["numbers"], ROW["target"]).solved == (earned == 1)


def test_the_partial_credit_can_be_chosen():
    assert reward("3+4", **ROW, partial_credit=0) == 0
    assert reward("3*4+5", **ROW, partial_credit=0) == 1


def test_the_target_among_the_numbers_is_no_answer_by_itself():
    """Naming a number is no arithmetic, even where it is the target."""
    assert reward("5", numbers=[5, 3], target=5) == 0


@given(st.text(max_size=200))
def test_any_text_is_judged(completion: str):
    """No completion raises, and a completion that does not succeed says why."""
    verdict = judge(completion, [3, 4, 5], 17)
    assert verdict.solved == (not verdict.problem)
    assert len(extract_answer(completion)) <= len(completion)


def test_a_huge_completion_is_judged_by_its_last_line():
    assert reward("(" * 3_000_000 + "\n3*4+5", **ROW) == 1
    assert reward("<answer>" * 300_000 + "3*4+5" + "</answer>" * 300_000, **ROW) == 0


DRAWS = 150


@pytest.mark.slow
@pytest.mark.parametrize("name", LEVELS)
def test_a_level_keeps_its_bounds_and_its_solution_is_right(name: str):
    """Every puzzle has as many numbers as its level says, within its bounds, and its solution earns
    everything."""
    level = LEVELS[name]
    for split in SPLITS:
        tasks = CountdownTasks([name], split)
        for seed in range(DRAWS):
            puzzle = tasks.puzzle(name, seed)
            task = tasks.instantiate(name, seed)
            assert (tuple(task.payload["numbers"]), task.payload["target"]) == (
                puzzle.numbers,
                puzzle.target,
            )
            assert (
                task.payload["prompt"]
                == f"Reach {puzzle.target} with {' '.join(map(str, puzzle.numbers))}."
            )
            assert json.loads(json.dumps(task.payload)) == task.payload
            assert len(puzzle.numbers) == level.numbers == len(puzzle.solution) + 1
            assert all(1 <= number <= level.max_number for number in puzzle.numbers)
            assert level.min_target <= puzzle.target <= level.max_target
            assert puzzle.target not in puzzle.numbers
            assert reward(", ".join(map(str, puzzle.solution)), **task.payload) == 1


def test_a_puzzle_of_more_numbers_needs_more_than_one_operation():
    for name in ("three-small", "four-large"):
        for seed in range(DRAWS):
            puzzle = CountdownTasks([name], TRAIN).puzzle(name, seed)
            pairs = [(a, b) for i, a in enumerate(puzzle.numbers) for b in puzzle.numbers[i + 1 :]]
            assert puzzle.target not in {
                step.value for a, b in pairs for step in list_operations(a, b)
            }


@pytest.mark.slow
def test_no_puzzle_is_in_both_splits():
    """Numbers in another order are the same puzzle. The splits are disjoint whatever is drawn, and
    both are endless enough to hold hundreds of puzzles."""
    seen: dict[str, set] = {TRAIN: set(), HELD_OUT: set()}
    for split in SPLITS:
        tasks = CountdownTasks(LEVELS, split)
        for name in LEVELS:
            for seed in range(DRAWS):
                puzzle = tasks.puzzle(name, seed)
                seen[split].add((tuple(sorted(puzzle.numbers)), puzzle.target))
    assert not seen[TRAIN] & seen[HELD_OUT]
    assert min(map(len, seen.values())) > 300
    assert choose_split([9, 2, 5], 7) == choose_split([2, 5, 9], 7)


def test_the_same_seed_draws_the_same_instance_and_another_one_another():
    tasks = CountdownTasks(LEVELS, TRAIN)
    again = CountdownTasks(LEVELS, TRAIN)
    first = [tasks.instantiate("four-large", seed) for seed in range(20)]
    assert first == [again.instantiate("four-large", seed) for seed in range(20)]
    assert len({str(task.payload) for task in first}) > 15
    assert len({task.id for task in first}) == 20


KINDS = ("solution", "recovery", "habit")


def spec(**options: Any) -> EnvironmentSpec:
    definition = environments.get("countdown")
    return definition.build(definition.options(**options))


async def play(environment: Environment, task: Task, text: str) -> Turn:
    opening = await environment.reset(task.payload, seed=task.seed)
    assert [message["role"] for message in opening.messages] == ["user"]
    assert not opening.tools
    return await environment.step(AssistantMessage(text, text=text))


async def test_every_demonstration_ends_as_it_says_and_the_shares_are_kept():
    """Solutions and recoveries earn 1, habits at most the partial credit; each level has its share
    of each kind."""
    countdown = spec()
    environment = countdown.make("")
    counts = Counter()
    assert countdown.demonstrate
    for shown in countdown.demonstrate(
        DemonstrationRequest(20, 5, habit_fraction=0.35, recovery_fraction=0.15)
    ):
        assert len(shown.turns) == 1
        turn = await play(environment, shown.task, shown.turns[0])
        assert turn.done
        assert turn.metrics["success"] == shown.succeeds == (turn.reward == 1)
        assert turn.reward is not None and (shown.succeeds or turn.reward <= 0.1)
        counts[shown.task.group, shown.kind] += 1
    levels = countdown.tasks("train").groups
    assert counts == {
        (level, kind): n for level in levels for kind, n in zip(KINDS, (10, 3, 7), strict=True)
    }


def test_demonstrations_are_decided_by_the_seed_and_leave_held_out_puzzles_alone():
    countdown = spec(levels=["two-small"])
    assert countdown.demonstrate
    first, again, other = (
        [*countdown.demonstrate(DemonstrationRequest(30, seed, habit_fraction=0.5))]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    held_out = countdown.tasks("heldout")
    kept = {(tuple(sorted(task.payload["numbers"])), task.payload["target"]) for task in
            (held_out.instantiate("two-small", seed) for seed in range(200))}  # fmt: skip
    assert not kept & {
        (tuple(sorted(d.task.payload["numbers"])), d.task.payload["target"]) for d in first + other
    }


async def test_nothing_earns_nothing():
    environment = spec().make("")
    task = spec().tasks("train").instantiate("three-large", 1)
    for text in ("", " ", "I do not know.", str(task.payload["target"])):
        turn = await play(environment, task, text)
        assert (turn.reward, turn.done, turn.metrics["success"]) == (0, True, 0)


@pytest.mark.slow
async def test_an_instance_plays_one_episode_after_another_and_many_live_at_once():
    """Instances share nothing: five hundred of them play different puzzles at the same time."""
    countdown = spec()
    tasks = countdown.tasks("heldout")

    async def episode(seed: int) -> float | None:
        environment = countdown.make("")
        assert isinstance(environment, Environment)
        earned = None
        for again in (seed, seed + 1):
            puzzle = tasks.puzzle("three-small", again)  # pyright: ignore[reportAttributeAccessIssue]
            task = tasks.instantiate("three-small", again)
            earned = (await play(environment, task, ", ".join(map(str, puzzle.solution)))).reward
            assert earned == 1
        await environment.close()
        return earned

    assert await asyncio.gather(*(episode(seed) for seed in range(500))) == [1.0] * 500


@pytest.mark.parametrize(
    "task", [{}, {"prompt": "x", "numbers": [1, 2]}, {"prompt": "x", "target": 3}]
)
async def test_a_task_without_a_column_is_an_error(task: dict[str, Any]):
    """The player counts it as a failure of the environment, not as a reward."""
    environment = spec().make("")
    with pytest.raises(EnvironmentFailure) as failed:
        await environment.reset(task, seed=1)
        await environment.step(AssistantMessage("1+2"))
    assert failed.value.kind == "internal"


async def test_the_partial_credit_is_an_option():
    for credit in (0.0, 0.25):
        countdown = spec(partial_credit=credit)
        task = countdown.tasks("train").instantiate("two-small", 1)
        first, second = task.payload["numbers"]
        wrong = "+" if first + second != task.payload["target"] else "*"
        turn = await play(countdown.make(""), task, f"{first}{wrong}{second}")
        assert (turn.reward, turn.metrics["success"]) == (credit, 0)


def test_options_are_checked():
    assert not [*problems(CountdownOptions())]
    assert [*problems(CountdownOptions(levels=["five"]))]
    assert [*problems(CountdownOptions(partial_credit=2))]
