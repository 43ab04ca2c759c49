"""Shared by the strategies: mesh axes of the sequence, positions of each device's tokens, and the attention on one
device."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar_kernels._choose import Unsupported, dispatch
from meshpar_kernels.attention import cudnn, flash, reference, splash, tpu
from meshpar_kernels.attention.flash import Keys, Queries, Softmax
from meshpar_kernels.attention.library_calls_per_block import Layout
from meshpar_kernels.attention.masks import positions
from meshpar_kernels.collectives import reduce_scatter
from meshpar_kernels.collectives.run_by_ppermute import in_mesh_order

Axes = tuple[str, ...]
UNKNOWN = Layout()


@dataclasses.dataclass(frozen=True)
class Context:
    """Static arguments of the attention.

    Attributes:
      axes: the mesh axes over which the sequence is sharded, the first major.
      devices: number of devices on all of them.
      softmax: mask and scores.
      zigzag: tokens are in zig-zag order for so many devices; 1: in order.
      both_ways: the ring sends in both directions.
      implementation: of the attention on one device.
      sizes: of the axes; (): one axis with all devices.
      scatter: how the gradients of gathered keys and values are reduced: "xla", "ring", or None: rings if there are
        several axes.
      balanced: a ring exchanges queries between devices, so that causal work is balanced; None: where that takes less
        time (`costs.ready`).
      placed: the positions of the tokens are an operand.
      inner: number of the last axes over which heads are exchanged.
      order: the devices of `outer` in the order in which a ring visits all of them (`ring.any_order`); (): in the order
        of their ranks.
    """

    axes: Axes
    devices: int
    softmax: Softmax
    zigzag: int = 1
    both_ways: bool = True
    implementation: str | None = None
    sizes: tuple[int, ...] = ()
    scatter: str | None = None
    balanced: bool | None = False
    placed: bool = False
    inner: int = 0
    order: tuple[int, ...] = ()

    def over(self, first: int, end: int) -> Context:
        """The context of the axes first…end-1."""
        stages = self.stages[first:end]
        axes, sizes = tuple(a for a, _ in stages), tuple(n for _, n in stages)
        return dataclasses.replace(self, axes=axes, sizes=sizes, devices=math.prod(sizes), inner=0)

    @property
    def outer(self) -> Context:
        """The context of the axes over which no heads are exchanged."""
        return self.over(0, len(self.axes) - self.inner) if self.inner else self

    @property
    def exchange(self) -> Context:
        """The context of the axes over which heads are exchanged."""
        return self.over(len(self.axes) - self.inner, len(self.axes))

    @property
    def stages(self) -> list[tuple[str, int]]:
        """The axes and their sizes."""
        return list(zip(self.axes, self.sizes or (self.devices,) * len(self.axes), strict=True))

    @property
    def in_order(self) -> bool:
        """Whether the tokens of each device, and of all together, are in the order of their positions."""
        return self.zigzag == 1 and not self.placed

    def rank(self) -> jax.Array | int:
        """Rank of this device, int32 [] (0 for one device)."""
        return lax.axis_index(self.axes) if self.devices > 1 else 0

    def positions(self, device: jax.Array | int, each: int, low: int = 0, high: int | None = None) -> jax.Array:
        """int32 positions of the tokens low…high-1 among the `each` tokens of a device."""
        index = device * each + jnp.arange(low, each if high is None else high, dtype=jnp.int32)
        return positions(index, each * self.devices, self.zigzag)

    def own_positions(self, given: jax.Array | None, each: int) -> jax.Array:
        """int32 positions of this device's tokens; `given`: the operand, if they are one."""
        return self.positions(self.rank(), each) if given is None else given

    def all_positions(self, given: jax.Array | None, each: int) -> jax.Array:
        """int32 positions of all devices' tokens, in the order of the devices; `given`: this device's, if they are an
        operand."""
        if given is not None:
            return lax.all_gather(given, self.axes, tiled=True)
        total = each * self.devices
        return positions(jnp.arange(total, dtype=jnp.int32), total, self.zigzag)

    def shift(self, x, by: int):
        """The pytree of the device `by` below on the ring: every device sends its own to the device `by` above."""
        ring = self.order or range(self.devices)
        return self._permuted(x, [(device, ring[(i + by) % self.devices]) for i, device in enumerate(ring)])

    def below(self, by: jax.Array | int) -> jax.Array | int:
        """Rank of the device `by` below this one on the ring, int32 []."""
        if not self.order:
            return (self.rank() - by) % self.devices
        ring = np.asarray(self.order, np.int32)
        index = jnp.asarray(np.argsort(ring).astype(np.int32))[self.rank()]
        return jnp.asarray(ring)[(index - by) % self.devices]

    def mirrored(self, x):
        """The pytree of the device A - 1 - i, on device i."""
        return self._permuted(x, [(i, self.devices - 1 - i) for i in range(self.devices)])

    def _permuted(self, x, pairs: Sequence[tuple[int, int]]):
        """The pytree of the source of this device; `pairs`: ranks of sources and targets."""
        axes, number = in_mesh_order(self.axes)
        pairs = sorted((number[a], number[b]) for a, b in pairs)
        return jax.tree.map(lambda a: lax.ppermute(a, axes, pairs), x)

    @property
    def ring_scatter(self) -> bool:
        """Whether gradients of gathered keys and values are reduced on rings of collective-permutes."""
        return self.scatter == "ring" or (self.scatter is None and sum(n > 1 for _, n in self.stages) > 1)

    def scattered(self, x: jax.Array, axis: int) -> jax.Array:
        """Reduce-scatter of x along a dim: the sum over all devices, of which this device gets its block.

        It runs over one mesh axis after another, the major one first, which leaves the blocks in order. XLA compiles a
        reduce-scatter over several torus dims to an all-reduce, which sends twice as much; in the backward pass of
        attention it does so with one reduce-scatter for each dim too. It does not change rings of collective-permutes.
        """
        for name in self.axes:
            if self.ring_scatter:
                x = reduce_scatter(x, name, axis=axis, implementation="ring")
            else:
                x = lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
        return x

    def all_or_none(self, queries: int, keys: int) -> bool:
        """Whether each other device's keys are visible to all of this device's queries or to none: a causal mask, and
        equally many queries and keys on each device, in order."""
        return self.softmax.mask.causal and self.softmax.mask.window is None and self.in_order and queries == keys

    def _dispatch(self, direction: str, layout: Layout, q: Queries, k: Keys, *more: Any, **libraries: Any) -> Any:
        """`flash.forward` or `flash.backward` by the requested implementation; `libraries`: arguments of cuDNN and splash."""
        functions: dict[str, Any] = {
            name: module.unsupported(self.softmax, q, k, layout)
            or functools.partial(getattr(module, direction), self.softmax, layout=layout, **libraries)
            for name, module in (("cudnn", cudnn), ("splash", splash))
        }
        functions["pallas_tpu"] = tpu.unsupported(q, k) or functools.partial(getattr(tpu, direction), self.softmax)
        functions["pallas_gpu"] = NO_GPU
        for name, module in (("xla", flash), ("reference", reference)):
            functions[name] = functools.partial(getattr(module, direction), self.softmax)
        return dispatch("ring_attention", self.implementation, functions, "xla", q, k, *more)

    def forward(self, q: Queries, k: Keys, layout: Layout = UNKNOWN) -> tuple[jax.Array, jax.Array]:
        """`flash.forward` by the requested implementation; `layout` is for cuDNN and splash."""
        return self._dispatch("forward", layout, q, k)

    def backward(
        self, q: Queries, k: Keys, grad: jax.Array, lse: jax.Array, dots: jax.Array, out: jax.Array,
        layout: Layout = UNKNOWN,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """`flash.backward` by the requested implementation; cuDNN requires the result over all keys, `out`."""
        return self._dispatch("backward", layout, q, k, grad, lse, dots, out=out)


NO_GPU = Unsupported(("there is no GPU kernel for this op",))
