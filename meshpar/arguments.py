"""What the arguments and results of a function are called: static and donated ones, twins, fresh optimizer state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .dims import Dims, did_you_mean
from .errors import UnsupportedError
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
