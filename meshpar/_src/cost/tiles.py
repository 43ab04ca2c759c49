"""Padding of arrays in a TPU's memory: tiles of 8 by 128 elements, which few channels or 197 tokens do not fill."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping

from ..layout import Spec
from ..plan.shard_shapes import itemsize, shard_count
from ..program.ir import Program, Value

SUBLANES, LANES = 8, 128
MIN_PADDED_BYTES = 1_048_576
"""Bytes of a shard, other than of an image, from which its padding counts; smaller ones neither take long nor fill the memory."""


class Tiles:
    """The images of a program, and the padding of shards.

    The compiler stores operands and results of convolutions with channels and batch innermost, in either order (observed with
    libtpu 0.0.42), and pads one to a multiple of 128, the other to one of 8: 64 channels of 64 images take twice their bytes.
    It stores other large arrays with those two dims innermost that need the least padding: scores of 197 by 197 tokens take a third
    more than their bytes.
    """

    def __init__(self, program: Program):
        """Find the operands and results of the program's convolutions, with their batch and channel dims."""
        self.find = program.unifier.find
        self.images: set[tuple[int, int, int, int]] = set()  # classes and places of batch and channels
        self._of: dict[Value, tuple[int, int] | None] = {}
        for op in program.root.walk():
            if op.primitive.family == "conv":
                dn = op.eqn.params["dimension_numbers"]
                for value, (batch, channels, *_) in ((op.ins[0], dn.lhs_spec), (op.outs[0], dn.out_spec)):
                    if value is not None:
                        self.images.add(self._key(value, batch, channels))
        self._places = sorted({(batch, channels) for _, _, batch, channels in self.images})

    def _key(self, value: Value, batch: int, channels: int) -> tuple[int, int, int, int]:
        nodes = value.nodes
        b, c = (self.find(nodes[i]) if nodes[i] >= 0 else -1 for i in (batch, channels))
        return b, c, batch, channels

    def of(self, value: Value) -> tuple[int, int] | None:
        """(index of the batch dim, of the channel dim) of an image; None for other values."""
        rank = len(value.shape)
        if rank < 3 or not self.images:
            return None
        if value not in self._of:
            places = [p for p in self._places if max(p) < rank and self._key(value, *p) in self.images]
            self._of[value] = places[0] if places else None
        return self._of[value]

    def moves(self, source: Value, result: Value) -> bool:
        """Whether a reshape moves elements to other tiles, as it splits or merges the channels of an image: into the groups of a
        group norm, or out of them."""
        for image, other in ((source, result), (result, source)):
            if (places := self.of(image)) is not None:
                before, channels = math.prod(image.shape[: places[1]]), image.shape[places[1]]
                ends = itertools.accumulate(other.shape, operator.mul, initial=1)
                return not any(n == channels and k == before for n, k in zip(other.shape, ends, strict=False))
        return False

    def padding(self, value: Value, spec: Spec, sizes: Mapping[str, int]) -> float:
        """The factor by which tiles increase the bytes of a shard; 1 for small ones that are not images."""
        shape = [-(-n // shard_count(parts, sizes)) for n, parts in zip(value.shape, spec, strict=True)]
        image, elements = self.of(value), math.prod(shape)
        if not elements or (image is None and elements * itemsize(value.aval) < MIN_PADDED_BYTES):
            return 1.0
        return padding_of(tuple(shape if image is None else [shape[i] for i in image]))


@functools.lru_cache(maxsize=2**14)
def padding_of(shape: tuple[int, ...]) -> float:
    """The factor of the two dims that need the least padding innermost."""
    return min((tiled(a, b) / (a * b) for a, b in itertools.permutations(shape, 2)), default=1.0)


def tiled(rows: int, columns: int) -> int:
    """The number of elements, padding included, of tiles for ``rows`` by ``columns``; fewer than 8 rows have tiles of 1, 2 or 4."""
    high = min(SUBLANES, 1 << (rows - 1).bit_length())
    return -(-rows // high) * high * (-(-columns // LANES) * LANES)
