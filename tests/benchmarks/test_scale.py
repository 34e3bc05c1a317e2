"""The arithmetic about large runs, and how simulated workers share connections."""

from __future__ import annotations

import resource
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scale.__main__ import parse, verdicts
from benchmarks.scale.limits import GPUS, MODELS, Assumptions, line, lines, table
from benchmarks.scale.master import SPARE_DESCRIPTORS, Connections

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"


def test_the_page_shows_the_table_that_the_program_prints():
    assert table(lines()) in PAGE.read_text()


def test_rates_follow_the_assumptions():
    given = replace(Assumptions(), sampled=1000, tokens=2000)
    for model in MODELS:
        usual = line(64, model, Assumptions())
        shorter = line(64, model, given)
        assert shorter.generation > 2 * usual.generation, (
            "half the tokens, and less to read of the cache"
        )
        assert shorter.training == pytest.approx(2 * usual.training)
        assert line(64, model, replace(given, weights=given.weights / 2)).update_s == pytest.approx(
            2 * shorter.update_s
        )


def test_what_does_not_fit_is_said_first():
    found = {(one.gpus, one.model): one for one in lines()}
    assert len(found) == len(GPUS) * len(MODELS)
    small = found[8, "70B"]
    assert small.rate == 0 and small.why.startswith("the trainer does not fit")
    assert line(64, MODELS[0], replace(Assumptions(), master_us=1e6)).why.endswith("the master")
    assert found[1024, "8B"].update_s > found[1024, "8B"].tree_s > found[1024, "8B"].step_s


def test_connections_are_shared_where_descriptors_do_not_suffice():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS
        assert Connections.that_fit(100, 1) == Connections(100, 100)
        shared = Connections.that_fit(100_000, 2)
        assert shared.rpc == 2 and 0 < shared.admission + 3 * shared.rpc <= limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_missed_bar_is_named():
    figures = {
        "windows": [{"per_master_second": 2999.0}],
        "memory": {"bytes_per_episode": 100.0},
        "audit": {"balanced": True},
        "recovery": {"recovered_s": 31.0},
    }
    assert list(verdicts(figures).values()) == [False, True, True, False]


@pytest.mark.parametrize(
    "words", [["--workers", "1", "--processes", "2"], ["--lose", "1"], ["--group", "0"]]
)
def test_options_that_make_no_sense_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        parse(words)
    assert "error" in capsys.readouterr().err


def test_the_usual_size_is_that_of_the_page():
    args: Namespace = parse([])
    assert (args.workers, args.episodes) == (10_000, 100_000)
