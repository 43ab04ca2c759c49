"""Running a case: sharded and unsharded, in f32; where they differ by more than a few roundings, against a run in f64."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from programs import Call, Case

import meshpar as mp
from meshpar._src.verify.numbers import QUICK

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


def ignored() -> None:
    """Ignore what random names, layouts and ops make the library warn of."""
    for name in ("JoinWarning", "ReplicatedWarning", "ReshardedWarning", "LoweringWarning", "IndivisibleWarning"):
        if category := getattr(mp.errors, name, None):  # other versions are run too
            warnings.simplefilter("ignore", category)


def first_known(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first options that this version has."""
    for options in choices:
        try:
            jax.jit(lambda x: x).lower(1.0).compile(compiler_options=options)
            return options
        except jax.errors.JaxRuntimeError:
            continue
    return {}


MAX_ROUNDING = 2e-5
"""Largest difference of a leaf that is accepted without an f64 run, relative to its largest value."""


LARGEST_EPS = 2.0**-6
"""Largest relative rounding of a dtype for which several times the error of the unsharded run is a bound. With an 8-bit float that
would be as large as the values."""


NARROW = {"BF16": 2.0**-7, "F16": 2.0**-10}
"""What one rounding to a type that programs narrow to may change, as a part of a value."""


CONTEXTS: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "x64": lambda: jax.enable_x64(True),
    "threefry": lambda: jax.threefry_partitionable(False),
}
"""JAX's configuration during a call."""


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
    """The unsharded run: its results, whether their types are weak, and the primitives of the program, bodies included."""

    results: list[np.ndarray]
    weak: list[bool]
    primitives: Counter[str]


def lowered(case: Case, real: Any = jnp.float32) -> Callable[..., Any]:
    """The function that is lowered: with the gradients inside, or the one that is differentiated from outside."""
    return case.program.function(real, "forward" if case.outside else "program")


def compared(case: Case, fn: Callable[..., Any], call: Call) -> Callable[..., tuple[Any, ...]]:
    """The function of the arrays whose results are compared: those of a function, lowered or not, with its derivative if asked."""
    inputs = case.program.inputs
    at = [k for k, i in enumerate(inputs) if i.name in case.program.grads]
    if call.axis:
        return jax.vmap(fn, axis_name=call.axis)
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


def arguments(case: Case, call: Call, real: Any = np.float32) -> list[Any]:
    """The arrays of a call: under an axis, another one for each of its members."""
    if not call.axis:
        return case.program.values(real)
    members = [case.program.values(real, k) for k in range(call.size)]
    return [jnp.stack(x) for x in zip(*members, strict=True)]


def direction(x: Any, *seed: int) -> Any:
    """A random cotangent or tangent of an array."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return np.zeros(x.shape, jax.dtypes.float0)
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 9, x.shape) / 4, x.dtype)


def unsharded(case: Case, options: dict[str, Any] | None = None) -> Reference:
    """Each call by a function of its own, so that none is answered with what another call compiled."""
    reference = Reference([], [], Counter())
    for call in case.calls:
        with CONTEXTS[call.context]():
            args = arguments(case, call)
            fn = jax.jit(compared(case, lowered(case), call), compiler_options=quick() if options is None else options)
            reference.primitives += primitives(fn.trace(*args).jaxpr.jaxpr)
            for x in fn(*args):
                reference.results.append(host(x))
                reference.weak.append(x.weak_type)
    return reference


def sharded(case: Case, lowering: str, options: dict[str, Any], repeat: int = 1) -> list[Any]:
    """The results of each call, of the last of ``repeat`` of it, none of which is waited for before the next."""
    program = case.program
    overlap = {} if lowering == "jit" or case.overlap == "off" else {"overlap": case.overlap}
    within = bool(case.outside or case.calls[0].axis)  # another function's options count
    results: list[Any] = []
    with warnings.catch_warnings():
        ignored()
        run = mp.jit(lowered(case), mesh=mp.mesh(case.mesh), layout=case.layout, dims=program.dims, lowering=lowering,
                     compiler_options=None if within else options, schedule=case.schedule, **overlap)  # fmt: skip
        for call in case.calls:
            with CONTEXTS[call.context]():
                args = arguments(case, call)
                fn = compared(case, run, call)
                fn = jax.jit(fn, compiler_options=options) if within else fn
                results += [fn(*args) for _ in range(repeat)][-1]
    return results


def planned(case: Case, topology: str | None = None, **options: Any) -> mp.Plan | None:
    """The plan of a case's first call, with its seconds and memory; None where it needs an outer axis.

    Args:
      topology: a TPU slice, whose further devices are another axis of the mesh; the mesh of the case if None.
      **options: of `meshpar.plan`.
    """
    program, call = case.program, case.calls[0]
    if call.axis:
        return None
    mesh = mp.mesh(f"{case.mesh}, spare=-1", topology=topology) if topology else mp.mesh(case.mesh)
    with warnings.catch_warnings(), CONTEXTS[call.context]():
        ignored()
        plan = mp.plan(lowered(case), *program.values(), mesh=mesh, layout=case.layout, dims=program.dims,
                       schedule=case.schedule, **options)  # fmt: skip
    if topology and not (plan.seconds is not None and 0 <= plan.seconds < math.inf and plan.memory.peak >= 0):
        raise ValueError(f"the plan takes {plan.seconds} s and {plan.memory.peak} bytes")
    return plan


def in_f64(case: Case) -> list[np.ndarray]:
    """The results of the program in f64: what both runs approximate."""
    results: list[np.ndarray] = []
    for call in case.calls:
        with CONTEXTS[call.context](), jax.enable_x64(True):
            args = arguments(case, call, np.float64)
            fn = jax.jit(compared(case, lowered(case, jnp.float64), call), compiler_options=quick())
            results += [host(x) for x in fn(*args)]
    return results


def host(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def differences(case: Case, lowering: str, given: Reference | None = None, repeat: int = 1) -> list[Difference]:
    """The leaves on which a sharded run differs from the unsharded one by more than rounding.

    Where they differ, both are compiled once more, with the options of :func:`careful`: under those of :func:`quick` XLA's CPU
    compiler has been wrong, and at a kink (a tie, a step) two compilers' roundings may fall on either side.
    """
    found: list[Difference] = []
    reference, outputs = Reference([], [], Counter()), []
    kinds = [case.program.vars[name][1] for name in case.program.outs]
    for options, known in ((quick(), given), (careful(), None)):
        reference = known or unsharded(case, options)
        outputs = sharded(case, lowering, options, repeat)
        leaves = zip(outputs, reference.results, reference.weak, strict=True)
        per_call = len(reference.results) // len(case.calls)
        found = []
        for k, (x, r, weak) in enumerate(leaves):
            signs = k % per_call < len(kinds) and kinds[k % per_call] == "s"
            d = worst(k, x, r, signs)
            if d is None and x.weak_type != weak:
                d = Difference(k, np.inf, 0.0, f"weak_type is {x.weak_type}")
            found += [] if d is None else [d]
        if not found:
            return []
    results = reference.results
    if all(not inexact(results[d.leaf]) for d in found):
        return found
    exact = in_f64(case)
    # what is narrowed is exact, its cotangents are not: sums are rounded before they are settled, or not at all (compilers may
    # leave out a conversion there and back)
    narrowed = max((eps for name, eps in NARROW.items() if name in case.program.text), default=0.0)
    # terms that cancel leave the rounding of the terms, which are as large as other results
    floor = 4 * float(np.finfo(np.float32).eps) * max(1.0, *(largest(e) for e in exact))
    kept = []
    for d in found:
        r, e = results[d.leaf], exact[d.leaf]
        if inexact(r) and jnp.finfo(r.dtype).eps > LARGEST_EPS:
            if as_accurate(outputs[d.leaf], r, e):
                continue
        elif inexact(r) and math.isfinite(d.largest):
            # both runs round, so several times the error of the one that is the reference
            error = np.abs(numbers(r) - numbers(e))
            d.allowed += 8 * float(error[np.isfinite(error)].max(initial=0.0)) + floor
            if d.leaf % per_call >= len(case.program.outs):  # a derivative
                d.allowed += narrowed * largest(e)
        if d.largest > d.allowed:
            kept.append(d)
    return kept


def as_accurate(x: Any, reference: np.ndarray, exact: np.ndarray) -> bool:
    """Whether each element, on each device, is as close to its f64 value as the unsharded one is, up to one rounding.

    A long sum in an 8-bit float stops growing where its terms are less than half a rounding; the partial sums of shards stop later.
    """
    rounding = float(jnp.finfo(reference.dtype).eps) * largest(exact)
    for shard in x.addressable_shards:
        value, r, e = (numbers(a) for a in (host(shard.data), reference[shard.index], exact[shard.index]))
        same = (value == r) | (np.isnan(value) & np.isnan(r))
        if not np.all(same | (np.abs(value - e) <= np.abs(r - e) + rounding)):
            return False
    return True


def inexact(x: Any) -> bool:
    """Whether the elements of an array are rounded: floats of any width, complex numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def numbers(x: np.ndarray) -> np.ndarray:
    """Floats of any width in f64; the parts of complex numbers side by side."""
    if np.iscomplexobj(x):
        return np.stack([x.real, x.imag], -1).astype(np.float64)
    return x.astype(np.float64)


def largest(x: np.ndarray) -> float:
    """The largest finite magnitude of an array; 0 of one that is not inexact."""
    if not inexact(x):
        return 0.0
    values = numbers(x)
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def worst(leaf: int, x: Any, reference: np.ndarray, signs: bool = False) -> Difference | None:
    """The largest difference of any device's part; None if it is within a few roundings.

    NaN and infinities have to be at the same places; with ``signs``, zeros have to have the same sign.
    """
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if not keys and (x.shape != reference.shape or x.dtype != reference.dtype):
        return Difference(leaf, np.inf, 0.0, f"{x.dtype}{list(x.shape)} for {reference.dtype}{list(reference.shape)}")
    if reference.size == 0:
        host(x)  # as a user reads it
        return None
    rounded = inexact(reference)
    allowed = MAX_ROUNDING * largest(reference)
    ulp = float(jnp.finfo(reference.dtype).eps) if rounded else 0.0
    biggest, what = -1.0, ""
    for shard in x.addressable_shards:
        mine, want = host(shard.data), reference[shard.index]
        if mine.shape != want.shape:
            return Difference(leaf, np.inf, 0.0, f"a shard of shape {mine.shape} where {want.shape} should be")
        if not mine.size:
            continue
        if not rounded:
            gap = (mine != want).astype(float)
        else:
            a, b = numbers(mine), numbers(want)
            with np.errstate(invalid="ignore", over="ignore"):
                same = (a == b) | (np.isnan(a) & np.isnan(b))
                if ulp > MAX_ROUNDING:  # a narrow float: one rounding
                    same |= np.isfinite(b) & (np.abs(a - b) <= ulp * np.abs(b))
                if signs:
                    same &= np.isnan(a) | (np.signbit(a) == np.signbit(b))
                gap = np.where(same, 0.0, np.abs(a - b))
            gap = np.where(np.isfinite(gap) & (same | (gap > 0)), gap, np.inf)
            mine, want = a, b
        at = np.unravel_index(int(np.argmax(gap)), gap.shape)
        if gap[at] > biggest:
            where = f"{[int(i) for i in at]} of {shard.index} on device {shard.device.id}"
            biggest, what = float(gap[at]), f"{mine[at]} for {want[at]} at {where}"
    return Difference(leaf, biggest, allowed, what) if biggest > allowed else None


def primitives(jaxpr: Any) -> Counter[str]:
    """Number of occurrences of each primitive in a jaxpr, its bodies included."""
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
