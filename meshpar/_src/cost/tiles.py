"""Padding of images in a TPU's memory: tiles of 8 by 128 elements, which few channels do not fill."""

from __future__ import annotations

from collections.abc import Mapping

from ..layout import Spec
from ..plan.spec import shard_count
from ..program.ir import Program, Value

SUBLANES, LANES = 8, 128


class Tiles:
    """The images of a program, and the padding of their shards.

    The compiler stores operands and results of convolutions with channels and batch innermost, in either order (observed with
    libtpu 0.0.42), and pads one to a multiple of 128, the other to one of 8: 64 channels of 64 images take twice their bytes.
    Programs without convolutions have arrays whose sizes fill tiles, or that can be stored so that they do.
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

    def padding(self, value: Value, spec: Spec, sizes: Mapping[str, int]) -> float:
        """The factor by which tiles increase the bytes of a shard; 1 for values that are not images."""
        image = self.of(value)
        if image is None:
            return 1.0
        b, c = (-(-value.shape[i] // shard_count(spec[i], sizes)) for i in image)
        return min(tiled(b, c), tiled(c, b)) / (b * c) if b * c else 1.0


def tiled(rows: int, columns: int) -> int:
    """The number of elements, padding included, of tiles for ``rows`` by ``columns``; fewer than 8 rows have tiles of 1, 2 or 4."""
    high = min(SUBLANES, 1 << (rows - 1).bit_length())
    return -(-rows // high) * high * (-(-columns // LANES) * LANES)
