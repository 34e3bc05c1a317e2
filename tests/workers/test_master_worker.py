"""What the master refuses to resume."""

import pytest

from workers.master_worker import check_same_models


def test_a_checkpoint_is_not_continued_with_another_reference() -> None:
    saved = {"actor": "/cache/policy-1", "ref": "/cache/policy-1"}
    check_same_models(saved, dict(saved))
    with pytest.raises(RuntimeError, match="made with ref from /cache/policy-1, this run has it from /cache/policy-2"):
        check_same_models(saved, {**saved, "ref": "/cache/policy-2"})
    with pytest.raises(RuntimeError, match="made with ref from None"):
        check_same_models({"actor": saved["actor"]}, saved)
