"""What the arguments and results of a function are called: static and donated ones, patterns, twins, fresh optimizer
state."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import numpy as np

from .dims import Dims, PathDims, did_you_mean, fit_dims, near, path_matches
from .errors import PatternError, UnsupportedError
from .flax import Leaf


def selected_arguments(
    nums: Any, names: Any, params: list[str], what: str, variadic: bool = False
) -> frozenset[int | str]:
    nums = () if nums is None else (nums,) if isinstance(nums, int) else tuple(nums)
    names = () if names is None else (names,) if isinstance(names, str) else tuple(names)
    for n in names:
        if params and n not in params:
            raise UnsupportedError(
                f"{what}_argnames: the function has no argument `{n}`",
                fixes=did_you_mean(n, params, "arguments"),
            )
    out: set[int | str] = set(names)
    for n in nums:
        if params and not variadic and not -len(params) <= n < len(params):
            raise UnsupportedError(
                f"{what}_argnums: the function has {len(params)} arguments, so there is no argument {n}",
                fixes=[f"arguments are {', '.join(f'{i}: {p}' for i, p in enumerate(params))}"],
            )
        n = n % len(params) if params and n < 0 else n
        out.add(n)
        if n < len(params):
            out.add(params[n])
    return frozenset(out | {params.index(n) for n in names if n in params})


def twins(named: list[Leaf], annotations: list[Dims | None]) -> Callable[[Leaf], tuple[Leaf, Dims | None] | None]:
    """Finds the input that a result continues: ``0/params/w`` of a returned state is ``state/params/w`` of the argument."""
    exact = {leaf.path: (leaf, dims) for leaf, dims in zip(named, annotations, strict=True)}
    tails: dict[str, list[str]] = {}
    for path in exact:
        tails.setdefault(path.partition("/")[2], []).append(path)

    def find(result: Leaf) -> tuple[Leaf, Dims | None] | None:
        twin = exact.get(result.path)
        for tail in (result.path, result.path.partition("/")[2]):
            if twin is None and tail and len(tails.get(tail, ())) == 1:
                twin = exact[tails[tail][0]]
        return twin if twin is not None and np.shape(twin[0].value) == np.shape(result.value) else None

    return find


def name_state(results: list[Leaf], annotations: list[Dims | None]) -> None:
    """Give fresh optimizer state the names of its parameter: the one whose path ends alike.

    A moment has the parameter's shape; factored ones (Adafactor, SM3) have some of its dims, if the sizes leave no doubt.
    """
    params = [(leaf, dims) for leaf, dims in zip(results, annotations, strict=True) if leaf.kind == "params" and dims]
    by_end: dict[str, list[tuple[Leaf, Dims]]] = {}
    for leaf, dims in params:
        by_end.setdefault(leaf.path.rsplit("/", 1)[-1], []).append((leaf, dims))
    for k, leaf in enumerate(results):
        if leaf.kind != "opt" or annotations[k] is not None:
            continue
        mine = leaf.path.split("/")[::-1]
        best, length = None, 0
        for other, dims in by_end.get(mine[0], ()):
            theirs = other.path.split("/")[::-1]
            same = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
            )
            if same > length:
                best, length = (other, dims), same
        if best is not None:
            annotations[k] = _dims_like(leaf.value.shape, best[0].value.shape, best[1])


def _dims_like(shape: Sequence[int], whole: Sequence[int], dims: Dims) -> Dims | None:
    """The names of an array whose dims are some of a parameter's; None where the sizes do not tell which."""
    if len(shape) == len(whole) and all(n in (1, m) for n, m in zip(shape, whole, strict=True)):
        return tuple(None if n == 1 else d for n, d in zip(shape, dims, strict=True))
    found = {
        picks
        for picks in itertools.combinations(range(len(whole)), len(shape))
        if tuple(whole[i] for i in picks) == tuple(shape)
    }
    if len(found) == 1 and shape:
        return tuple(dims[i] for i in found.pop())
    return None


def with_statics(
    args: Sequence[Any], kwargs: dict[str, Any], statics: Sequence[tuple[int | str, Any]]
) -> tuple[Any, Any]:
    """(args, kwargs) with the static arguments in their places."""
    args, kwargs = list(args), dict(kwargs)
    for k, v in statics:
        if isinstance(k, int):
            args[k] = v
        else:
            kwargs[k] = v
    return tuple(args), kwargs


def annotation_of(leaf: Leaf, patterns: PathDims, used: set[str]) -> Dims | None:
    """The dims that a pattern gives a leaf, else its own; the pattern goes among those used."""
    found = patterns.match(leaf.path)
    if found is None:
        return leaf.dims
    pattern, dims = found
    used.add(pattern)
    return fit_dims(dims, np.shape(leaf.value), path=leaf.path, origin=f"the pattern {pattern!r}")


def check_patterns(patterns: PathDims, used: set[str], paths: list[str]) -> None:
    """Every pattern is used.

    Raises:
      PatternError: one matches nothing, or only what an earlier one matches.
    """
    for pattern, _ in patterns.items:
        if pattern in used:
            continue
        shadow = next((p for p in paths if path_matches(pattern, p)), None)
        if shadow is not None:
            earlier = patterns.match(shadow)
            assert earlier is not None
            raise PatternError(
                f"the dims= pattern {pattern!r} is never used: {earlier[0]!r} stands before it and matches the same tensors",
                path=shadow,
                fixes=["the first pattern that matches wins: put the narrower one first"],
            )
        raise PatternError(
            f"the dims= pattern {pattern!r} matches no tensor",
            path=pattern,
            fixes=[f"did you mean {' or '.join(map(repr, near(pattern, paths)))}?"] * bool(near(pattern, paths))
            + [f"paths are: {', '.join(paths[:8])}{', …' if len(paths) > 8 else ''}"],
        )


def donated_leaves(
    dynamic: tuple[Any, Any], donated: Set[int | str], signature: inspect.Signature | None
) -> tuple[int, ...]:
    """The numbers of the leaves of (args, kwargs) that belong to donated arguments."""
    if not donated:
        return ()
    args, kwargs = dynamic
    out: list[int] = []
    n = 0
    names = list(signature.parameters) if signature else []
    entries = [((i, names[i] if i < len(names) else i), x) for i, x in enumerate(args)]
    entries += [((k,), kwargs[k]) for k in sorted(kwargs)]
    for ids, x in entries:
        size = len(jax.tree.leaves(x))
        if any(i in donated for i in ids):
            out += range(n, n + size)
        n += size
    return tuple(out)


def prefix_donation(call: tuple[Any, Any], flat: set[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(positions, keywords) of the arguments all of whose leaves are among these."""
    args, kwargs = call
    nums: list[int] = []
    names: list[str] = []
    n = 0
    for ident, x in [*enumerate(args), *((k, kwargs[k]) for k in sorted(kwargs))]:
        size = len(jax.tree.leaves(x))
        if size and all(i in flat for i in range(n, n + size)):
            (nums if isinstance(ident, int) else names).append(ident)  # type: ignore[arg-type]
        n += size
    return tuple(nums), tuple(names)


def shape_key(x: Any) -> Any:
    """What a program depends on of an argument: shape, dtype, weak type; the type of a Python number."""
    aval = getattr(x, "aval", None)
    if aval is not None:
        return aval.shape, aval.dtype, aval.weak_type
    if isinstance(x, bool | int | float | complex):
        return type(x)
    return np.shape(x), getattr(x, "dtype", type(x)), getattr(x, "weak_type", False)
