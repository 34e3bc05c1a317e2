import json
import subprocess
import sys

CALL = (
    "import json, sys; sys.path.insert(0, '/app'); from settings import read_settings; "
    "print('\\n' + json.dumps(read_settings({})))"
)
CASES = [
    ("blank", ["a=1", ""], {"a": "1"}),
    ("comment", ["# a=2", "b=3"], {"b": "3"}),
    ("spaces", [" a = 1 "], {"a": "1"}),
    ("equals", ["a=b=c"], {"a": "b=c"}),
]
rewards = {}
# In a process of its own: code that ends its process must not end the check.
for name, lines, wanted in CASES:
    command = [sys.executable, "-I", "-c", CALL.format(lines)]
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, timeout=5).stdout
        rewards[name] = float(json.loads(output.splitlines()[-1]) == wanted)
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        rewards[name] = 0.0
rewards["reward"] = sum(rewards.values()) / len(CASES)
with open("/logs/verifier/reward.json", "w") as file:
    json.dump(rewards, file)
