"""The page in a real browser: played with keys, replayed, and safe from what it shows."""

import json
from contextlib import closing
from urllib.parse import quote

import pytest

from realhf.aws.server.program import EnvServerProcess
from realhf.aws.tasks.loader import instantiate
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.process_family import until

pytestmark = [pytest.mark.sim, pytest.mark.skipif(PROGRAM is None, reason=ABSENT)]
IDLE = "!document.body.hasAttribute('aria-busy')"
MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def chromium():
    with closing(Chromium()) as browser:
        yield browser


@pytest.fixture
def page(chromium: Chromium, web_server: EnvServerProcess):
    """The page as it opens, no episode running; afterwards its console must be silent."""
    chromium.look(1280, 800)
    chromium.open(web_server.url + "/web")
    chromium.wait("document.documentElement.dataset.ready")
    yield chromium
    if chromium.js("!document.getElementById('leave').hidden"):
        click(chromium, "leave")
        chromium.wait("document.body.dataset.mode === 'idle'")
    assert chromium.problems == []


def click(page: Chromium, name: str) -> None:
    page.js(f"document.getElementById('{name}').click()")
    page.wait(IDLE)


def text(page: Chromium, selector: str) -> str:
    return page.js(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => "
        f"one.innerText).join('\\n')"
    )


def focused(page: Chromium) -> str:
    return page.js("document.activeElement.id")


def run(page: Chromium, command: str) -> None:
    count = page.js("document.querySelectorAll('.entry').length")
    page.write(command)
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.entry').length === {count + 1} && {IDLE}")


def begin(page: Chromium, task_id: int, seed: int) -> None:
    """Choose a task with the keyboard: search, down into the list, Enter."""
    page.js(f"document.getElementById('seed').value = '{seed}'")
    page.press("t")
    assert focused(page) == "search"
    page.js("document.getElementById('search').select()")
    page.write(str(task_id))
    page.press("ArrowDown")
    assert page.js("document.activeElement.dataset.id") == str(task_id)
    page.press("Enter")
    page.wait(f"document.getElementById('task-id').textContent === '#{task_id}' && {IDLE}")
    assert focused(page) == "command"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_recorded_episode_is_played_again_only_when_a_person_says_so(page: Chromium) -> None:
    """The address names task, seed, split and commands, as the page over runs writes them; another
    page may, too."""
    task = instantiate(201, 3, "heldout")
    order = {
        "task_id": 201,
        "seed": 3,
        "split": "heldout",
        "chaos": False,
        "commands": [*task.solution, MARKUP],
    }
    address = page.js("location.origin") + "/web#play=" + quote(json.dumps(order))
    page.open("about:blank")
    page.open(address)
    page.wait("document.documentElement.dataset.ready && !document.getElementById('offer').hidden")
    assert "Task #201, seed 3, held out, 3 commands" in text(page, "#offer-text")
    assert (
        MARKUP in text(page, "#offer-commands") and page.js("document.body.dataset.mode") == "idle"
    )
    page.press("Enter")
    page.wait("document.getElementById('banner-title').textContent === 'Achieved'", timeout_s=240)
    page.wait(IDLE)
    assert text(page, "#description") == task.description and task.params["name"] in text(
        page, "#cards"
    )
    assert page.js("document.querySelectorAll('.entry').length") == len(task.solution), (
        "nothing after the end"
    )
    assert page.js("location.hash") == "" and page.js("document.title") != "owned"


@pytest.mark.nightly
def test_a_warmup_task_played_to_its_end_with_the_keyboard(page: Chromium) -> None:
    begin(page, 1, 3)
    task = instantiate(1, 3)
    assert text(page, "#description") == task.description and text(page, "#task-seed") == "seed 3"
    bucket = task.params["name"]
    assert bucket in text(page, "#cards")
    run(page, "aws s3api list-objects-v2 --bucket nothing-here")
    assert "NoSuchBucket" in text(page, ".entry .err") and text(page, "#progress-text") == "0 %"
    page.press("ArrowUp")
    assert page.js("document.getElementById('command').value").endswith("nothing-here")
    page.press("ArrowDown")
    assert page.js("document.getElementById('command').value") == ""
    run(page, task.solution[0])
    assert "readme" in text(page, ".entry .out") and text(page, "#progress-text") == "100 %"
    assert page.js("document.getElementById('progress').value") == 1
    assert text(page, "#banner-title") == "Achieved" and text(page, "#score") == "1.00"
    assert (
        text(page, "#banner-text") == "2 steps, score 1.00"
        and text(page, "#steps-left") == "13 of 15"
    )
    assert page.js(
        "document.getElementById('prompt').hidden && document.getElementById('hint').disabled"
    )
    page.press("r")
    page.wait(f"document.querySelectorAll('.entry').length === 0 && {IDLE}")
    assert focused(page) == "command" and text(page, "#score") == "0.00"


def test_hints_cards_and_a_reload(page: Chromium, visit) -> None:
    begin(page, 201, 3)
    assert "0.85" in text(page, "#hint") and "1/3" in text(page, "#hint")
    page.press("Escape")
    page.press("h")
    page.wait("document.querySelector('.hint-text')")
    assert text(page, ".hint-text") == "services: s3api" and "2/3" in text(page, "#hint")
    page.press("/")
    page.press("/")
    assert focused(page) == "command"
    assert page.js("document.getElementById('command').value") == "", (
        "pressed twice it used to be typed"
    )
    other = visit()
    assert other.get("/web/state").json()["free_in_s"] > 60
    page.js("window.dispatchEvent(new PageTransitionEvent('pagehide'))")
    assert until(lambda: other.get("/web/state").json()["free_in_s"] <= 30), (
        "nobody heard that the page was closed"
    )
    bucket = instantiate(201, 3).params["name"]
    run(page, instantiate(201, 3).solution[0])
    assert text(page, ".card h3").split() == ["s3", "1"] and text(page, ".card li.new").split() == [
        bucket,
        "new",
    ]
    run(page, f"aws s3api delete-bucket --bucket {bucket}")
    assert text(page, ".card li.gone").split() == [bucket, "gone"]
    page.call("Page.reload")
    page.wait(
        "document.documentElement?.dataset.ready && document.querySelectorAll('.entry').length === "
        "3"
    )
    assert text(page, "#hints") == "1"
    click(page, "solution")
    assert page.js("document.getElementById('command').value") == instantiate(201, 3).solution[1]
    page.press("Escape")
    page.press("r")
    page.wait(f"document.querySelectorAll('.entry').length === 0 && {IDLE}")
    assert text(page, "#task-seed") == "seed 3"


@pytest.mark.nightly
def test_a_replay_is_walked_with_keys(page: Chromium) -> None:
    begin(page, 301, 2)
    for command in ("aws iam list-roles", "ls", "aws iam create-role --role-name x"):
        run(page, command)
    page.press("Escape")
    page.press("p")
    assert page.js("document.body.dataset.mode") == "replay"
    shown = [text(page, "#replay-text")]
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home", "ArrowLeft"):
        page.press(key)
        shown.append(text(page, "#replay-text").split()[1])
        assert page.js("document.querySelectorAll('.entry').length") == int(shown[-1])
    assert shown == ["step 0 of 3", "1", "2", "1", "3", "0", "0"]
    page.press(" ")
    page.wait("document.getElementById('replay-at').value === '3'")
    assert text(page, "#replay-play") == "Play"
    page.press("Escape")
    assert page.js("document.body.dataset.mode") == "live" and focused(page) == "command"


def test_what_it_shows_is_text(page: Chromium, tmp_path) -> None:
    begin(page, 101, 3)
    run(page, f"aws s3api create-bucket --bucket {json.dumps(MARKUP)}")
    assert "<img src=x" in text(page, ".entry .typed")
    log = page.js("fetch('/web/log').then((reply) => reply.json())")
    log["task"] |= {"description": MARKUP, "desired_state_spec": MARKUP, "difficulty": MARKUP}
    log["names"] = ["<img", "("]
    log["steps"][0] |= {
        "command_output": MARKUP,
        "error": MARKUP,
        "hint_text": MARKUP,
        "refusal": MARKUP,
        "reward": "x",
        "infra_state": {MARKUP: {MARKUP: [MARKUP]}, "s3": 7},
    }
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(log))
    open_log(page, forged)
    page.wait("document.body.dataset.mode === 'replay'")
    page.press("End")
    for place in (
        "#description",
        ".entry .out",
        ".entry .err",
        ".entry .hint-text",
        ".card h3",
        ".card li",
    ):
        assert MARKUP in text(page, place), place
    assert page.js("document.querySelectorAll('main img, main script').length") == 0
    assert page.js("document.title") == "AWS playground"
    page.press("Escape")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": "x"}', '{"format": "realhf-episode-1", "steps": {}}']
)
def test_a_file_that_is_no_log_is_refused_with_its_name(
    page: Chromium, tmp_path, content: str
) -> None:
    (tmp_path / "wrong.json").write_text(content)
    open_log(page, tmp_path / "wrong.json")
    page.wait("document.getElementById('notice').textContent.includes('wrong.json')")
    assert page.js("document.body.dataset.mode") == "idle"


def open_log(page: Chromium, path) -> None:
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    field = page.call("DOM.querySelector", nodeId=root, selector="#log-file")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=field, files=[str(path)])


def test_keys_search_and_names_for_those_who_do_not_see(page: Chromium) -> None:
    page.press("?")
    assert page.js("document.getElementById('shortcuts').open")
    page.press("Escape")
    page.press("t")
    page.write("queue")
    assert page.js(
        "[...document.querySelectorAll('.task')].every((task) => /queue/i.test(task.title))"
    )
    assert " of " in text(page, "#task-count")
    unnamed = page.js("""[...document.querySelectorAll('button, input, textarea, a, progress, summary')].filter((one) =>
        !one.labels?.length && !one.getAttribute('aria-label') && !one.textContent.trim()).map((one) => one.id)""")
    assert unnamed == []


def test_it_fits_small_windows(page: Chromium) -> None:
    begin(page, 301, 3)
    run(page, "aws iam list-roles")
    for width in (360, 800, 1100):
        page.look(width, 700)
        assert page.js("document.documentElement.scrollWidth") <= width


@pytest.mark.nightly
def test_a_locked_playground_asks_for_the_token(chromium: Chromium) -> None:
    with EnvServerProcess(1, "--web-ministack-port", "0", "--token", "let-me-in") as server:
        chromium.open(server.url + "/web")
        chromium.wait("document.getElementById('login').open")
        chromium.write("wrong")
        chromium.press("Enter")
        chromium.wait("document.getElementById('login-problem').textContent")
        chromium.js("document.getElementById('token').select()")
        chromium.write("let-me-in")
        chromium.press("Enter")
        chromium.wait(
            "document.documentElement.dataset.ready && !document.getElementById('login').open"
        )
        assert chromium.js("document.querySelectorAll('.task').length") > 100
    assert [problem for problem in chromium.problems if "401" not in problem] == []
    chromium.problems.clear()
