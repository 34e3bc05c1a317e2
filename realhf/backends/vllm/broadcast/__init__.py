"""Broadcast of weights from the trainer's GPU to the GPUs of vLLM servers, over NCCL.

This is the trainer's side of vLLM's own transfer (``--weight-transfer-config`` with the backend
``nccl``, vLLM 0.32 and 0.33). vLLM is not installed where the trainer runs. ``tests/vllm/facts.py``
looks up in vLLM's sources what follows; it has never run on NCCL.

Group: rank 0 is the trainer. The workers of each server follow one another from the server's
``rank_offset``, which is 1 for the first server. ``world_size`` is 1 plus the workers of all
servers: a server with tensor parallelism has one for each of its GPUs. Data-parallel servers are
refused. NCCL needs a GPU of its own for each rank.

Calls, which every worker of a server gets through our extension, in this order:

1. ``init_weight_transfer_engine(INIT)``, once for a group: joins it. All ranks must be in it at the
   same time, because ``ncclCommInitRank`` returns when all have joined. Then vLLM sums one fp32
   element over the group, and so must rank 0. The server samples nothing meanwhile.
2. The server is paused.
3. ``start_weight_update()``: the layers' tensors are set aside.
4. ``update_weights(UPDATE)``: receives all packs, and loads each of them.
5. ``finish_weight_update()``; then digests, the version's label, and the server continues.

INIT: ``nccl_unique_id_b64`` (128 bytes from ``ncclGetUniqueId``, standard base64), ``rank_offset``,
``world_size``, ``packed`` (True), ``packed_buffer_size_bytes``, ``packed_num_buffers``.
UPDATE: ``names``, ``dtype_names`` ("bfloat16"), ``shapes``, one entry for each tensor.

Packs: tensors are sent in the order of UPDATE, as bytes. A pack ends after the tensor with which it
has more than ``packed_buffer_size_bytes``; a pack is one broadcast of uint8 from rank 0. Tensors
with wide elements come first, so that each begins at a multiple of its element's size.
``packed_num_buffers`` is 1: with more, vLLM 0.32 reads parts of a layer from a pack that another
stream has not received yet (mended in 0.33).

Errors: NCCL does not notice a rank that has died. Each side has a deadline, after which it aborts
the group: the trainer raises BroadcastError, a worker reports an error, and the group is not used
again. A worker whose transfer was cut off has weights of two versions. It stays paused, ends the
update that it had begun (``start_weight_update`` and ``finish_weight_update`` put its layers back),
and takes the next version. A worker that waits in call 1 for a rank that never comes cannot be
called back: its server has to be started again.
"""
