"""All-to-all and collective-permute: checks, choice of implementation, gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels._choose import dispatch
from meshpar_kernels.collectives.api import group
from meshpar_kernels.collectives.run_by_ppermute import in_mesh_order
from meshpar_kernels.exchange import gpu, tpu


class _How(NamedTuple):
    """Static arguments of an exchange: name of the op for messages, implementation, mesh axes of more than one device and
    their sizes, and for a collective-permute its (source, target) ranks."""

    op: str
    implementation: str | None
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...] = ()


def all_to_all(
    x: jax.Array,
    axis_name: str | Sequence[str],
    *,
    split_axis: int = 0,
    concat_axis: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """All-to-all: block i of x is sent to device i, and the received blocks are concatenated in the order of the devices.
    Call it inside `jax.shard_map`.

    Limit: with V bytes of x, A devices and W bytes/s of a link in one direction, a ring takes at least V·(A + 2)/(8·W), a
    line V·A/(4·W); GPUs in an NVLink domain V·(A - 1)/(A·W), with W of the GPU. Blocks are copied from HBM to HBM. The
    kernels have not been timed on a device.

    Example, tokens from a sharded sequence to sharded heads (Ulysses)::

        heads = jax.shard_map(
            lambda x: all_to_all(x, "context", split_axis=1, concat_axis=0),
            mesh=mesh, in_specs=P("context", None, None), out_specs=P(None, "context", None),
        )(x)                                   # x: [seq, heads, head_dim]

    Args:
      x: at least one dim; every dtype of 1, 2 or 4 bytes (the kernels take no booleans).
      axis_name: the mesh axis, or several, major first.
      split_axis: the dim that is cut into a block for each device.
      concat_axis: the dim along which received blocks are concatenated.
      implementation: "native": XLA's collective. "pallas": the kernel of the platform. "pallas_tpu": remote DMA, one copy for
        each device. "pallas_gpu": TMA over NVLink, at most 8 GPUs (sm_90a, sm_100a). None: "native", unless
        `MESHPAR_KERNELS=pallas`.

    Returns:
      x's shape with `split_axis` divided by A and `concat_axis` multiplied by A, as `jax.lax.all_to_all(tiled=True)`.
        Differentiable: the transpose is an `all_to_all` by the same implementation, with the two dims swapped.

    Raises:
      ValueError: axes or dims that do not fit, an unknown implementation, or x sharded outside of `shard_map`.
      NotImplementedError: the requested kernel cannot take x; with every reason.
    """
    op = "all_to_all"
    axes, sizes = group(op, x, axis_name)
    for name, d in (("split_axis", split_axis), ("concat_axis", concat_axis)):
        if not -x.ndim <= d < x.ndim:
            raise ValueError(f"{op}: {name}={d}, and x{list(x.shape)} has no such dimension")
    split, concat = split_axis % x.ndim, concat_axis % x.ndim
    devices = math.prod(sizes)
    if x.shape[split] % devices:
        raise ValueError(
            f"{op}: dimension {split} of x{list(x.shape)} is no multiple of the {devices} devices of {', '.join(axes)}; "
            "pad it, or split another dimension (split_axis=)"
        )
    if not axes or not x.size:
        shape = list(x.shape)
        shape[split] //= devices
        shape[concat] *= devices
        return x.reshape(shape)
    block = x.shape[split] // devices
    blocks = jnp.moveaxis(x.reshape(*x.shape[:split], devices, block, *x.shape[split + 1 :]), split, 0)
    (blocks,) = _compat.varying_over(axes, blocks)
    received: Any = _exchange(_How(op, implementation, axes, sizes), blocks)
    joined = jnp.moveaxis(received, 0, concat)
    shape = joined.shape
    return joined.reshape(*shape[:concat], devices * shape[concat + 1], *shape[concat + 2 :])


def collective_permute(
    x: jax.Array, axis_name: str | Sequence[str], pairs: Sequence[tuple[int, int]], *, implementation: str | None = None
) -> jax.Array:
    """Collective-permute: each source sends its array to its target. Call it inside `jax.shard_map`.

    Limit: with V bytes of x and W bytes/s of a link in one direction, V/W times the number of pairs whose route uses the
    busiest link; 1 for a shift by one along a ring. The array is copied from HBM to HBM. XLA overlaps "native" with other
    work and "pallas" with none. The kernels have not been timed on a device.

    Example, a shift by one along a ring of 8 devices::

        shifted = jax.shard_map(
            lambda x: collective_permute(x, "x", [(i, (i + 1) % 8) for i in range(8)]),
            mesh=mesh, in_specs=P("x"), out_specs=P("x"),
        )(x)

    Args:
      x: any shape, the same on all devices; dtypes as for `all_to_all`.
      axis_name: the mesh axis, or several, major first.
      pairs: (rank of the source, rank of the target). A rank is row-major in the order of `axis_name`, and at most once a
        source and at most once a target.
      implementation: as for `all_to_all`.

    Returns:
      The received array, in x's shape; zeros on a device that is no target. Differentiable: the transpose sends the
        cotangents from the targets to the sources.

    Raises:
      ValueError: axes that do not fit, ranks out of range or repeated, an unknown implementation, or x sharded outside of
        `shard_map`.
      NotImplementedError: the requested kernel cannot take x; with every reason.
    """
    op = "collective_permute"
    axes, sizes = group(op, x, axis_name)
    devices = math.prod(sizes)
    ends = tuple((int(s), int(t)) for s, t in pairs)
    for name, ranks in (("source", [s for s, _ in ends]), ("target", [t for _, t in ends])):
        if out := [r for r in ranks if not 0 <= r < devices]:
            raise ValueError(f"{op}: {name} {out[0]} is no rank of {devices} devices; ranks are 0 to {devices - 1}")
        if twice := [r for r in ranks if ranks.count(r) > 1]:
            raise ValueError(
                f"{op}: rank {twice[0]} is a {name} {ranks.count(twice[0])} times; each rank may be a {name} once. Call "
                f"{op} once for each of its pairs"
            )
    if not axes or not x.size:
        return x if ends else jnp.zeros_like(x)
    (x,) = _compat.varying_over(axes, x)
    received: Any = _exchange(_How(op, implementation, axes, sizes, ends), x)
    return received


def _native(how: _How, x: jax.Array) -> jax.Array:
    """The exchange by XLA's collective."""
    if how.op == "all_to_all":
        return lax.all_to_all(x, how.axes, 0, 0)
    names, numbers = in_mesh_order(how.axes)
    return lax.ppermute(x, names, [(numbers[s], numbers[t]) for s, t in how.pairs])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(how: _How, x: jax.Array) -> jax.Array:
    """The all-to-all of x [A, …] → [A, …], or the collective-permute of x."""
    kernels = {"pallas_tpu": tpu, "pallas_gpu": gpu}
    functions: dict[str, Any] = {}
    for name, module in kernels.items():
        run = functools.partial(getattr(module, how.op), axes=how.axes, sizes=how.sizes)
        if how.op == "collective_permute":
            run = functools.partial(run, pairs=how.pairs)
        functions[name] = module.unsupported(x.dtype, how.axes, how.sizes) or run
    functions["native"] = functools.partial(_native, how)
    return dispatch(how.op, how.implementation, functions, "native", x)


def _backward(how: _How, _: None, grad: jax.Array) -> tuple[Any]:
    return (_exchange(how._replace(pairs=tuple((t, s) for s, t in how.pairs)), grad),)


_exchange.defvjp(lambda how, x: (_exchange(how, x), None), _backward)
