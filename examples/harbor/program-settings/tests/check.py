import json
import sys

sys.path.insert(0, "/app")

CASES = [
    ("blank", ["a=1", ""], {"a": "1"}),
    ("comment", ["# a=2", "b=3"], {"b": "3"}),
    ("spaces", [" a = 1 "], {"a": "1"}),
    ("equals", ["a=b=c"], {"a": "b=c"}),
]
rewards = {}
for name, lines, wanted in CASES:
    try:
        from settings import read_settings

        rewards[name] = float(read_settings(lines) == wanted)
    except Exception:
        rewards[name] = 0.0
rewards["reward"] = sum(rewards.values()) / len(CASES)
with open("/logs/verifier/reward.json", "w") as file:
    json.dump(rewards, file)
