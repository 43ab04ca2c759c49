"""The arrays that a TPU has in VMEM when a kernel reads or writes them."""

from __future__ import annotations

from collections.abc import Sequence

from .fusion import Buffer, Kernel, Kind
from .tiles import Tiles

_HBM_KERNELS = (Kind.MOVE, Kind.LEAVE, Kind.STACK, Kind.TRANSFER)
"""Kernels that read and write HBM."""


def buffers_in_vmem(kernels: Sequence[Kernel], tiles: Tiles, capacity: float) -> dict[Kernel, set[Buffer]]:
    """Kernel → the buffers that it reads or writes in VMEM instead of HBM.

    The TPU compiler (libtpu 0.0.42, ResNet-50) leaves a buffer in VMEM that is read soon after it is written or read, as long as it
    fits, and prefetches the operands of a matmul into VMEM during the kernel before. The matmul then takes no time for HBM traffic
    (1x1 convolutions on v5e with 51 million results: 590 µs from HBM to HBM, 459 from VMEM; with a quarter of them 83 from VMEM to
    VMEM). Other kernels take as long for reads, and no time for writes (additions of two arrays of 51 million: 766 and 627 µs).

    Buffers with the shortest lifetime are placed first. Of arrays that are no images, results of kernels are considered (plain
    Transformer layers on v5e and v6e), but not arguments, and no prefetches: weights have to be read from HBM in any case. Devices
    of two cores are not considered: on v5p the compiler places no array of over 26 MB, and almost none of the forward pass.

    Args:
      kernels: in the order in which they run.
      tiles: the images of the program.
      capacity: bytes of VMEM for buffers.
    """
    uses: dict[Buffer, list[int]] = {}
    some = [node for node in kernels if node.reads or node.writes]
    for k, node in enumerate(some):
        for item in (*node.reads, *node.writes):
            uses.setdefault(item, []).append(k)
    in_hbm = [node.kind in _HBM_KERNELS or bool(node.bodies) for node in some]
    spans: list[tuple[int, bool, int, int, Buffer]] = []  # kernels between, fetched?, from, to
    for item, places in uses.items():
        if item.bytes > capacity:
            continue
        made, image = item in some[places[0]].writes, tiles.of(item.value) is not None
        if not (made or image):
            continue
        for n, k in enumerate(places):
            if in_hbm[k]:
                continue
            multiplies, last, first = bool(some[k].matmuls), places[n - 1], n == 1 and made
            if n and (multiplies or first) and not in_hbm[last]:
                spans.append((k - last, False, last if first else max(0, last - 1), k, item))
            if image and k and multiplies and (n or not made):
                spans.append((1, True, k - 1, k, item))
    spans.sort(key=lambda span: span[:3])
    found: dict[Kernel, set[Buffer]] = {node: set() for node in some}
    there = [found[node] for node in some]
    left = [capacity] * len(some)
    for _, _, begin, end, item in spans:
        while begin <= end and item in there[begin]:
            begin += 1
        while begin <= end and item in there[end]:
            end -= 1
        size = item.bytes
        if begin <= end and min(left[begin : end + 1]) >= size:
            for k in range(begin, end + 1):
                left[k] -= size
            for k in {begin, min(begin + 1, end), max(begin, end - 1), end}:
                there[k].add(item)
    return found
