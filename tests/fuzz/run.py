"""Running a case: sharded and unsharded, in f32; where they differ by more than a few roundings, against a run in f64."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from programs import Case

import meshpar as mp
from meshpar.verify.numbers import QUICK

CAREFUL: tuple[dict[str, Any], ...] = (
    {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True},
    {"xla_backend_optimization_level": 3},  # since 0.12 there is no choice of emitters
)
"""Compiler options as they are by default, whatever flags this process has."""


@functools.cache
def quick() -> dict[str, Any]:
    """Compiler options that make plain code fast."""
    return first_known(QUICK)


@functools.cache
def careful() -> dict[str, Any]:
    """The compiler's default options."""
    return first_known(CAREFUL)


def first_known(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first options that this version has."""
    for options in choices:
        try:
            jax.jit(lambda x: x).lower(1.0).compile(compiler_options=options)
            return options
        except jax.errors.JaxRuntimeError:
            continue
    return {}


FEW = 2e-5
"""What a leaf may differ by without a question, as a part of its largest value."""


NARROW = {"BF16": 2.0**-7, "F16": 2.0**-10}
"""What one rounding to a type that programs narrow to may change, as a part of a value."""


@dataclass
class Difference:
    """A leaf that differs: which, by how much, how much it may."""

    leaf: int
    largest: float
    allowed: float
    what: str

    def __str__(self) -> str:
        return f"result {self.leaf}: {self.what}; differs by {self.largest:.3g}, may by {self.allowed:.3g}"


@dataclass
class Reference:
    """The unsharded run: its results, and the primitives of the program, bodies included."""

    results: list[np.ndarray]
    primitives: Counter[str]


def lowered(case: Case, real: Any = jnp.float32) -> Callable[..., Any]:
    """The function that is lowered: with the gradients inside, or the one that is differentiated from outside."""
    return case.program.function(real, "forward" if case.outside else "program")


def compared(case: Case, fn: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """What is compared: the results of a function (lowered or not), or these and its derivative along random directions."""
    at = [k for k, i in enumerate(case.program.inputs) if i.name in case.program.grads]
    if not case.outside or not at:
        return fn

    def run(*args: Any) -> tuple[Any, ...]:
        def of(*xs: Any) -> Any:
            given = dict(zip(at, xs, strict=True))
            return fn(*(given.get(k, x) for k, x in enumerate(args)))

        xs = [args[k] for k in at]
        if case.outside == "jvp":
            outs, found = jax.jvp(of, xs, [direction(x, case.program.seed, k) for k, x in enumerate(xs)])
        else:
            outs, back = jax.vjp(of, *xs)
            found = back(tuple(direction(x, case.program.seed, k) for k, x in enumerate(outs)))
        return *outs, *(t for t in found if t.dtype != jax.dtypes.float0)

    return run


def direction(x: Any, *seed: int) -> Any:
    """A random cotangent or tangent of an array."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return np.zeros(x.shape, jax.dtypes.float0)
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 9, x.shape) / 4, x.dtype)


def unsharded(case: Case, options: dict[str, Any] | None = None) -> Reference:
    args = case.program.values()
    traced = jax.jit(compared(case, lowered(case))).trace(*args)
    results = traced.lower().compile(compiler_options=quick() if options is None else options)(*args)
    return Reference([host(x) for x in results], primitives(traced.jaxpr.jaxpr))


def sharded(case: Case, lowering: str, options: dict[str, Any], calls: int = 1) -> list[Any]:
    """The results of the last of some calls, none of which is waited for before the next."""
    program = case.program
    run = mp.jit(lowered(case), mesh=mp.mesh(case.mesh), layout=case.layout, dims=program.dims, lowering=lowering,
                 compiler_options=None if case.outside else options)  # fmt: skip
    if case.outside:
        run = jax.jit(compared(case, run), compiler_options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.JoinWarning)
        args = program.values()
        return [run(*args) for _ in range(calls)][-1]


def in_f64(case: Case) -> list[np.ndarray]:
    """The results of the program in f64: what both runs approximate."""
    with jax.enable_x64(True):
        run = jax.jit(compared(case, lowered(case, jnp.float64)))
        args = case.program.values(np.float64)
        return [host(x) for x in run.lower(*args).compile(compiler_options=quick())(*args)]


def host(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def differences(case: Case, lowering: str, given: Reference | None = None, calls: int = 1) -> list[Difference]:
    """The leaves on which a sharded run differs from the unsharded one by more than rounding.

    Where they differ, both are compiled once more, with the options of :func:`careful`: under those of :func:`quick` XLA's CPU
    compiler has been wrong, and at a kink (a tie, a step) two compilers' roundings may fall on either side.
    """
    found: list[Difference] = []
    reference: list[np.ndarray] = []
    for options, known in ((quick(), given), (careful(), None)):
        reference = (known or unsharded(case, options)).results
        results = enumerate(zip(sharded(case, lowering, options, calls), reference, strict=True))
        found = [d for k, (x, r) in results if (d := worst(k, x, r)) is not None]
        if not found:
            return []
    if all(reference[d.leaf].dtype.kind != "f" for d in found):
        return found
    exact = in_f64(case)
    # what is narrowed is exact, its cotangents are not: sums are rounded before they are settled, or not at all (compilers may
    # leave out a conversion there and back)
    narrowed = max((eps for name, eps in NARROW.items() if name in case.program.text), default=0.0)
    # terms that cancel leave the rounding of the terms, which are as large as other results
    floor = (
        4
        * float(np.finfo(np.float32).eps)
        * max(1.0, *(float(np.abs(e[np.isfinite(e)]).max(initial=0.0)) for e in exact))
    )
    kept = []
    for d in found:
        r, e = reference[d.leaf], exact[d.leaf]
        if r.dtype.kind == "f":
            # both runs round, so several times the error of the one that is the reference
            error = np.abs(r.astype(np.float64) - e)
            d.allowed += 8 * float(error[np.isfinite(error)].max(initial=0.0)) + floor
            if d.leaf >= len(case.program.outs):  # a derivative
                d.allowed += narrowed * float(np.abs(e[np.isfinite(e)]).max(initial=0.0))
        if d.largest > d.allowed:
            kept.append(d)
    return kept


def worst(leaf: int, x: Any, reference: np.ndarray) -> Difference | None:
    """The largest difference of any device's part; None if it is within a few roundings."""
    if x.shape != reference.shape or x.dtype != reference.dtype:
        return Difference(leaf, np.inf, 0.0, f"{x.dtype}{list(x.shape)} for {reference.dtype}{list(reference.shape)}")
    if reference.size == 0:
        return None
    finite = np.abs(reference[np.isfinite(reference)]) if reference.dtype.kind == "f" else np.zeros(0)
    allowed = FEW * float(finite.max(initial=0.0))
    largest, what = -1.0, ""
    for shard in x.addressable_shards:
        mine, want = np.asarray(shard.data), reference[shard.index]
        if mine.shape != want.shape:
            return Difference(leaf, np.inf, 0.0, f"a shard of shape {mine.shape} where {want.shape} should be")
        if reference.dtype.kind != "f":
            gap = (mine != want).astype(float)
        else:
            with np.errstate(invalid="ignore", over="ignore"):
                same = (mine == want) | (np.isnan(mine) & np.isnan(want))
                gap = np.where(same, 0.0, np.abs(mine.astype(np.float64) - want))
            gap = np.where(np.isfinite(gap), gap, np.inf)
        at = np.unravel_index(int(np.argmax(gap)), gap.shape)
        if gap[at] > largest:
            largest, what = (
                float(gap[at]),
                f"{mine[at]} for {want[at]} at {[int(i) for i in at]} of {shard.index} on device {shard.device.id}",
            )
    return Difference(leaf, largest, allowed, what) if largest > allowed else None


def primitives(jaxpr: Any) -> Counter[str]:
    """How often each primitive stands in a jaxpr, its bodies included."""
    found: Counter[str] = Counter()

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            found[eqn.primitive.name] += 1
            for p in eqn.params.values():
                for body in p if isinstance(p, tuple | list) else (p,):
                    body = getattr(body, "jaxpr", body)
                    if hasattr(body, "eqns"):
                        walk(body)

    walk(jaxpr)
    return found
