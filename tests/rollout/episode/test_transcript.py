"""What a person reads of an episode."""

from __future__ import annotations

from pathlib import Path

from realhf.api.environment import PlayedTurn
from realhf.monitor.run_files import append_episodes
from realhf.rollout.rollout_sample import transcript
from tests.monitor.rollouts.made_rollouts import outcome


def test_words_of_an_episode_do_nothing_to_the_terminal_and_can_be_written(tmp_path: Path):
    """Half of a character in what an environment said used to end the run that wrote it down."""
    turn = PlayedTurn("ls\t\x1b[2J", "a\r\nb\rc \u202eod\u0000 \ud800", 0.5)
    text = transcript(outcome(0.5, turns=(turn,), turn_rewards=[0.5]), header="step 1")
    assert text.endswith("\n  $ ls\t\\x1b[2J\n    a\nb\\rc \\u202eod\\x00 \\ud800")
    append_episodes(tmp_path, 1, [text])
    assert text in (tmp_path / "episodes.txt").read_text()
