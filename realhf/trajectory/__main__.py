"""Program ``python -m realhf.trajectory``."""

import sys

from realhf.trajectory.http.cli import main

if __name__ == "__main__":
    sys.exit(main())
