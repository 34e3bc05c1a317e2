"""The status page's picture in ``docs/images``, taken of the real page under load: ``make
screenshots``."""

from __future__ import annotations

import itertools
import tempfile
import time
from contextlib import closing
from pathlib import Path

import httpx
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.chromium import Chromium
from tests.trajectory.conftest import REGISTRATION, register_env, running_server
from tests.trajectory.groups import group

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
TEXT = 'user : which buckets are there ? assistant : aws s3api list-buckets user : {"Buckets" : [] } assistant : none'


def main() -> None:
    """A minute in the life of a server, played in eight seconds."""
    with tempfile.TemporaryDirectory() as folder:
        words = TEXT.split()
        ids = tokenizer_at(Path(folder), words)
        with (
            running_server(tokenizer=folder) as url,
            httpx.Client(base_url=url) as api,
            closing(Chromium()) as page,
        ):
            page.look(1100, 1170)
            page.open(url + "/ui")
            work(api, ids)
            page.wait(
                "document.querySelectorAll('#envs tr').length === 4 && "
                "document.querySelector('#example pre')"
            )
            IMAGES.mkdir(exist_ok=True)
            page.screenshot(IMAGES / "trajectory-status.png")
            if page.problems:
                raise SystemExit(f"the page complained: {page.problems}")


def work(api: httpx.Client, ids: list[int]) -> None:
    """Three environments push, two trainers pull."""
    api.post("/register", json=REGISTRATION | {"batch_size": 32})
    api.get("/batch")
    envs = [
        register_env(api, size, desired_name=name)
        for name, size in (("aws", 8), ("gsm8k", 4), ("web", 8))
    ]
    turns = itertools.cycle([0, 1, 1, 2, 0])
    for second in range(8):
        for number in range(12 + 8 * (second % 3)):
            env = envs[next(turns)]
            size = 4 if env == envs[1] else 8
            row = {"tokens": [ids] * size, "masks": [ids] * size, "inference_logprobs": None}
            scores = [float((number + i) % 3 == 0) for i in range(size)]
            api.post("/scored_data", json=group(size, 2, env_id=env) | row | {"scores": scores})
        api.post("/scored_data", json=group(3, 2, env_id=envs[0]))
        api.get("/batch", headers={"X-Trainer-Id": "trainer-a"})
        held = api.get("/batch", headers={"X-Trainer-Id": "trainer-b", "X-Ack-Mode": "explicit"})
        if second < 7:
            api.post("/batch/ack", json={"lease_id": held.headers["x-lease-id"]})
        time.sleep(1.0)
    api.post("/scored_data", json=group(5, 2))
    row = {"tokens": [ids, ids[:9]], "masks": [ids, ids[:9]], "scores": [1.0, 0.0]}
    api.post("/scored_data", json=row)
    time.sleep(1.5)


def tokenizer_at(folder: Path, words: list[str]) -> list[int]:
    """A tokenizer of exactly these words; returns their ids."""
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*words, "[UNK]"]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.encode(" ".join(words)).ids


if __name__ == "__main__":
    main()
