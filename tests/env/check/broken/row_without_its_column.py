"""Broken on purpose: a verifier asks for a column that a row does not have."""


def tasks(split):
    first = 0 if split == "train" else 3
    return [{"prompt": f"Repeat {n}.", "answer": n} for n in (first, first + 1)] + [{"prompt": "Repeat."}]


def Broken(completion: str, answer: int) -> float:
    return float(completion == str(answer))
