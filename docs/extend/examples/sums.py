"""A data set with a verifier: sums. The rows are made here; ``env.data=FILE.jsonl`` names a file instead."""


def tasks(split: str):
    """The rows of a split. Leave this function out to take the rows of ``env.data``."""
    for a in range(2, 22):
        for b in range(2, 22):
            if (a * 7 + b * 3) % 10 >= 2 if split == "train" else (a * 7 + b * 3) % 10 < 2:
                yield {"prompt": f"What is {a} + {b}? The last word is your answer.", "answer": a + b}


def reward(completion: str, answer: int, **row) -> float:
    """Return what a completion is worth; the columns of its row are arguments."""
    return float(completion.split()[-1:] == [str(answer)])
