"""Gradient accumulation: a batch is processed in microbatches, and gradients are reduced once at the end."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import DivisibilityError, LayoutSyntaxError, MeshparError, UnsupportedError
from ..compat import lazy_nnx as nnx
from ..compat.jax import axes_of_spec, user_stacklevel
from ..global_arrays import is_key
from ..layout import AnyMesh, Layout


def accumulate_gradients(
    fn: Callable[..., Any], microbatches: int, *, argnums: int | Sequence[int] | None = None,
    argnames: str | Sequence[str] | None = None, key_argnums: int | Sequence[int] = (), key_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:  # fmt: skip
    """A function that runs ``fn`` on microbatches of its batch, one after the other, and averages the results.

    ``mp.train.accumulate_gradients(jax.value_and_grad(loss), 8)`` needs the memory for the activations of an eighth of the batch.
    Under a layout the gradients stay partial until the last microbatch (in float32, if the model computes in bfloat16) and are then
    reduced once. Gradients that a loop over layers stacks and that the layout shards (FSDP) are reduce-scattered layer by layer in
    every microbatch, since no device has room for them unsharded. Other gradients of sharded weights, such as gradients of an
    unrolled model, are reduced in every microbatch if the step would otherwise not fit into the memory of the chip, or with
    ``gather="microbatch"`` (:func:`meshpar.jit`).

    Arguments may be NNX modules: ``mp.train.accumulate_gradients(nnx.value_and_grad(loss), 8)(model, x)``. Variables other than
    parameters (batch statistics, the counts of dropout's keys) go from one microbatch to the next, so that each has masks of its
    own, and are updated in place at the end.

    Args:
      fn: returns means over its batch (a loss and its gradients): any tree of arrays.
      microbatches: their number; it must divide the leading dim of every array of the batch.
      argnums, argnames: positions, and names of keyword arguments, that are batches. With neither: all arguments after the first,
        also by keyword, except scalars, PRNG keys and NNX modules. The other arguments are passed to every microbatch unchanged.
      key_argnums, key_argnames: positions and names of the arguments that are PRNG keys (or trees of them): microbatch i gets
        ``jax.random.fold_in(key, i)``. Otherwise all microbatches have the same key, and the same dropout masks; for typed keys
        there is a warning.

    Returns:
      A function with the arguments and results of ``fn``. Floating-point results are averaged over the microbatches (in float32 if
      they are narrower), integers are summed; Python numbers count as arrays. Row r of the batch is in microbatch
      ``r % microbatches``, so that each device splits its own rows and none are sent.

    Raises:
      LayoutSyntaxError: ``microbatches`` below 1.
      DivisibilityError: (when called) a batch that does not divide, or batches of different leading sizes.
      UnsupportedError: (when called) no argument is a batch; a result is a boolean (true in all microbatches, or in any?) or a PRNG
        key.

    Example:
      >>> gradients_of = mp.train.accumulate_gradients(jax.value_and_grad(loss_of), 4)
      >>> loss, gradients = gradients_of(params, x)
      >>> bool(jnp.allclose(loss, loss_of(params, x), rtol=1e-5))
      True
    """
    if microbatches < 1:
        fix = "microbatches=1 computes the gradient of the full batch at once"
        raise _refused(LayoutSyntaxError, f"microbatches={microbatches}, which must be at least 1", fix)
    given = None if argnums is None and argnames is None else [*_listed(argnums), *_listed(argnames)]
    keys = [*_listed(key_argnums), *_listed(key_argnames)]
    _check_roles(given, keys)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        """``fn(*args, **kwargs)`` in microbatches: floating-point results are averaged over them, integer results are
        added."""
        arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        batches, own_keys = _positive(given, len(args)), _positive(keys, len(args)) or []
        _check_roles(batches, own_keys)
        if missing := [str(a) for a in (*(batches or ()), *own_keys) if a not in arguments]:
            fix = "argnums= and key_argnums= have positions, counted from 0 or, if negative, from the end; "
            fix += "argnames= and key_argnames= have names of keywords"
            raise _refused(UnsupportedError, f"the call has no argument {', '.join(missing)}", fix)
        if microbatches == 1:
            return _called(fn, arguments | {a: _folded(arguments[a], 0) for a in own_keys})
        _warn_of_keys(arguments, {*own_keys, *(batches or ())})
        others = [a for a, x in arguments.items() if a != 0 and a not in own_keys and _has_rows(x)] if args else []
        where = others if batches is None else batches
        leaves, structure = nnx.flatten_to_nodes((args, kwargs))
        nodes = {n: x for n, x in enumerate(leaves) if nnx.is_graph_node(x)}
        graph, params, variables = nnx.split([*nodes.values()], nnx.Param, ...) if nodes else (None, None, None)
        if not where and not own_keys:
            name = getattr(fn, "__name__", "the function")
            raise _refused(
                UnsupportedError,
                f"no argument of {name} is a batch to divide into {microbatches} microbatches",
                "give the batch as an argument after the first, and not in a closure: "
                "jax.value_and_grad(lambda params, x: …)(params, x)",
                "or say in argnums= or argnames= which arguments are batches",
            )
        xs = _microbatches({a: arguments[a] for a in where}, microbatches)
        if own_keys:
            xs.append(jnp.arange(microbatches))

        def one(parts: Sequence[Any], variables: Any) -> tuple[Any, Any]:
            """(the results of a microbatch, the variables of the modules after it)."""
            merged = nnx.merge(graph, params, variables, copy=True) if nodes else []
            replaced = dict(enumerate(leaves)) | dict(zip(nodes, merged, strict=True))
            positional, named = structure.unflatten(replaced.values())
            full = {**dict(enumerate(positional)), **named} | dict(zip(where, parts, strict=False))
            out = _called(fn, full | {a: _folded(arguments[a], parts[-1]) for a in own_keys})
            return out, nnx.split(merged, nnx.Param, ...)[2] if nodes else None

        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
        shapes, _ = jax.eval_shape(one, first, variables)
        zeros = jax.tree_util.tree_map_with_path(_zeros, shapes)

        def add(carry: Any, batches: Any) -> tuple[Any, None]:
            total, variables = carry
            out, variables = one(batches, variables)
            return (jax.tree.map(_add, total, out), variables), None

        (total, variables), _ = jax.lax.scan(add, (zeros, variables), xs)
        if nodes:
            nnx.update([*nodes.values()], variables)

        def mean(total: Any, like: Any) -> Any:
            if like.dtype == jax.dtypes.float0:
                return np.zeros(like.shape, like.dtype)
            return (total / microbatches).astype(like.dtype) if jnp.issubdtype(like.dtype, jnp.inexact) else total

        return jax.tree.map(mean, total, shapes)

    return run


def microbatches_for(batch: int, *, rows: int, mesh: AnyMesh, layout: Any, dim: str = "batch") -> int:
    """The number of microbatches for :func:`accumulate_gradients` with which a device processes at most ``rows`` rows at a time.

    The global batch, and so the loss, is the same on any number of devices; fewer devices use more microbatches.

    Args:
      batch: rows of the global batch.
      rows: the largest number of rows of a microbatch on one device.
      mesh, layout: as in :func:`meshpar.jit`; they determine the axes over which ``dim`` is sharded.

    Returns:
      The smallest number of microbatches that are equal on all devices.

    Raises:
      DivisibilityError: the batch does not divide over the devices.
      LayoutSyntaxError: ``rows`` below 1.

    Example:
      >>> mp.train.microbatches_for(1024, rows=4, mesh=mesh, layout="batch: data")
      64
    """
    if rows < 1:
        text = f"mp.train.microbatches_for: rows={rows}, which must be at least 1"
        raise LayoutSyntaxError(text, fixes=["rows of a microbatch on one device: at least 1"])
    spec = Layout(layout).spec((dim,), mesh, (batch,), path="the batch")
    parts = math.prod(mesh.shape[a] for a in axes_of_spec(spec, 1)[0])
    each = batch // parts
    return next(n for n in range(1, each + 1) if each % n == 0 and each // n <= rows)


def _listed(arguments: int | str | Sequence[int] | Sequence[str] | None) -> Sequence[int | str]:
    """Positions or names of arguments as a sequence."""
    return () if arguments is None else (arguments,) if isinstance(arguments, int | str) else arguments


def _positive(arguments: Sequence[int | str] | None, count: int) -> list[int | str] | None:
    """Positions and names of arguments, of which ``count`` are positional, with positions from the end counted from 0."""
    return None if arguments is None else [a + count if isinstance(a, int) and a < 0 else a for a in arguments]


def _check_roles(batches: Sequence[int | str] | None, keys: Sequence[int | str]) -> None:
    """Raise LayoutSyntaxError if an argument is a batch and a key."""
    if both := [str(a) for a in batches or () if a in keys]:
        fix = "argnums and argnames have batches, which are divided; key_argnums and key_argnames keys, which are not"
        raise _refused(LayoutSyntaxError, f"argument {', '.join(both)} is both a batch and a key", fix)


def _refused(kind: type[MeshparError], text: str, *fixes: str, shape: Sequence[int] | None = None) -> MeshparError:
    """The error for a call of :func:`accumulate_gradients`."""
    return kind(f"mp.train.accumulate_gradients: {text}", shape=shape, fixes=fixes)


def _called(fn: Callable[..., Any], arguments: Mapping[int | str, Any]) -> Any:
    """``fn`` of arguments by position, in their order, and by name."""
    positional = [x for a, x in arguments.items() if isinstance(a, int)]
    return fn(*positional, **{a: x for a, x in arguments.items() if isinstance(a, str)})


def _folded(keys: Any, microbatch: Any) -> Any:
    """The keys of a microbatch.

    Raises:
      UnsupportedError: an array of another dtype than keys have.
    """
    for key in jax.tree.leaves(keys):
        dtype = jnp.result_type(key)
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key) and dtype != jnp.uint32:
            text = f"an argument in key_argnums or key_argnames is an array of {dtype}{list(np.shape(key))}, and no PRNG key"
            fix = "key_argnums= has the positions of keys, counted from 0: jax.random.key(0)"
            raise _refused(UnsupportedError, text, fix, shape=np.shape(key))
    return jax.tree.map(lambda key: jax.random.fold_in(key, microbatch), keys)


def _warn_of_keys(arguments: Mapping[int | str, Any], known: Collection[int | str]) -> None:
    """Warn of typed PRNG keys in arguments other than the ``known`` ones.

    The keys of NNX modules are left out: with their counts they make a new key for every microbatch.

    Args:
      arguments: position or name → the argument.
    """
    for i, argument in arguments.items():
        if i in known:
            continue
        leaves = jax.tree_util.tree_leaves_with_path(argument, is_leaf=_is_module)
        keys = [path for path, x in leaves if not _is_module(x) and is_key(x)]
        if keys:
            only_keys = len(keys) == len(leaves)
            what = "is a PRNG key" if only_keys else f"has a PRNG key at {jax.tree_util.keystr(keys[0])}"
            option = f"key_argnums={i}" if isinstance(i, int) else f'key_argnames="{i}"'
            fix = f"{option} gives" if only_keys else "Pass it as an argument of its own: key_argnums= gives"
            warnings.warn(
                f"mp.train.accumulate_gradients: argument {i} {what}; all microbatches share it and have the same dropout masks. "
                f"{fix} each microbatch a key of its own",
                stacklevel=user_stacklevel(),
            )


def _is_module(x: Any) -> bool:
    return nnx.is_graph_node(x) and not isinstance(x, nnx.Variable)


def _has_rows(argument: Any) -> bool:
    """Whether a tree has an array with a leading dim, which can be split into microbatches.

    Scalars, typed PRNG keys and raw keys (two 32-bit words) have none, and NNX modules are no batches.
    """
    return not nnx.has_graph_nodes(argument) and any(
        np.ndim(x) > 0 and not (np.shape(x) == (2,) and getattr(x, "dtype", None) == np.uint32)
        for x in jax.tree.leaves(argument)
    )


def _microbatches(batches: Mapping[int | str, Any], count: int) -> list[Any]:
    """The batches with each array [batch, …] as [count, batch / count, …]; microbatch i has the rows i, i + count, …

    Args:
      batches: position or name of an argument → the argument.

    Raises:
      DivisibilityError: the arrays have several leading sizes, or ``count`` does not divide one.
    """
    rows = {i: {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)} for i, batch in batches.items()}
    if len(set().union(*rows.values())) > 1:
        text = ", ".join(f"argument {i}: {' and '.join(map(str, sorted(sizes)))}" for i, sizes in rows.items())
        fix = "list the arguments that are batches: argnums=1, or argnums=(1, 2)"
        raise _refused(DivisibilityError, f"the arrays of the batch have different leading sizes ({text})", fix)

    def split(x: Any) -> jax.Array:
        shape = np.shape(x)
        if not shape or shape[0] % count:
            text = f"a batch of shape {list(shape)} does not divide into {count} microbatches"
            fixes = f"make its leading dim a multiple of {count}", "or list the batches in argnums= or argnames="
            raise _refused(DivisibilityError, text, *fixes, shape=shape)
        return jnp.moveaxis(jnp.reshape(x, (shape[0] // count, count, *shape[1:])), 1, 0)

    return [jax.tree.map(split, batch) for batch in batches.values()]


def _zeros(path: Any, like: Any) -> jax.Array:
    """The sum of a result over no microbatch: of narrow floats in float32; False for a derivative by an integer (``float0``).

    Raises:
      UnsupportedError: the result is a boolean or a PRNG key.
    """
    if like.dtype == bool or is_key(like):
        what, fixes = "PRNG key", ["split the key outside of the function"]
        if not is_key(like):
            counts = "counts the microbatches in which it is true: 0 if in none, their number if in all"
            fraction = "flag.astype(jnp.float32) gives their fraction"
            what, fixes = "boolean", [f"flag.astype(jnp.int32) {counts}", fraction]
        text = f"{what}, which is neither averaged nor summed over the microbatches"
        raise _refused(UnsupportedError, f"the result{jax.tree_util.keystr(path)} is a {text}", *fixes)
    if like.dtype == jax.dtypes.float0:
        return jnp.zeros((), bool)
    is_float = jnp.issubdtype(like.dtype, jnp.inexact)
    return jnp.zeros(like.shape, jnp.promote_types(like.dtype, jnp.float32) if is_float else like.dtype)


def _add(total: jax.Array, x: Any) -> jax.Array:
    """A sum with one more result; unchanged for ``float0``."""
    return total if jnp.result_type(x) == jax.dtypes.float0 else total + jnp.asarray(x, total.dtype)
