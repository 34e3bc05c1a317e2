"""Parts of the model worker that need no master."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_without_a_plan_it_ends_with_one_line_about_the_cause(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "workers.model_worker",
            "--run-dir",
            str(tmp_path),
            "--run-id",
            "r",
            "--index",
            "0",
            "--master",
            "tcp://127.0.0.1:1",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("FATAL: ") and "plan.json" in done.stderr.splitlines()[-1]
