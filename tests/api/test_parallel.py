"""Workers that cannot hold what they are to train together are refused with the numbers, before any of them starts."""

import pytest

from realhf.api.config import ConfigError, ModelConfig, ParallelConfig
from realhf.api.parallel import Parallel, parallel_of


def of(workers, backend, **parallel):
    return parallel_of(
        "critic", ModelConfig(workers=[*range(workers)], backend=backend, parallel=ParallelConfig(**parallel))
    )


@pytest.mark.parametrize(
    ("workers", "backend", "asked", "said"),
    [
        (3, "ddp", {"dp": 2}, r"dp=2 times fsdp=1 needs 2 workers, critic.workers=\[0, 1, 2\] names 3"),
        (1, "ddp", {"dp": 2}, r"dp=2 times fsdp=1 needs 2 workers, critic.workers=\[0\] names 1"),
        (4, "fsdp2", {"dp": 2, "fsdp": 3}, r"dp=2 times fsdp=3 needs 6 workers, .* names 4"),
        (3, "fsdp2", {"dp": 2}, r"dp=2 times fsdp=1 needs 2 workers, .* names 3"),
        (2, "fsdp2", {"fsdp": 4}, r"dp=1 times fsdp=4 needs 4 workers, .* names 2"),
        (2, "ddp", {"fsdp": 2}, r"^critic.parallel.fsdp=2: backend ddp keeps whole copies; set critic.backend=fsdp2"),
        (1, "torch", {"dp": 2}, r"^critic.parallel.dp=2: backend torch trains on one worker; set critic.backend=ddp"),
        (1, "torch", {"fsdp": 2}, r"^critic.parallel.fsdp=2: backend torch .*; set critic.backend=fsdp2"),
        (2, "torch", {}, r"^critic.workers=\[0, 1\]: backend torch trains on one worker"),
        (2, "ddp", {"tp": 2}, r"^critic.parallel.tp=2: no backend cuts layers"),
    ],
)
def test_a_mesh_that_the_workers_cannot_hold_is_refused(workers, backend, asked, said):
    with pytest.raises(ConfigError, match=said):
        of(workers, backend, **asked)


def test_what_is_not_asked_for_follows_from_the_workers():
    assert of(1, "torch") == of(1, "ddp") == of(1, "fsdp2") == Parallel()
    assert of(3, "ddp") == of(3, "ddp", dp=3) == Parallel(dp=3)
    assert of(4, "fsdp2") == of(4, "fsdp2", dp=1) == Parallel(fsdp=4)
    assert of(4, "fsdp2", dp=2) == of(4, "fsdp2", fsdp=2) == Parallel(dp=2, fsdp=2)
