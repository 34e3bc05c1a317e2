"""A data set with a verifier asks one question and judges one answer; its files are checked before
anything starts."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realhf.api.environment import AssistantMessage, EnvironmentFailure, EnvironmentSpec
from realhf.env.loader.load import load_definition

Build = Callable[..., EnvironmentSpec]

REWARD = """
def reward(completion, answer, **row):
    return float(completion.strip() == str(answer))
"""


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """A file of sixty sums."""
    path = tmp_path / "sums.jsonl"
    rows = [
        {"prompt": f"{n} + {n}?", "answer": 2 * n, "level": "low" if n < 30 else "high"}
        for n in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


async def test_a_row_is_one_question_and_one_answer(build: Build, sums: Path) -> None:
    """The file may lie beside the author's; groups come from the column that the option names."""
    spec = build(REWARD, data="sums.jsonl", group_column="level", heldout_fraction=0.25)
    train = spec.tasks("train")
    held_out = spec.tasks("heldout")
    assert (len(train.group_of) + len(held_out.group_of), train.groups) == (60, ("low", "high"))
    assert 6 <= len(held_out.group_of) <= 24
    task = held_out.instantiate(next(iter(held_out.group_of)), 3)
    environment = spec.make("")
    opening = await environment.reset(task.payload, seed=task.seed)
    assert (
        opening.messages == [{"role": "user", "content": task.payload["prompt"]}]
        and not opening.tools
    )
    right = await environment.step(
        AssistantMessage(f" {task.payload['answer']}\n", reasoning="long")
    )
    assert (right.done, right.reward, right.final, right.metrics) == (
        True,
        1.0,
        True,
        {"success": 1.0},
    )
    await environment.reset(task.payload, seed=0)
    wrong = await environment.step(AssistantMessage("no"))
    assert (wrong.done, wrong.reward, wrong.metrics) == (True, 0.0, {"success": 0.0})
    await environment.close()


def test_a_row_keeps_its_id_and_its_split_when_others_are_added(build: Build, sums: Path) -> None:
    def splits(name: str) -> dict[str, str]:
        spec = build(REWARD, name, data=str(sums))
        return {
            task: split for split in ("train", "heldout") for task in spec.tasks(split).group_of
        }

    before = splits("a.py")
    extra = "".join(json.dumps({"prompt": f"{n}?", "answer": 0}) + "\n" for n in range(40))
    sums.write_text(extra + sums.read_text(encoding="utf-8"), encoding="utf-8")
    after = splits("b.py")
    assert len(before) == 60 and len(after) == 100
    assert {task: after[task] for task in before} == before


async def test_an_async_verifier_with_components_and_messages(build: Build, tmp_path: Path) -> None:
    """A verifier without ``**row`` is given the columns that it takes; the question may be
    messages."""
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1 + 1?"}]
    rows = [{"question": messages, "n": n, "other": [n]} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text(
        "\ufeff" + "\n\n".join(map(json.dumps, rows)), encoding="utf-8"
    )
    text = """
    import asyncio

    system_prompt = "Answer."

    async def reward(completion: str, n: int, scale: float = 2.0):
        await asyncio.sleep(0)
        return {"length": len(completion), "right": scale * n}
    """
    spec = build(text, data=str(tmp_path / "rows.jsonl"), prompt_column="question")
    assert (spec.name, spec.system_prompt) == ("reward", "Answer.")
    environment = spec.make("")
    assert (await environment.reset(rows[2], seed=0)).messages == messages
    turn = await environment.step(AssistantMessage("four"))
    assert (turn.reward, turn.rewards) == (8.0, {"length": 4.0, "right": 4.0})


async def test_questions_may_come_from_the_file_of_the_verifier(build: Build) -> None:
    spec = build(REWARD + "\ndef tasks(split):\n    yield {'prompt': split, 'answer': split}\n")
    tasks = spec.tasks("heldout")
    [name] = tasks.group_of
    environment = spec.make("")
    await environment.reset(tasks.instantiate(name, 0).payload, seed=0)
    assert (await environment.step(AssistantMessage("heldout"))).reward == 1.0
    wrong = build(REWARD + "\ndef tasks(split):\n    yield {'prompt': split}\n", "wrong.py")
    with pytest.raises(ValueError, match=r"split 'train', row 0: the row has no column 'answer'"):
        wrong.tasks("train")


WRONG_ROWS = {
    '{"prompt": "a", "answer": 1}\n{"promt": "b", "answer": 1}\n': (
        r"rows\.jsonl, line 2: the row has no column 'prompt'; did you mean 'promt'"
    ),
    '{"prompt": "a", "answer": 1}\n\n{"prompt": '
    '"b"}\n': r"rows\.jsonl, line 3: the row has no column 'answer'",
    '{"prompt": "a", "answer": 1, "completion": 2}\n': (
        r"line 1: the column 'completion' has the name of the verifier's first argument"
    ),
    '{"prompt": 5, "answer": '
    "1}\n": r"line 1: the column 'prompt' must be a list of messages, not 5",
    '{"prompt": [], "answer": 1}\n': r"line 1: the column 'prompt' has no message",
    '{"prompt": [{"role": "user"}], "answer": '
    "1}\n": r"line 1: the column 'prompt'\[0\] has no content",
    '{"prompt": "a", "answer": '
    "1}\n[1]\n": r"line 2: a row is a map from columns to values, not \[1\]",
    '{"prompt": "a", "answer": 1}\n{"prompt": ': r"line 2: not JSON: Expecting value",
    '{"prompt": "a", "answer": NaN}\n': r"line 1: not JSON: NaN is no JSON value",
    '{"prompt": "a", "answer": 1e999}\n': r"line 1: inf is not JSON",
    "[" * 100_000 + "\n": r"line 1: not JSON: maximum recursion",
    '{"prompt": "a", "id": 1, "answer": 1}\n{"prompt": "b", "id": 1, "answer": 1}\n': (
        r"line \d: an earlier row has the id '1', too"
    ),
    "\n\n": r"rows\.jsonl: has no rows",
    "\udcff": r"line 1: not JSON: 'utf-8' codec can't decode",
}


@pytest.mark.parametrize("lines", WRONG_ROWS, ids=range(len(WRONG_ROWS)))
def test_a_wrong_row_is_named_by_file_and_line(build: Build, tmp_path: Path, lines: str) -> None:
    """The environment is not even built."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=WRONG_ROWS[lines]):
        build(REWARD, data=str(path), heldout_fraction=0)


def test_options_that_cannot_be_are_refused(build: Build, sums: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"reward judges answers, so it needs questions: set env\.data"
    ):
        build(REWARD)
    with pytest.raises(ValueError, match=r"the row has no column 'question'"):
        build(REWARD, data=str(sums), prompt_column="question")
    with pytest.raises(ValueError, match=r"line 1: the column 'tier' must name a group, not None"):
        build(REWARD, data=str(sums), group_column="tier")
    with pytest.raises(
        ValueError, match=r"data is a \.jsonl file, a \.parquet file or a datasets folder"
    ):
        build(REWARD, data=str(tmp_path / "mine.py"))
    with pytest.raises(ValueError, match=r"heldout_data=.*nowhere\.jsonl: there is no such file"):
        build(REWARD, data=str(sums), heldout_data="nowhere.jsonl")
    spec = build(REWARD, data=str(sums), heldout_fraction=0)
    assert len(spec.tasks("train").group_of) == 60
    with pytest.raises(
        ValueError, match=r"leaves no task for the split 'heldout' with env\.heldout_fraction=0"
    ):
        spec.tasks("heldout")


def test_held_out_data_shares_no_question_with_training(
    build: Build, sums: Path, tmp_path: Path
) -> None:
    """The question decides, whatever else the row says."""
    held_out = tmp_path / "heldout.jsonl"
    held_out.write_text('{"prompt": "new?", "answer": 1}\n', encoding="utf-8")
    spec = build(REWARD, data=str(sums), heldout_data="heldout.jsonl")
    assert (len(spec.tasks("train").group_of), len(spec.tasks("heldout").group_of)) == (60, 1)
    held_out.write_text(
        '{"prompt": "new?", "answer": 1}\n{"prompt": "3 + 3?", "answer": 7}\n', encoding="utf-8"
    )
    with pytest.raises(
        ValueError,
        match=r"heldout\.jsonl, line 2 is also a training task \(.*sums\.jsonl, line 4\)",
    ):
        build(REWARD, data=str(sums), heldout_data="heldout.jsonl")


@pytest.mark.slow
def test_rows_that_are_alike_are_tasks_of_their_own(build: Build, tmp_path: Path) -> None:
    """As many as one likes; a file that repeats one row has no other to hold out."""
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "a", "answer": 1}\n' * 20_000, encoding="utf-8"
    )
    spec = build(REWARD, data="rows.jsonl", heldout_fraction=0)
    before = time.process_time()
    assert len(spec.tasks("train").group_of) == 20_000
    assert time.process_time() - before < 10, "a search among all of them for each takes a minute"


def test_rows_of_one_question_are_on_one_side(build: Build, tmp_path: Path) -> None:
    """Also when a file has very few: each split has a question if there are two."""
    rows = [{"prompt": f"{n % 2}?", "answer": n} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    spec = build(REWARD, data="rows.jsonl")
    prompts = []
    for split in ("train", "heldout"):
        tasks = spec.tasks(split)
        prompts.append({tasks.instantiate(name, 0).payload["prompt"] for name in tasks.group_of})
    assert [len(each) for each in prompts] == [1, 1] and prompts[0] != prompts[1]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return {}['x']", r"KeyError: 'x' \(.*mine\.py, line 3\)"),
        (
            "return float('nan')",
            r"the reward must be a finite number, not nan \(.*mine\.py, line 2\)",
        ),
        ("return 'good'", "the reward must be a finite number, not 'good'"),
        ("pass", "the reward must be a finite number, not None"),
        ("return {'a': None}", r"the reward\['a'\] must be a finite number, not None"),
        ("raise SystemExit(1)", r"SystemExit: 1 \(.*mine\.py, line 3\)"),
        ("raise StopIteration", r"StopIteration"),
        ("raise KeyboardInterrupt", r"KeyboardInterrupt:  \(.*mine\.py, line 3\)"),
        (
            "import asyncio; raise asyncio.CancelledError",
            r"CancelledError:  \(.*mine\.py, line 3\)",
        ),
        ("eval(completion)", r"SyntaxError: .*line \d+"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "async "])
async def test_a_verifier_that_raises_fails_the_episode(
    build: Build, body: str, sentence: str, prefix: str
) -> None:
    """It is never a reward of 0; the failure names the verifier, the seed and the line, and not the
    row, whose answer every client of a server could read."""
    if prefix and "KeyboardInterrupt" in body:
        pytest.skip("on the event loop an interrupt is that of the keyboard")
    text = (
        f"\n{prefix}def reward(completion, **row):\n    {body}\n\ndef tasks(split): return "
        f"[{{'prompt': 'a'}}]\n"
    )
    environment = build(text).make("")
    await environment.reset({"prompt": "a"}, seed=1)
    with pytest.raises(EnvironmentFailure, match=r"reward \(seed 1\): .*" + sentence) as caught:
        await environment.step(AssistantMessage("1 +"))
    assert caught.value.kind == "internal"


async def test_a_blocking_verifier_does_not_stop_the_loop(build: Build, tmp_path: Path) -> None:
    """It waits for what the loop does meanwhile."""
    turned = tmp_path / "turned"
    text = (
        "import os, time\ndef reward(completion):\n    end = time.monotonic() + 60\n"
        f"    while not os.path.exists({str(turned)!r}) and time.monotonic() < end: "
        f"time.sleep(0.01)\n"
        f"    return os.path.exists({str(turned)!r})\n"
        "def tasks(split): return [{'prompt': 'a'}]\n"
    )
    spec = build(text)
    environments = [spec.make("") for _ in range(8)]
    for each in environments:
        await each.reset({"prompt": "a"}, seed=0)
    playing = asyncio.gather(*(each.step(AssistantMessage("")) for each in environments))
    for _ in range(6):
        await asyncio.sleep(0.01)
    turned.touch()
    assert [turn.reward for turn in await playing] == [1.0] * 8


async def test_the_verifier_may_change_what_it_is_given(build: Build) -> None:
    """The row of the next episode is as it was."""
    text = """
    def reward(completion, xs):
        xs.append(1)
        return len(xs)

    def tasks(split):
        return [{"prompt": "a", "xs": []}]
    """
    environment = build(text).make("")
    row: dict[str, Any] = {"prompt": "a", "xs": []}
    for _ in range(2):
        await environment.reset(row, seed=0)
        assert (await environment.step(AssistantMessage(""))).reward == 1.0


@pytest.mark.parametrize("head", ["def reward():", "def reward(*, completion):"])
def test_a_function_that_takes_no_completion_is_refused(
    build: Build, tmp_path: Path, head: str
) -> None:
    (tmp_path / "other.py").write_text(f"{head}\n    return 1\n")
    with pytest.raises(
        ValueError, match=r"reward must take the completion first.*other\.py, line 1\)"
    ):
        load_definition(f"{tmp_path / 'other.py'}:reward")


# ---- Parquet and datasets


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_its_package_is_one_sentence(build: Build, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        ValueError, match=r"rows\.parquet: reading Parquet needs the package pyarrow"
    ):
        build(REWARD, data="rows.parquet")


@pytest.mark.skipif(
    importlib.util.find_spec("datasets") is not None, reason="datasets is installed"
)
def test_a_datasets_folder_without_its_package_is_one_sentence(
    build: Build, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        ValueError, match=r"folder: reading a datasets folder needs the package datasets"
    ):
        build(REWARD, data="folder")


def test_parquet_rows_are_tasks(build: Build, tmp_path: Path) -> None:
    """A value that is no JSON is named by its row."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"prompt": [f"{n}?" for n in range(20)], "answer": [*range(20)]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    spec = build(REWARD, data="rows.parquet")
    assert len(spec.tasks("train").group_of) + len(spec.tasks("heldout").group_of) == 20
    parquet.write_table(
        pyarrow.table({"prompt": ["a"], "answer": [b"\x00"]}), tmp_path / "bad.parquet"
    )
    with pytest.raises(ValueError, match=r"bad\.parquet, row 1: bytes is not JSON"):
        build(REWARD, data="bad.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"broken\.parquet: not a readable Parquet file"):
        build(REWARD, data="broken.parquet")


def test_a_datasets_folder_is_read(build: Build, tmp_path: Path) -> None:
    """A folder of several splits is refused with their names."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(
        {"prompt": [f"{n}?" for n in range(20)], "answer": [*range(20)]}
    )
    data.save_to_disk(str(tmp_path / "folder"))
    spec = build(REWARD, data="folder")
    assert len(spec.tasks("train").group_of) + len(spec.tasks("heldout").group_of) == 20
    datasets.DatasetDict(train=data).save_to_disk(str(tmp_path / "several"))
    with pytest.raises(
        ValueError, match=r"several: holds several splits; name the folder of one: 'train'"
    ):
        build(REWARD, data="several")
    assert len(build(REWARD, data="several/train").tasks("train").group_of) > 10
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: not a datasets folder"):
        build(REWARD, data="empty")
