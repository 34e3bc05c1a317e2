import sys

sys.path.insert(0, "/app")
from stats import average

assert average([1, 2]) == 1.5
assert average([]) == 0.0
assert average([3]) == 3
