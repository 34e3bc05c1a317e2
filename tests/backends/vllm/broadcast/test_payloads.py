"""How tensors are cut into packs, and what servers are told."""

from __future__ import annotations

import base64

import pytest
import torch

from realhf.backends.vllm.broadcast.payloads import (
    build_init_info,
    build_update_info,
    cut_packs,
    describe_tensors,
    fill_pack,
)
from tests.backends.vllm.broadcast.stand_in import receive_packs

TENSORS = {
    "thin": torch.arange(5.0).bfloat16(),
    "wide": torch.arange(6.0).reshape(2, 3).t(),
    "count": torch.tensor([7], dtype=torch.int64),
    "none": torch.zeros(0, 4),
    "thin.too": torch.arange(3.0).bfloat16(),
}


@pytest.mark.parametrize("pack_bytes", [0, 1, 7, 8, 32, 33, 1 << 20])
def test_a_server_reads_what_was_sent(pack_bytes: int) -> None:
    infos = describe_tensors(TENSORS)
    assert [name for name, *_ in infos] == ["count", "wide", "none", "thin", "thin.too"]
    ordered = [TENSORS[name] for name, *_ in infos]
    packs = [
        fill_pack([ordered[index] for index in pack])
        for pack in cut_packs((tensor.nbytes for tensor in ordered), pack_bytes)
    ]
    received: dict[str, torch.Tensor] = {}
    sent = iter(packs)
    update = build_update_info(infos)

    def receive(packed: torch.Tensor) -> None:
        packed.copy_(next(sent))

    rows = zip(update["names"], update["dtype_names"], update["shapes"], strict=True)
    receive_packs(
        ((name, shape, getattr(torch, dtype)) for name, dtype, shape in rows),
        receive,
        received.update,
        pack_bytes,
    )
    assert not list(sent)
    assert received.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(received[name], tensor) and received[name].dtype == tensor.dtype
    # A pack may be too large by one tensor, since it ends with the one that fills it.
    assert all(pack.nbytes <= pack_bytes + 32 for pack in packs)


def test_a_group_is_described_as_vllm_reads_it() -> None:
    info = build_init_info(bytes(range(128)), 3, 5, 64)
    assert base64.b64decode(info["nccl_unique_id_b64"]) == bytes(range(128))
    assert (info["rank_offset"], info["world_size"]) == (3, 5)
    for wrong in ((b"short", 1, 2), (bytes(128), 0, 2), (bytes(128), 2, 2)):
        with pytest.raises(ValueError, match=r"128 bytes|no server at rank"):
            build_init_info(*wrong, 64)
