"""``mp.move``: the plan of a move of a tree between layouts, meshes and steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ...errors import UnsupportedError
from ..dims import did_you_mean, format_dims
from ..eight_bit_weights import quantize
from ..flax import flatten_named, variables
from ..global_arrays import is_key
from ..hardware.topology import chip_of, described_mesh
from ..layout import Layout, to_partition_spec
from ..mesh import planned_mesh
from ..moves import plan
from ..moves.move import Move
from ..moves.plan import MAX_ROUND_SHARE, MovedArray, Side, ordered, rounds_of
from ..moves.route import Operand, route, spec_of
from ..moves.target_paths_and_dtypes import Made, Rename, TreeArray, dtype_of, dtypes_of, made_of
from ..pods.state_by_name import nested
from .api import shardings
from .jitted import Jitted
from .options import DimsPatterns, path_dims
from .tracing import named_tree


def move(
    params: Any,
    *,
    source: Any = None,
    target: Any,
    dims: DimsPatterns = None,
    dtype: Any = None,
    contract: Mapping[str, str | int | tuple[int, ...]] | None = None,
    rename: Rename | None = None,
    topology: str | None = None,
    donate: bool = False,
) -> Move:
    """Plan the move of a tree of arrays to another layout, mesh or step: weights from a trainer to a sampler, keys and values from
    prefill to decoding.

    The result prints what each device sends, over which links, in how many seconds, and the peak memory; calling it runs the
    move. A device receives only what it needs and does not have, and no array is replicated on the way. On the same devices,
    that is one all-to-all and one all-gather for each array; on other devices, or where one axis takes the place of another,
    rounds of permutes. The arrays move in rounds, so that a device needs about a tenth of the tree in addition.

    Args:
      params: arrays or ``jax.ShapeDtypeStruct``; nnx modules too.
      source: where the tree is: (mesh, layout) or (mesh, layout, dims); a step (:func:`jit`) that was planned or called, of which
        the tree is an argument, a part of one, or a result; or a tree of shardings. None: the shardings of the arrays. Host arrays
        are copied from the host.
      target: where it goes, likewise. With (mesh, layout, dims), arrays have these dims there, by their paths in the target:
        ``(mesh, "cache: model", {"*": "batch cache heads head_dim"})``.
      dims: tree-path patterns → dims, for arrays without Flax metadata.
      dtype: cast floating-point arrays to it; or path pattern → dtype. The narrower one is sent.
      contract: with ``dtype="int8"`` or ``"float8_e4m3fn"``: path pattern → contracted dims, as in
        :func:`meshpar.layers.quantize`. The matching arrays are quantized where they are, and codes and scales are sent.
      rename: path → path in the target, where ``*`` represents the same text: ``{"*/wq": "*/query/kernel"}``. A fused array is
        split by (dim, {path: size}): ``{"*/qkv": ("heads", {"*/q": 32, "*/k": 8, "*/v": 8})}``; arrays are fused by
        ``{("*/q", "*/k", "*/v"): ("heads", "*/qkv")}``, where the dim is a name or a position.
      topology: of devices that are not attached, ``"v5p:4x4x4"``: meshes that are given as text are over all of it.
      donate: free the arrays of the source, each round its own. Otherwise the peak is at least source plus target.

    Returns:
      A :class:`meshpar.types.Move`: print it, ``save("move.html")``, call it with the tree.

    Raises:
      PatternError: a pattern of ``rename`` or ``dtype`` that matches no array.
      UnsupportedError: a step that was not planned yet, or one without these arrays; an array of another shape in the target step;
        sizes of parts that do not add up; int8 without ``contract``.
      MeshparError: as :func:`shardings`.

    Example:
      >>> move = mp.move(params, source=("data=8", "embed: data"), target=("data=2, model=4", "mlp: model"), dims=weights)
      >>> move.bytes_sent == move.bytes_received
      True
    """
    source, target = (_on_topology(side, topology) for side in (source, target))
    tree, prepare = variables(params), None
    where = _ends(tree, source, dims)
    if contract is None and dtype is not None and not isinstance(dtype, Mapping) and dtype_of(dtype) == jnp.int8:
        needs = "dtype=int8 needs contract=, the dims whose elements share a scale"
        raise UnsupportedError(needs, fixes=['contract={"*/kernel": 0}'])
    if contract is not None:
        tree, where, prepare = _quantized(tree, where, dtype, contract, dims)
        dtype = None
    made = made_of(where, rename or {})
    targets = _targets(tree, made, where, target, bool(rename), dims)
    dtypes = dtypes_of(where, made, dtype)
    moved = [_moved(path, m, [where[p] for p in m.sources], targets[path], dtypes[path]) for path, m in made.items()]
    side = max(sum(a.before for a in moved), sum(a.after for a in moved))
    most = max(MAX_ROUND_SHARE * side, plan.MIN_ROUND_BYTES)
    rounds = rounds_of(ordered(a.chunked(donate, most / 4) for a in moved), most)
    before, after = (
        Side(dict(mesh.shape), _layout_text(of), mesh.size)
        for mesh, of in ((moved[0].operands[0].sharding.mesh, source), (moved[0].sharding.mesh, target))
    )
    return Move(rounds, before, after, donate, bool(rename), prepare)


# -- where a tree is


def _on_topology(where: Any, topology: str | None) -> Any:
    """A side whose mesh, given as text, is over a topology."""
    if topology is None or not isinstance(where, tuple) or not isinstance(where[0], str | Mapping):
        return where
    return (described_mesh(dict(planned_mesh(where[0], topology).shape), topology), *where[1:])


def _ends(tree: Any, where: Any, dims: DimsPatterns) -> dict[str, TreeArray]:
    """Path → array of a tree on one side."""
    leaves = {leaf.path or "value": leaf for leaf in flatten_named(tree)}
    if (other := next((p for p, leaf in leaves.items() if not hasattr(leaf.value, "dtype")), "")) or not leaves:
        raise UnsupportedError(f"{other or 'the tree'} has no arrays to move", path=other, fixes=["a tree of arrays"])
    if isinstance(where, Jitted):
        found = _of_step(where, {p: np.shape(leaf.value) for p, leaf in leaves.items()})
        return {p: replace(found[p], dtype=leaf.value.dtype) for p, leaf in leaves.items()}
    if where is None:
        of = [_own_sharding(leaf.value, leaf.path) for leaf in leaves.values()]
    elif isinstance(where, tuple) and len(where) in (2, 3) and not isinstance(where[0], Sharding):
        dims = where[2] if len(where) == 3 else dims
        of = jax.tree.leaves(shardings(tree, where[1], where[0], dims=dims))
    else:
        of = jax.tree.leaves(where, is_leaf=lambda x: isinstance(x, Sharding))
        if len(of) != len(leaves) or not all(isinstance(s, NamedSharding) for s in of):
            raise UnsupportedError(
                f"{type(where).__name__} is no place of this tree",
                fixes=["(mesh, layout), a step of mp.jit, or a tree of NamedShardings as of mp.shardings"],
            )
    names = [d for _, d in named_tree(tree, path_dims(dims))] if dims is not None else [x.dims for x in leaves.values()]
    return {
        p: TreeArray(tuple(np.shape(leaf.value)), leaf.value.dtype, s, "" if d is None else format_dims(d))
        for (p, leaf), s, d in zip(leaves.items(), of, names, strict=True)
    }


def _own_sharding(x: Any, path: str) -> NamedSharding | None:
    """The sharding of an array; None: it is in host memory."""
    s = getattr(x, "sharding", None)
    if s is None and not isinstance(x, np.ndarray):
        raise UnsupportedError(
            f"{path}: nothing says where it is",
            path=path,
            fixes=["source=(mesh, layout), or arrays in place of shapes"],
        )
    if s is None or isinstance(s, NamedSharding):
        return None if s is not None and s.memory_kind == "pinned_host" else s
    if len(s.device_set) == 1:
        return NamedSharding(Mesh(np.array(list(s.device_set), dtype=object), ("device",)), PartitionSpec())
    text = f"{path} has the sharding {s}, which is over no mesh"
    raise UnsupportedError(text, path=path, fixes=["source=(mesh, layout)"])


def _of_step(step: Jitted[..., Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TreeArray]:
    """Path → array of a tree as a step has it, as a part of one of its arguments or results.

    Raises:
      UnsupportedError: the step has no plan yet, or no such arrays.
    """
    name, plan = getattr(step, "__name__", "the step"), step._caches.plans.latest()
    if plan is None:
        fixes = [f"{name}.plan(…), or a call", "or (mesh, layout) in its place"]
        raise UnsupportedError(f"{name} was not planned yet", fixes=fixes)
    mesh = step.mesh
    if not isinstance(mesh, Mesh) and plan.topology is not None:
        mesh = described_mesh(dict(mesh.shape), plan.topology)
    first = next(iter(shapes))
    for side in (plan.inputs, plan.outputs):
        of = {h.path: h for h in side}
        prefixes = [p.removesuffix(first) for p in of if p == first or p.endswith("/" + first) or first == "value"]
        for prefix in prefixes:
            paths = {p: prefix if first == "value" else prefix + p for p in shapes}
            if all(q in of and len(of[q].shape) == len(shapes[p]) for p, q in paths.items()):
                return {
                    p: TreeArray(of[q].shape, of[q].dtype, NamedSharding(mesh, of[q].spec), format_dims(of[q].dims))
                    for p, q in paths.items()
                }
    raise UnsupportedError(
        f"{name} has no argument or result with the arrays {', '.join(list(shapes)[:3])}",
        path=first,
        fixes=did_you_mean(first, [h.path for h in plan.inputs], "arguments"),
    )


def _layout_text(where: Any) -> str:
    if isinstance(where, Jitted):
        return str(where.layout)
    return str(Layout(where[1])) if isinstance(where, tuple) and not isinstance(where[0], Sharding) else ""


def _targets(
    tree: Any, made: Mapping[str, Made], where: Mapping[str, TreeArray], target: Any, renamed: bool, dims: DimsPatterns
) -> dict[str, TreeArray]:
    """Path → array of the target."""
    first = {p: where[m.sources[0]] for p, m in made.items()}
    if renamed:
        tree = nested({p: jax.ShapeDtypeStruct(m.shape, first[p].dtype) for p, m in made.items()})
    if renamed or not isinstance(target, tuple):  # patterns match paths of the source; shardings name no dims
        dims = [(p, x.dims) for p, x in first.items() if x.dims]
    found = _ends(tree, target, dims)
    for path, m in made.items():
        if any(a > b for a, b in zip(m.shape, found[path].shape, strict=True)):
            text = f"{path} has the shape {list(m.shape)}, and the target {list(found[path].shape)}"
            fixes = ["a target of at least this size: the rest is filled with zeros"]
            raise UnsupportedError(text, path=path, shape=m.shape, fixes=fixes)
    return found


def _moved(path: str, made: Made, of: list[TreeArray], to: TreeArray, dtype: Any) -> MovedArray:
    """The array of the target with its route; ``of``: the arrays of the source."""
    goal = to.sharding
    assert goal is not None
    names = to.dims if of[0].dims in ("", to.dims) else f"{of[0].dims} → {to.dims}"
    stays = all(x.sharding is not None for x in of) and not is_key(of[0]) and 0 not in to.shape
    operands = tuple(Operand(x.shape, x.sharding or goal, shift) for x, shift in zip(of, made.shifts, strict=True))
    r = route(operands, to.shape, goal) if stays else None
    return MovedArray(path, made.sources, names, to.shape, of[0].dtype, dtype, operands, goal, r, chip_of(goal.mesh))


# -- quantization


def _quantized(
    tree: Any, where: Mapping[str, TreeArray], dtype: Any, contract: Mapping[str, Any], dims: DimsPatterns
) -> tuple[Any, dict[str, TreeArray], Callable[[Any], Any]]:
    """(the quantized tree, where its arrays are, the function that quantizes).

    Scales are sharded as the weight, where that divides."""
    names: Any = [(p, x.dims) for p, x in where.items() if x.dims]
    run = partial(quantize, dtype=dtype or "int8", contract=contract, dims=names)
    small = jax.eval_shape(run, tree)
    out = {}
    for leaf in flatten_named(small):
        of = where[leaf.path.removesuffix(".codes").removesuffix(".scales")]
        assert of.sharding is not None
        sizes = of.sharding.mesh.shape
        shape, of_weight = leaf.value.shape, spec_of(of.sharding, len(of.shape))
        divides = (n % math.prod(sizes[a] for a in axes) == 0 for n, axes in zip(shape, of_weight, strict=True))
        spec = tuple(axes if fits else () for axes, fits in zip(of_weight, divides, strict=True))
        sharding = NamedSharding(of.sharding.mesh, to_partition_spec(spec))
        out[leaf.path] = replace(of, shape=shape, dtype=leaf.value.dtype, sharding=sharding)
    places = jax.tree.unflatten(jax.tree.structure(small), [x.sharding for x in out.values()])
    return small, out, lambda params: jax.jit(run, out_shardings=places)(variables(params))
