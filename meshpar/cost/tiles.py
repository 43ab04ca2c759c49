"""How images lie in a TPU's memory: in tiles of 8 by 128 elements, which a few channels do not fill."""

from __future__ import annotations

from ..layout import Spec
from ..plan.plan import Plan
from ..plan.spec import local_shape
from ..program.ir import Value

SUBLANES, LANES = 8, 128


class Tiles:
    """By how much tiles make the images of a program larger.

    The compiler lays what a convolution makes out with channels and batch innermost, in either order (libtpu 0.0.42 was seen to do
    so), and pads one to a multiple of 128, the other to one of 8: 64 channels of 64 images take twice their bytes. Arrays
    without convolutions have sizes that fill tiles, or can be laid out so that they do.
    """

    def __init__(self, plan: Plan):
        self.find, self.sizes = plan.program.unifier.find, plan.sizes
        self.images: set[tuple[int, int, int, int]] = set()  # classes and places of batch and channels
        self._places: dict[int, set[tuple[int, int, int, int]]] = {}  # by rank
        if plan.chip is None or plan.chip.switch:
            return
        for op in plan.program.root.walk():
            if op.name == "conv_general_dilated":
                dn = op.eqn.params["dimension_numbers"]
                for value, (batch, channels, *_) in ((op.ins[0], dn.lhs_spec), (op.outs[0], dn.out_spec)):
                    if value is not None:
                        self.images.add(self._key(value, batch, channels))

    def _key(self, value: Value, batch: int, channels: int) -> tuple[int, int, int, int]:
        nodes = value.nodes
        b, c = (self.find(nodes[i]) if nodes[i] >= 0 else -1 for i in (batch, channels))
        return b, c, batch, channels

    def padding(self, value: Value, spec: Spec) -> float:
        """How many times its bytes a shard takes."""
        rank = len(value.shape)
        if rank < 3 or not self.images:
            return 1.0
        if rank not in self._places:
            self._places[rank] = {(0, 0, b, c) for _, _, b, c in self.images if max(b, c) < rank}
        for _, _, batch, channels in self._places[rank]:
            if self._key(value, batch, channels) in self.images:
                shape = local_shape(value.shape, spec, self.sizes)
                b, c = shape[batch], shape[channels]
                if not b * c:
                    return 1.0
                return min(tiled(b, c), tiled(c, b)) / (b * c)
        return 1.0


def tiled(rows: int, columns: int) -> int:
    """Elements that tiles hold for so many rows and columns; fewer than 8 rows have tiles of 1, 2 or 4."""
    high = min(SUBLANES, 1 << (rows - 1).bit_length())
    return -(-rows // high) * high * (-(-columns // LANES) * LANES)
