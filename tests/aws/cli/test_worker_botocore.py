"""The CLI's worker speaks with the copy of botocore that the CLI brings, whatever is imported beside it."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_worker_takes_the_cli_s_own_botocore() -> None:
    code = "import realhf.aws.cli.zygote, botocore; print(botocore.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "/awscli/botocore/" in done.stdout
