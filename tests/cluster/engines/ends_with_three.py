"""A worker that says who it is and whether it has imported Ray, and ends with exit code 3."""

import os
import sys

if __name__ == "__main__":
    print(f"pid {os.getpid()}, ray {'ray' in sys.modules}", flush=True)
    sys.exit(3)
