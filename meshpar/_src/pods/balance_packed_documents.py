"""The order of the tokens of packed documents in which the devices of a sharded sequence have equal attention costs."""

from __future__ import annotations

import numpy as np

from ...errors import MeshparError


def balance(segment_ids: np.ndarray, devices: int, *, window: int | None = None, blocks: int = 16) -> np.ndarray:
    """The order of tokens in which causal attention to the documents of a batch costs each device of a sharded sequence the same.

    The sequence is cut into ``blocks`` blocks for each device. A block costs as many pairs of a query and a key of its document as
    it has in all rows. The blocks are assigned to devices, the costliest first, each to the device with the least cost that is not
    full (PTRR; PyTorch's context parallelism does so too). Call it on the host for each batch, reorder every array of the batch
    with a ``seq`` dim, and pass the order to the attention: it is also the positions of the tokens. The results equal the batch's
    in its own order, reordered. Rows that a layout shards are balanced together, not each on its own devices.

    Args:
      segment_ids: int [batch, seq]: the document of each token.
      devices: over which ``seq`` is sharded.
      window: as in :func:`meshpar.layers.attention`.
      blocks: on each device; more balance better, and fewer skip more of the scores that the documents mask.

    Returns:
      int32 [seq], the index of each token in the given order.

    Raises:
      MeshparError: ``seq`` does not divide into that many blocks.

    Example:
      >>> ids = np.repeat([[0, 1, 2, 3]], 16, axis=1)
      >>> order = mp.data.balance(ids, devices=2, blocks=4)
      >>> order[::16]
      array([ 0, 32, 16, 48], dtype=int32)
    """
    ids = np.asarray(segment_ids)
    if ids.ndim != 2 or devices < 1 or blocks < 1 or ids.shape[1] % (devices * blocks):
        text = f"mp.data.balance: segment ids {list(ids.shape)} do not divide into {blocks} blocks for each of {devices} devices"
        raise MeshparError(text, fixes=["segment ids are [batch, seq]; pad seq, or pass fewer blocks"])
    place = np.argsort(ids, 1, kind="stable")
    grouped, index = np.take_along_axis(ids, place, 1), np.arange(ids.shape[1])
    first = np.pad(grouped[:, 1:] != grouped[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    seen = np.empty(ids.shape, np.int64)  # keys of its document that each query sees
    np.put_along_axis(seen, place, index + 1 - np.maximum.accumulate(np.where(first, index, 0), 1), 1)
    cost = np.minimum(seen, window or ids.shape[1]).sum(0).reshape(devices * blocks, -1).sum(1)
    loads, held = np.zeros(devices), [list[int]() for _ in range(devices)]
    for block in np.argsort(-cost, kind="stable"):
        device = min((d for d in range(devices) if len(held[d]) < blocks), key=loads.__getitem__)
        loads[device] += cost[block]
        held[device].append(int(block))
    return index.reshape(devices * blocks, -1)[np.sort(held, 1).ravel()].ravel().astype(np.int32)
