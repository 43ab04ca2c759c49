"""``mp.move``: the plan of a move of a tree between layouts, meshes and steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ...errors import PatternError, UnsupportedError
from ..dims import did_you_mean, format_dims, path_matches
from ..flax import flatten_named, variables
from ..global_arrays import is_key
from ..hardware.chips import Chip
from ..hardware.topology import chip_of, described_mesh
from ..layout import Layout, to_partition_spec
from ..mesh import planned_mesh
from ..moves import plan
from ..moves.move import Move
from ..moves.plan import MAX_ROUND_SHARE, MovedArray, chunks_of, collectives_of, ordered, rounds_of
from ..moves.planned import MovePlan, Side
from ..moves.route import Operand, route, spec_of
from ..plan.spec import itemsize_of
from ..pods.names import nested
from ..quantization import quantize
from .api import shardings
from .jitted import Jitted
from .options import DimsPatterns, path_dims
from .tracing import named_tree

Rename = Mapping[str | tuple[str, ...], str | tuple[str | int, str | Mapping[str, int]]]


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of a tree: its shape and dtype, its sharding, the names of its dims ("": not known)."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding | None
    dims: str


@dataclass(frozen=True, slots=True)
class _Made:
    """An array of the target before it has a sharding: paths of the source, and the index of the first element of each."""

    sources: tuple[str, ...]
    shifts: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]


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
    if contract is None and dtype is not None and not isinstance(dtype, Mapping) and _dtype(dtype) == jnp.int8:
        raise UnsupportedError(
            "dtype=int8 needs contract=, the dims whose elements share a scale", fixes=['contract={"*/kernel": 0}']
        )
    if contract is not None:
        tree, where, prepare = _quantized(tree, where, dtype, contract, dims)
        dtype = None
    arrays = {leaf.path or "value": leaf.value for leaf in flatten_named(tree)}
    made = _made(where, rename or {})
    targets = _targets(tree, made, where, target, bool(rename), dims)
    dtypes = _dtypes(arrays, made, dtype)
    where_to = next(iter(targets.values())).sharding if targets else None
    chip = chip_of(where_to.mesh) if where_to is not None and isinstance(where_to.mesh, Mesh) else None
    moved = [_moved(path, m, where, targets[path], dtypes[path], chip) for path, m in made.items()]
    side = max(sum(a.before for a in moved), sum(a.after for a in moved))
    most = max(MAX_ROUND_SHARE * side, plan.MIN_ROUND_BYTES)
    rounds = rounds_of(ordered(_chunked(a, donate, most / 4, chip) for a in moved), most)
    first = moved[0]
    before, after = (
        Side(dict(s.mesh.shape), _layout_text(where), s.mesh.size)
        for s, where in ((first.operands[0].sharding, source), (first.sharding, target))
    )
    return Move(MovePlan(rounds, before, after, donate, chip), bool(rename), prepare)


# -- where a tree is


def _on_topology(where: Any, topology: str | None) -> Any:
    """A side whose mesh, given as text, is over a topology."""
    if topology is None or not isinstance(where, tuple) or not isinstance(where[0], str | Mapping):
        return where
    return (described_mesh(dict(planned_mesh(where[0], topology).shape), topology), *where[1:])


def _ends(tree: Any, where: Any, dims: DimsPatterns) -> dict[str, _Array]:
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
        p: _Array(tuple(np.shape(leaf.value)), leaf.value.dtype, s, "" if d is None else format_dims(d))
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
    raise UnsupportedError(
        f"{path} has the sharding {s}, which is over no mesh", path=path, fixes=["source=(mesh, layout)"]
    )


def _of_step(step: Jitted[..., Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Array]:
    """Path → array of a tree as a step has it, as a part of one of its arguments or results.

    Raises:
      UnsupportedError: the step has no plan yet, or no such arrays.
    """
    name, plan = getattr(step, "__name__", "the step"), step._caches.plans.latest()
    if plan is None:
        raise UnsupportedError(
            f"{name} was not planned yet", fixes=[f"{name}.plan(…), or a call", "or (mesh, layout) in its place"]
        )
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
                    p: _Array(of[q].shape, of[q].dtype, NamedSharding(mesh, of[q].spec), format_dims(of[q].dims))
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


# -- names


def _captured(pattern: str, path: str) -> list[str] | None:
    """The texts of the ``*`` of a pattern in a path; None: it does not match. A leading ``*/`` also matches no text."""
    for text in (path, "/" + path):
        if m := re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), text):
            return list(m.groups())
    return None


def _filled(template: str, texts: Sequence[str]) -> str:
    """The template with its ``*`` replaced."""
    found = iter(texts)
    return re.sub(r"\*", lambda _: next(found, "*"), template).removeprefix("/")


def _made(where: Mapping[str, _Array], rename: Rename) -> dict[str, _Made]:
    """Path in the target → what it is made of.

    Raises:
      PatternError: a pattern that matches no array, or two arrays with one path.
      UnsupportedError: sizes that do not add up.
    """
    out: dict[str, _Made] = {}
    used: set[Any] = set()
    done: set[str] = set()
    for path, of in where.items():
        if path in done:
            continue
        made = {path: _Made((path,), ((0,) * len(of.shape),), of.shape)}
        for rule, to in rename.items():
            pattern = rule if isinstance(rule, str) else rule[0]
            if (texts := _captured(pattern, path)) is None:
                continue
            used.add(rule)
            sources = (path,) if isinstance(rule, str) else tuple(_filled(p, texts) for p in rule)
            for p in sources:
                if p not in where:
                    raise PatternError(
                        f"rename={{{rule!r}: …}}: there is no `{p}`", path=p, fixes=did_you_mean(p, where, "arrays")
                    )
            made = dict(_renamed(sources, to, texts, where))
            done.update(sources)
            break
        twice = next((p for p in made if p in out), None)
        if twice is not None:
            raise PatternError(
                f"two arrays of the source become `{twice}`", path=twice, fixes=["another path in rename="]
            )
        out.update(made)
    for rule in rename:
        if rule not in used:
            raise PatternError(
                f"rename={{{rule!r}: …}} matches no array", fixes=did_you_mean(str(rule), where, "arrays")
            )
    return out


def _renamed(
    sources: tuple[str, ...],
    to: str | tuple[str | int, str | Mapping[str, int]],
    texts: Sequence[str],
    where: Mapping[str, _Array],
) -> Iterator[tuple[str, _Made]]:
    """(path, what it is made of) for each array of the target that a rule of ``rename`` makes."""
    first = where[sources[0]]
    zero = (0,) * len(first.shape)
    if isinstance(to, str):
        yield _filled(to, texts), _Made(sources, (zero,), first.shape)
        return
    dim, into = to
    names = first.dims.split()
    if dim not in names and not (isinstance(dim, int) and -len(zero) <= dim < len(zero)):
        raise PatternError(
            f"{sources[0]} has no dim {dim!r}", path=sources[0], fixes=did_you_mean(str(dim), names, "dims")
        )
    axis = names.index(dim) if isinstance(dim, str) else dim % len(zero)

    def at(index: int) -> tuple[int, ...]:
        return (*zero[:axis], index, *zero[axis + 1 :])

    def sized(n: int) -> tuple[int, ...]:
        return (*first.shape[:axis], n, *first.shape[axis + 1 :])

    if isinstance(into, str):
        ends = np.cumsum([0, *(where[p].shape[axis] for p in sources)]).tolist()
        yield _filled(into, texts), _Made(sources, tuple(map(at, ends[:-1])), sized(ends[-1]))
        return
    if sum(into.values()) != first.shape[axis]:
        raise UnsupportedError(
            f"{sources[0]}: the parts along {dim!r} have {sum(into.values())} elements, and the array {first.shape[axis]}",
            path=sources[0], shape=first.shape, fixes=["sizes that add up to it"],
        )  # fmt: skip
    begin = 0
    for path, n in into.items():
        yield _filled(path, texts), _Made(sources, (at(-begin),), sized(n))
        begin += n


def _targets(
    tree: Any, made: Mapping[str, _Made], where: Mapping[str, _Array], target: Any, renamed: bool, dims: DimsPatterns
) -> dict[str, _Array]:
    """Path → array of the target."""
    if isinstance(target, Jitted):
        found = _of_step(target, {p: m.shape for p, m in made.items()})
    elif renamed:
        of = {p: where[m.sources[0]] for p, m in made.items()}
        shapes = nested({p: jax.ShapeDtypeStruct(m.shape, of[p].dtype) for p, m in made.items()})
        own: Any = [(p, x.dims) for p, x in of.items() if x.dims]
        if isinstance(target, tuple) and len(target) == 3:
            own = target[2]
        found = _ends(shapes, (*target[:2], own) if isinstance(target, tuple) else target, own)
    else:
        found = _ends(tree, target, dims)
        if not isinstance(target, tuple):  # a tree of shardings, which names no dims
            found = {p: replace(x, dims=where[p].dims) for p, x in found.items()}
    for path, m in made.items():
        if any(a > b for a, b in zip(m.shape, found[path].shape, strict=True)):
            raise UnsupportedError(
                f"{path} has the shape {list(m.shape)}, and the target {list(found[path].shape)}",
                path=path, shape=m.shape, fixes=["a target of at least this size: the rest is filled with zeros"],
            )  # fmt: skip
    return found


def _dtype(dtype: Any) -> Any:
    """The dtype of a name.

    Raises:
      UnsupportedError: there is no such dtype.
    """
    try:
        return jnp.dtype(dtype)
    except TypeError:
        known = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
        raise UnsupportedError(
            f"dtype={dtype!r} is no dtype", fixes=did_you_mean(str(dtype), known, "dtypes")
        ) from None


def _dtypes(arrays: Mapping[str, Any], made: Mapping[str, _Made], dtype: Any) -> dict[str, Any]:
    """Path in the target → dtype.

    Raises:
      PatternError: a pattern that matches no array.
    """
    patterns = dtype if isinstance(dtype, Mapping) else {} if dtype is None else {"*": dtype}
    for pattern in patterns:
        if not any(path_matches(pattern, p) for p in made):
            raise PatternError(
                f"dtype={{{pattern!r}: …}} matches no array", fixes=did_you_mean(pattern, made, "arrays")
            )
    out = {}
    for path, m in made.items():
        own = arrays[m.sources[0]].dtype
        new = next((d for p, d in patterns.items() if path_matches(p, path)), own)
        casts = isinstance(dtype, Mapping) or jnp.issubdtype(own, jnp.floating)
        out[path] = _dtype(new) if casts and new is not own else own
    return out


# -- arrays


def _moved(
    path: str,
    made: _Made,
    where: Mapping[str, _Array],
    to: _Array,
    dtype: Any,
    chip: Chip | None,
) -> MovedArray:
    """The array of the target with its route."""
    of = [where[p] for p in made.sources]
    goal = to.sharding
    assert goal is not None
    names = to.dims if of[0].dims in ("", to.dims) else f"{of[0].dims} → {to.dims}"
    stays = all(x.sharding is not None for x in of) and not is_key(of[0]) and 0 not in to.shape
    operands = tuple(Operand(x.shape, x.sharding or goal, shift) for x, shift in zip(of, made.shifts, strict=True))
    r = route(operands, to.shape, goal) if stays else None
    array = MovedArray(
        path, made.sources, names, to.shape, of[0].dtype, dtype, operands, goal, r, (0, 1), False, (), {}
    )
    return _recorded(array, chip)


def _recorded(array: MovedArray, chip: Chip | None) -> MovedArray:
    """The array with the records of its collectives."""
    if array.route is None:
        return replace(array, links={"host": array.after} if not is_key(array) else {})
    names = array.dims.split(" → ")
    before, after = _rules(names[0], array.operands[0].sharding), _rules(names[-1], array.sharding)
    cause = f"{before} before, {after} after"
    sent = array.old_dtype if itemsize_of(array.old_dtype) == array.wire else array.dtype
    records, links = collectives_of(
        array.route,
        array.operands,
        array.path,
        array.dims,
        array.shape,
        str(sent),
        array.wire,
        array.chunks[1],
        cause,
        chip,
    )
    return replace(array, collectives=records, links=links)


def _rules(dims: str, sharding: NamedSharding) -> str:
    """The sharding of an array as rules, of the dims that are sharded."""
    names = dims.split()
    axes = spec_of(sharding, len(names)) if len(names) >= len(sharding.spec) else ()
    rules = "; ".join(f"{name}: {'+'.join(of)}" for name, of in zip(names, axes, strict=False) if of)
    return f"`{rules}`" if rules else f"`{sharding.spec}`" if any(sharding.spec) else "replicated"


def _chunked(array: MovedArray, donate: bool, most: float, chip: Chip | None) -> MovedArray:
    """The array in chunks of at most ``most`` bytes, as far as its first dim allows."""
    if array.route is None:
        return array
    size, same = max(array.before, array.after), array.before == array.after and array.old_dtype == array.dtype
    if array.route.parts is not None and not array.route.joints:  # it stays as it is
        return replace(array, in_place=donate and same)
    if size <= most:
        return array
    at, count = chunks_of(array.route, array.shape, most, size)
    place = donate and count > 1 and same and array.route.replaces(at)
    return _recorded(replace(array, chunks=(at, count), in_place=place), chip)


# -- quantization


def _quantized(
    tree: Any, where: Mapping[str, _Array], dtype: Any, contract: Mapping[str, Any], dims: DimsPatterns
) -> tuple[Any, dict[str, _Array], Callable[[Any], Any]]:
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
        spec = [
            axes if n % np.prod([sizes[a] for a in axes], dtype=int) == 0 else ()
            for n, axes in zip(leaf.value.shape, spec_of(of.sharding, len(of.shape)), strict=True)
        ]
        out[leaf.path] = replace(
            of, shape=leaf.value.shape, dtype=leaf.value.dtype,
            sharding=NamedSharding(of.sharding.mesh, to_partition_spec(tuple(spec))),
        )  # fmt: skip
    places = jax.tree.unflatten(jax.tree.structure(small), [x.sharding for x in out.values()])
    return small, out, lambda params: jax.jit(run, out_shardings=places)(variables(params))
