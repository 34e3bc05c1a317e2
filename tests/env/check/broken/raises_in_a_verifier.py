"""Broken on purpose: a verifier that takes every completion for a number."""


def tasks(split):
    return [{"prompt": f"What is {n} + 1?", "answer": n + 1} for n in (range(5) if split == "train" else range(5, 8))]


def Broken(completion: str, answer: int) -> float:
    return float(int(completion) == answer)
