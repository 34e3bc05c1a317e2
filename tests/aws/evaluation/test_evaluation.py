"""Evaluation: expert and random agent on real simulators, figures by hand, and a model behind an
endpoint."""

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from realhf.aws import evaluate
from realhf.aws.agents import (
    AgentError,
    ChatApiAgent,
    Conversation,
    RandomAgent,
    ScriptedExpert,
    TextAgent,
    served_model,
)
from realhf.aws.evaluate import EpisodeRecord, play_tasks, report
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import instantiate, is_name, load_templates

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module")
def pool() -> Iterator[MiniStackPool]:
    pool = MiniStackPool(3)
    pool.start()
    yield pool
    pool.stop()


def starter_tasks(per_tier: int) -> list:
    chosen = [
        t
        for tier in ("warmup", "beginner", "intermediate")
        for t in load_templates([tier], tags=["starter"])[:per_tier]
    ]
    return [instantiate(template.task_id, 5, "heldout") for template in chosen]


@pytest.mark.nightly
def test_the_expert_solves_everything_and_the_random_agent_nearly_nothing(
    pool: MiniStackPool,
) -> None:
    tasks = starter_tasks(4)
    seen: list[EpisodeRecord] = []
    expert = play_tasks(ScriptedExpert(), pool, tasks, max_turns=6, on_episode=seen.append)
    assert [(r.task_id, r.achieved, r.reward, r.steps) for r in expert] == [
        (task.task_id, True, 1.0, len(task.solution)) for task in tasks
    ]
    assert len(seen) == len(tasks)
    guesses = play_tasks(RandomAgent(seed=1), pool, tasks, max_turns=3)
    assert sum(r.achieved for r in guesses) <= len(tasks) // 4
    assert all(r.valid for r in guesses)
    assert pool.free_count == 3


class _Mute(TextAgent):
    name = "says nothing useful"

    def act(self, conversations: Sequence[Conversation]) -> list[str]:
        return ["let me think" for _ in conversations]


def test_turns_without_a_command_count_and_end(pool: MiniStackPool) -> None:
    (record,) = play_tasks(_Mute(), pool, starter_tasks(1)[:1], max_turns=3)
    (shorter,) = play_tasks(_Mute(), pool, starter_tasks(1)[:1], max_turns=9, spare_turns=1)
    assert (record.status, record.steps, record.reward) == ("finished", 3, 0.0)
    assert (shorter.status, shorter.steps) == ("finished", 1 + len(starter_tasks(1)[0].solution))


def record(**values) -> EpisodeRecord:
    return EpisodeRecord(
        **{
            "task_id": 1,
            "template": "t",
            "tier": "warmup",
            "drift": False,
            "seed": 0,
            "status": "finished",
            **values,
        }
    )


def test_figures_by_hand() -> None:
    records = [
        record(status="achieved", achieved=True, reward=1.0, steps=2, failed_commands=1),
        record(status="achieved", achieved=True, reward=0.85, steps=4, hints=1),
        record(reward=0.0, steps=6, failed_commands=2),
        record(status="lost"),
        record(tier="expert", drift=True, status="achieved", achieved=True, reward=1.0, steps=3),
    ]
    found = report(records)
    assert list(found) == ["overall", "warmup", "drift"]
    warmup = found["warmup"]
    assert (warmup["episodes"], warmup["env_errors"]) == (3, 1)
    assert warmup["success"]["value"] == pytest.approx(2 / 3)
    assert warmup["steps_to_solve"]["value"] == 3.0
    assert warmup["hints"]["value"] == pytest.approx(1 / 3)
    assert (warmup["recovery"]["value"], warmup["recovery"]["n"]) == (0.5, 2)
    assert found["drift"]["success"]["value"] == 1.0
    assert found["drift"]["recovery"] is None


class _FakeChatEndpoint(BaseHTTPRequestHandler):
    """Speaks the OpenAI wire; its "model" describes the table that the task names. It fails once,
    and once thinks only, before it answers."""

    failures = thoughts = 1

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "fake-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if type(self).failures:
            type(self).failures -= 1
            return self._send(503, {"error": "busy"})
        if type(self).thoughts:
            type(self).thoughts -= 1
            return self._send(
                200, {"choices": [{"message": {"content": None, "reasoning_content": "hm"}}]}
            )
        system, task = body["messages"][:2]
        assert system["role"] == "system"
        name = next(
            word.strip(".,") for word in task["content"].split() if is_name(word.strip(".,"))
        )
        words = f"```bash\naws dynamodb describe-table --table-name {name}\n```"
        self._send(200, {"choices": [{"message": {"content": words}}]})

    def _send(self, status: int, document: dict) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _FakeChatEndpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_model_behind_an_endpoint(pool: MiniStackPool, endpoint: str) -> None:
    agent = ChatApiAgent(endpoint, served_model(endpoint), timeout_s=60)
    describe = next(
        t for t in load_templates(["warmup"]) if "dynamodb describe-table" in t.solution[0]
    )
    (played,) = play_tasks(agent, pool, [instantiate(describe.task_id, 1)], max_turns=3)
    agent.close()
    assert (agent.name, played.achieved, played.steps) == ("fake-model", True, 2)


def test_an_endpoint_that_is_not_there_is_named() -> None:
    with pytest.raises(AgentError, match=r"127\.0\.0\.1:9/v1"):
        served_model("http://127.0.0.1:9/v1", timeout_s=2)


@pytest.mark.nightly
def test_the_command_writes_table_json_and_plot(tmp_path, capsys) -> None:
    arguments = [
        "--split",
        "names",
        "--tags",
        "starter",
        "--tiers",
        "warmup",
        "--episodes",
        "1",
        "--pool-size",
        "2",
    ]
    assert evaluate.main([*arguments, "--max-turns", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "scripted expert" in printed.out
    episodes = len(load_templates(["warmup"], tags=["starter"]))
    assert f"scripted expert: {episodes}/{episodes} episodes" in printed.err
    document = json.loads((tmp_path / "evaluation.json").read_text())
    assert document["reports"]["scripted expert"]["overall"]["success"]["value"] == 1.0
    assert (tmp_path / "evaluation.png").stat().st_size > 5000


def test_no_template_or_model_is_a_clear_error(tmp_path, capsys) -> None:
    assert evaluate.main(["--split", "heldout", "--tags", "starter", "--out", str(tmp_path)]) == 1
    assert "no template of the split 'heldout'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [
        ("--episodes", "0", 1),
        ("--spare-turns", "-1", 0),
        ("--pool-size", "0", 1),
        ("--temperature", "-0.5", 0),
    ],
)
def test_a_number_that_is_too_small_is_refused_by_name(
    option: str, value: str, least: int, capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        evaluate.parse([option, value])
    assert ended.value.code == 2
    assert f"{option} {value}: at least {least} is needed" in capsys.readouterr().err
