import subprocess
import sys

CALL = "import sys; sys.path.insert(0, '/app'); from stats import average; print(float(average({})))"

# In a process of its own: code that ends its process must not end the check.
for numbers, wanted in (([1, 2], "1.5"), ([], "0.0"), ([3], "3.0")):
    command = [sys.executable, "-I", "-c", CALL.format(numbers)]
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, timeout=5).stdout
    except subprocess.TimeoutExpired:
        sys.exit(1)
    if output.split()[-1:] != [wanted.encode()]:
        sys.exit(1)
