"""The table of comparisons of ``mp.jit`` with ``jax.jit``: functions × arguments × contexts × lowerings, and the outcome of a call.

A row of the table is a :class:`Case`: a function, how it is jitted, and calls of it in an order, each in a context. All calls go to
one jitted function, so that a result which an earlier call left in a cache shows. A comparison is one call under one lowering.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.errors import MeshparError

LOWERINGS = ("auto", "shard_map", "jit")
HOW = {"mesh": "data=4, model=2", "layout": "batch?: data; mlp?: model"}
Make = Callable[[], Any]
Use = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
SAMPLE = 36
"""One comparison of this many is made under each lowering by the tests that are not slow."""


@dataclass(frozen=True)
class Call:
    """A call of a jitted function.

    Attributes:
      args: functions that make its arguments, called for every call, as they may be donated.
      kwargs: its keywords.
      context: in which it is made.
      use: calls it, directly or through a transformation.
    """

    name: str
    args: tuple[Make, ...] = ()
    kwargs: dict[str, Make] = field(default_factory=dict)
    context: Callable[[], Any] = contextlib.nullcontext
    use: Use = lambda run, args, kwargs: run(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    """A function, options of both ``jit``, options of ``mp.jit`` only, calls, and how many functions are compared at once."""

    name: str
    fn: Callable[..., Any]
    calls: tuple[Call, ...]
    options: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    functions: int = 1

    def sample(self, lowering: str) -> tuple[Call, ...]:
        """The calls of the tests that are not slow: others for each function and lowering."""
        return tuple(c for c in self.calls if zlib.crc32(f"{self.name} {c.name} {lowering}".encode()) % SAMPLE == 0)


# -- outcomes


class Outcome(NamedTuple):
    """The result of a call: its tree, the leaves as (dtype, weak type, numbers), the arguments that it deleted; or its error."""

    tree: Any
    leaves: list[tuple[str, bool, np.ndarray]]
    deleted: list[bool]
    error: BaseException | None = None


def outcome(run: Callable[..., Any], call: Call) -> Outcome:
    args, kwargs = tuple(make() for make in call.args), {k: make() for k, make in call.kwargs.items()}
    with call.context():
        try:
            out = call.use(run, args, kwargs)
        except Exception as e:
            return Outcome(None, [], [], e)
        leaves, tree = jax.tree.flatten(out)
        described = [described_leaf(x) for x in leaves]
    given = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
    return Outcome(tree, described, [x.is_deleted() for x in given])


def described_leaf(x: Any) -> tuple[str, bool, np.ndarray]:
    weak = bool(getattr(x, "weak_type", False))
    if isinstance(x, jax.ShapeDtypeStruct):
        return str(x.dtype), weak, np.zeros(x.shape)
    if isinstance(x, jax.Array):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return str(x.dtype), weak, np.asarray(jax.random.key_data(x))
        wide = x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x
        return str(x.dtype), weak, np.asarray(wide)
    return type(x).__name__, weak, np.asarray(x)


def difference(ours: Outcome, theirs: Outcome) -> str | None:
    """In what two outcomes differ; None: in nothing that matters.

    An error of ours is one of the same class, or a :class:`MeshparError` with a fix.
    """
    if theirs.error is not None or ours.error is not None:
        if ours.error is None or theirs.error is None:
            return f"error {ours.error!r}, jax {theirs.error!r}"
        if isinstance(ours.error, (MeshparError, type(theirs.error))):
            return None
        return f"error {type(ours.error).__name__}: {ours.error}, jax {type(theirs.error).__name__}: {theirs.error}"
    if ours.tree != theirs.tree:
        return f"tree {ours.tree}, jax {theirs.tree}"
    if ours.deleted != theirs.deleted:
        return f"deleted {ours.deleted}, jax {theirs.deleted}"
    for i, ((d1, w1, x1), (d2, w2, x2)) in enumerate(zip(ours.leaves, theirs.leaves, strict=True)):
        if (d1, w1, x1.shape) != (d2, w2, x2.shape):
            return f"leaf {i}: {d1}{list(x1.shape)} weak={w1}, jax {d2}{list(x2.shape)} weak={w2}"
        exact = x1.dtype.kind in "biu"
        tolerance = 0.0 if exact else 2e-2 if "bfloat16" in d1 else 4e-3 if d1 == "float16" else 3e-5
        if not np.allclose(x1, x2, rtol=tolerance, atol=tolerance, equal_nan=not exact):
            return f"leaf {i}: {x1.ravel()[:4]}, jax {x2.ravel()[:4]}"
    return None


def differences(case: Case, lowering: str, calls: tuple[Call, ...]) -> Iterator[str]:
    """What differs between ``mp.jit`` and ``jax.jit`` in these calls, in this order, and in every third again, backwards."""
    theirs = jax.jit(case.fn, **case.options)
    ours = mp.jit(case.fn, **{**HOW, **case.ours}, **case.options, lowering=lowering)
    expected = [outcome(theirs, call) for call in calls]
    for order in (range(len(calls)), range(len(calls))[::-3]):
        for i in order:
            found = difference(outcome(ours, calls[i]), expected[i])
            if found is not None:
                yield f"{case.name} [{lowering}] {calls[i].name}: {found}"


# -- arguments

X = np.random.default_rng(0).integers(1, 9, (8, 8)).astype(np.float32)
OPTIONS = {"dims": {"x": "batch mlp"}}


def together(group: str, functions: dict[str, Callable[[Any], Any]], calls: tuple[Call, ...]) -> Case:
    """Functions that are compiled as one program, each applied to an argument of its own.

    A function that raises an error is in the structure of the result, with the class of the error.
    """

    def fn(xs: dict[str, Any]) -> dict[str, Any]:
        results = {}
        for name, function in functions.items():
            try:
                results[name] = function(xs[name])
            except Exception as error:
                results[f"{name}: {type(error).__name__}"] = None
        return results

    def each(make: Make) -> Make:
        return lambda: {name: make() for name in functions}

    calls = tuple(replace(call, args=tuple(map(each, call.args))) for call in calls)
    return Case(
        f"{group} {', '.join(functions)}", fn, calls, ours={"dims": {"xs/*": "batch mlp"}}, functions=len(functions)
    )


def on(sharding: Callable[[], Any]) -> Make:
    return lambda: jax.device_put(X, sharding())


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh(np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def read_only() -> np.ndarray:
    x = X.copy()
    x.setflags(write=False)
    return x


DTYPES = ["float32", "float16", "bfloat16", "int32", "int8", "uint8", "uint16", "bool", "complex64"]
ARRAYS: dict[str, Make] = {
    **{d: lambda d=d: jnp.asarray(X).astype(d) for d in DTYPES},
    "numpy": lambda: X,
    "numpy float64": lambda: X.astype(np.float64),
    "numpy int64": lambda: X.astype(np.int64),
    "numpy F order": lambda: np.asfortranarray(X),
    "numpy reversed": lambda: X[::-1, ::-1],
    "numpy read-only": read_only,
    "weak": lambda: jnp.broadcast_to(jnp.asarray(2.0), (8, 8)),
    "another shape": lambda: jnp.asarray(np.vstack([X, X])),
    "device 0": on(lambda: jax.devices()[0]),
    "device 3": on(lambda: jax.devices()[3]),
    "another mesh": on(lambda: NamedSharding(mesh_of((8,), ("d",)), P("d"))),
    "two devices": on(lambda: NamedSharding(mesh_of((2,), ("data",)), P(None, "data"))),
    "split otherwise": on(lambda: NamedSharding(mesh_of((4, 2), ("data", "model")), P("model", "data"))),
    "replicated": on(lambda: NamedSharding(mesh_of((4, 2), ("data", "model")), P())),
}

CONSTANT = np.arange(8, dtype=np.float32)


def loop(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: c + (c * i).astype(c.dtype), x)


def branch(x: Any) -> Any:
    return lax.cond(x[0, 0] > 3, lambda x: x + 1, lambda x: x * 2, x)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda x: x,
    "affine": lambda x: x * 2 + 1,
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.max(1),
    "matmul": lambda x: x @ x.T,
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "reverse": lambda x: x[::-1],
    "transpose": lambda x: x.T.reshape(-1),
    "concatenate": lambda x: jnp.concatenate([x, x + 1], 0),
    "where": lambda x: jnp.where(x > 3, x, 0),
    "sort": lambda x: jnp.sort(x, 0),
    "argmax": lambda x: jnp.argmax(x, 0),
    "cast": lambda x: x.astype(float),
    "row": lambda x: x[3],
    "rows": lambda x: x[jnp.array([1, 5])],
    "update": lambda x: x.at[2].set(1),
    "weak results": lambda x: {"x": x, "numbers": (1.0, 2, True), "none": None, "s": x.sum() * 0 + 2.0},
    "constant": lambda x: x + CONSTANT,
    "python": lambda x: jnp.zeros(3) + x.shape[0],
    "random": lambda x: x + jax.random.uniform(jax.random.key(3), (8, 8))[: x.shape[0]],
    "loop": loop,
    "branch": branch,
}


def array_cases() -> Iterator[Case]:
    """Four groups of functions, each with every second array, by turns."""
    calls = tuple(Call(name, (make,)) for name, make in ARRAYS.items())
    for k in range(4):
        yield together("array", dict([*FUNCTIONS.items()][k::4]), calls[k % 2 :: 2])


NUMBERS: dict[str, Make] = {
    **{repr(v): lambda v=v: v for v in (1, 0, -3, 2.5, True, False, 1j)},
    **{repr(v): lambda v=v: v for v in (np.float32(2), np.float64(2), np.int8(3), np.uint16(3), np.bool_(True))},
    "weak float": lambda: jnp.asarray(2.0),
    "weak int": lambda: jnp.asarray(2),
    "float16": lambda: jnp.float16(2),
    "int32": lambda: jnp.int32(2),
    "complex64": lambda: jnp.complex64(2),
    "too large": lambda: 2**40,
}
OF_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda s: s,
    "add": lambda s: s + 1,
    "half": lambda s: s / 2,
    "with float16": lambda s: jnp.ones(8, jnp.float16) * s,
    "with int8": lambda s: jnp.ones(8, jnp.int8) * s,
    "full": lambda s: jnp.full((8,), s),
    "types": lambda s: (jnp.asarray(s), jnp.result_type(s, jnp.float16) == jnp.float16),
}


def number_cases() -> Iterator[Case]:
    calls = tuple(Call(name, (make,)) for name, make in NUMBERS.items())
    for name, fn in OF_NUMBERS.items():
        yield Case(f"number {name}", lambda s, fn=fn: fn(s), calls)


class Point(NamedTuple):
    a: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclass
class Box:
    value: Any
    label: str = field(default="", metadata={"static": True})


TREES: dict[str, Make] = {
    "dict": lambda: {"a": X, "b": X[0]},
    "dict, other order": lambda: {"b": X[0], "a": X},
    "list": lambda: [X, X[0]],
    "tuple": lambda: (X, X[0]),
    "named tuple": lambda: Point(X, X[0]),
    "dataclass": lambda: Box(X, "one"),
    "another label": lambda: Box(X, "two"),
    "none": lambda: {"a": X, "b": None},
    "empty": lambda: {"a": [], "b": ()},
    "nested": lambda: [Point({"x": X, "y": [X[0]]}, Box((X, None)))],
    "numbers": lambda: {"a": 1, "b": 2.0, "c": (True, X)},
    "keys": lambda: {"k": jax.random.key(0), "x": X},
}


def keyless(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: x if jax.dtypes.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key) else jnp.asarray(x) * 2, tree
    )


OF_TREES: dict[str, Callable[[Any], Any]] = {
    "identity": lambda t: t,
    "double": keyless,
    "wrapped": lambda t: {"again": (t, t), "shape": str(jax.tree.structure(t)) and 1.0},
    "leaves": lambda t: jax.tree.leaves(t),
    "label": lambda t: t.value * len(t.label),
}


def tree_cases() -> Iterator[Case]:
    """Each function with each tree, by position or by name."""
    calls = [(Call(name, (make,)), Call(f"{name}, by name", (), {"t": make})) for name, make in TREES.items()]
    for k, (name, fn) in enumerate(OF_TREES.items()):
        yield Case(f"tree {name}", lambda t, fn=fn: fn(t), tuple(c[(j + k) % 2] for j, c in enumerate(calls)))


# -- contexts


@contextlib.contextmanager
def updated(name: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "x64": lambda: jax.enable_x64(True),
    "highest": lambda: jax.default_matmul_precision("highest"),
    "bfloat16 matmuls": lambda: jax.default_matmul_precision("bfloat16"),
    "threefry": lambda: jax.threefry_partitionable(False),
    "seed": lambda: updated("jax_random_seed_offset", 3),
    "strict dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "rank": lambda: jax.numpy_rank_promotion("raise"),
    "without jit": jax.disable_jit,
    "nans": lambda: jax.debug_nans(True),
    "infs": lambda: jax.debug_infs(True),
    "leaks": jax.checking_leaks,
    "device": lambda: jax.default_device(jax.devices()[2]),
    "mesh": lambda: jax.set_mesh(mp.mesh("data=4, model=2")),
    "explicit mesh": lambda: jax.set_mesh(jax.make_mesh((8,), ("d",))),
    "traceback": lambda: updated("jax_traceback_filtering", "off"),
}
IN_CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "affine": FUNCTIONS["affine"],
    "matmul": FUNCTIONS["matmul"],
    "random": lambda x: x + jax.random.normal(jax.random.key(0), (8, 8)),
    "promotion": lambda x: x + jnp.ones((8, 8), jnp.int8),
    "ranks": lambda x: x + jnp.ones(8),
    "argmax": lambda x: jnp.argmax(x, 1),
    "default dtypes": lambda x: (jnp.arange(3), jnp.ones(2), x.sum() * 2.0, jnp.zeros(3, int)),
    "loop": loop,
    "branch": branch,
}
ALONE_IN_CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "nan": lambda x: jnp.log(x - 4),
    "inf": lambda x: 1 / (x - 1),
    "no arguments used": lambda x: jnp.log(jnp.arange(4.0) + 1),
}


def context_cases() -> Iterator[Case]:
    """Each function in each context, with one of three arrays, by turns; functions that may fail as they run, by themselves."""
    kinds = ("float32", "numpy float64", "int32")

    def calls(k: int) -> tuple[Call, ...]:
        turns = [kinds[(j + k) % 3] for j in range(len(CONTEXTS))]
        named = zip(turns, CONTEXTS.items(), strict=True)
        return tuple(Call(f"{kind} in {where}", (ARRAYS[kind],), context=context) for kind, (where, context) in named)

    yield together("context", IN_CONTEXTS, calls(0))
    for k, (name, fn) in enumerate(ALONE_IN_CONTEXTS.items()):
        yield Case(f"context {name}", lambda x, fn=fn: fn(x), calls(k), ours=OPTIONS)


# -- static arguments


class Equal:
    """All are equal, and have one hash; what is cached of one must not serve for ... another type's."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 7

    scale = 2


class OtherEqual(Equal):
    scale = 3


STATICS: dict[str, Any] = {
    **{repr(v): v for v in (1, 1.0, True, 0, 0.0, False, -1, 2.5, 1 + 0j, "text", "", b"bytes", None)},
    **{repr(v): v for v in ((1, 2), (2, 1), (), ("a", 1), frozenset({1, 2}), int, float, np.float32, np.dtype("int8"))},
    "numpy float": np.float32(1),
    "numpy int": np.int64(1),
    "function": len,
    "equal": Equal(),
    "other type, equal": OtherEqual(),
    "list": [1, 2],
    "array": np.ones(2),
}


def with_static(x: Any, n: Any) -> Any:
    if isinstance(n, bool | int | float | complex | np.generic):
        return x.astype(int) * n
    if isinstance(n, type | np.dtype):
        return x.astype(n)
    return x * getattr(n, "scale", len(str(n)))


def static_cases() -> Iterator[Case]:
    """Each value by position or by name, by turns."""
    x = ARRAYS["float32"]
    calls = [
        (Call(name, (x, lambda v=v: v)), Call(f"n={name}", (x,), {"n": lambda v=v: v})) for name, v in STATICS.items()
    ]
    for k, how in enumerate(({"static_argnums": 1}, {"static_argnames": "n"})):
        yield Case(f"static {how}", with_static, tuple(c[(j + k) % 2] for j, c in enumerate(calls)), how, OPTIONS)
    both = {"static_argnums": (-1,), "static_argnames": ("n",)}  # of the positional arguments of a call
    yield Case(f"static {both}", with_static, tuple(c[0] for c in calls), both, OPTIONS)
    swapped = tuple(
        Call(f"{name} {order}", (x,), {k: (lambda k=k, v=v: v if k == "a" else 2) for k in order})
        for name, v in {k: STATICS[k] for k in ("1", "1.0", "True", "0.0", "2.5")}.items()
        for order in ("ab", "ba")
    )
    both = {"static_argnames": ("a", "b")}
    yield Case("static two", lambda x, a, b: x.astype(int) * a + b, swapped, both, OPTIONS)
    yield Case("static **kwargs", lambda x, **k: x.astype(int) * k["a"] + k["b"], swapped, both, OPTIONS)


# -- donation


def donation_cases() -> Iterator[Case]:
    kinds = {k: v for k, v in ARRAYS.items() if not k.startswith(("numpy", "bool", "complex"))}
    functions: dict[str, tuple[Callable[..., Any], Any]] = {
        "one": (lambda x: x * 2, 0),
        "by name": (lambda x: x + 1, None),
        "unused": (lambda x, y: y * 2, (0, 1)),
        "both": (lambda x, y: (y + 1, x * 2), (0, 1)),
        "no result like it": (lambda x: x.sum(), 0),
    }
    for name, (fn, nums) in functions.items():
        count = 1 if nums in (0, None) else 2  # no negative ones: jax.jit (0.10.2) takes them, and donates nothing
        how = {"donate_argnames": "x"} if nums is None else {"donate_argnums": nums}
        calls = tuple(Call(kind, (make,) * count) for kind, make in kinds.items() if name != "no result like it")
        calls += tuple(Call(f"{kind}, numpy", (lambda: X,) * count) for kind in ("float32",))
        dims = {"x": "batch mlp"} if count == 1 else {"x": "batch mlp", "y": "batch mlp"}
        yield Case(f"donated {name}", fn, calls, how, {"dims": dims})


# -- transformations


def scan_over(run: Any, args: Any, kwargs: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        return jax.tree.map(lambda c, y: c * 0.5 + y.sum() * 0.01, c, run(c)), run(c)

    return lax.scan(body, args[0], None, length=2)


def scalar_of(run: Any) -> Callable[[Any], Any]:
    return lambda x: sum(jnp.sum(jnp.real(y).astype(float) ** 2) for y in jax.tree.leaves(run(x)))


def stacked(tree: Any, axis: int = 0) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x, x + 1], axis), tree)


def shifted(run: Any) -> Callable[[Any], Any]:
    return lambda tree: run(jax.tree.map(lambda x: x + 1, tree))


def of_condition(run: Any) -> Callable[[Any], Any]:
    return lambda tree: lax.cond(jax.tree.leaves(tree)[0].sum() > 0, run, run, tree)


NESTED = {**HOW, "dims": {"tree/*": "batch mlp"}}
TRANSFORMATIONS: dict[str, Use] = {
    "value and grad": lambda run, a, k: jax.value_and_grad(scalar_of(run))(*a),
    "vjp": lambda run, a, k: (lambda out, back: back(out))(*jax.vjp(run, *a)),
    "jvp": lambda run, a, k: jax.jvp(run, a, a),
    "linearize": lambda run, a, k: (lambda out, f: (out, f(*a)))(*jax.linearize(run, *a)),
    "second": lambda run, a, k: jax.grad(lambda x: scalar_of(jax.grad(scalar_of(run)))(x))(*a),
    "vmap": lambda run, a, k: jax.vmap(run)(stacked(a[0])),
    "vmap last": lambda run, a, k: jax.vmap(run, in_axes=-1)(stacked(a[0], -1)),
    "vmap named": lambda run, a, k: jax.vmap(run, axis_name="i")(stacked(a[0])),
    "vmap named data": lambda run, a, k: jax.vmap(run, axis_name="data")(stacked(a[0])),
    "vmap of grad": lambda run, a, k: jax.vmap(jax.grad(scalar_of(run)))(stacked(a[0])),
    "checkpoint": lambda run, a, k: jax.grad(scalar_of(jax.checkpoint(run)))(*a),
    "jit": lambda run, a, k: jax.jit(shifted(run))(*a),
    "nested": lambda run, a, k: mp.jit(shifted(run), **NESTED)(*a),
    "scan": scan_over,
    "cond": lambda run, a, k: jax.jit(of_condition(run))(*a),
    "map": lambda run, a, k: lax.map(run, stacked(a[0])),
    "eval_shape": lambda run, a, k: run.eval_shape(*a) if hasattr(run, "eval_shape") else jax.eval_shape(run, *a),
    "jax.eval_shape": lambda run, a, k: jax.eval_shape(run, *a),
    "lower": lambda run, a, k: run.lower(*a).compile()(*a),
    "out_info": lambda run, a, k: [(s.shape, str(s.dtype)) for s in jax.tree.leaves(run.lower(*a).out_info)] and 1.0,
    "concrete": lambda run, a, k: float(jnp.asarray(jax.tree.leaves(run(*a))[0]).ravel()[0].real),
}
OF_TRANSFORMATIONS = (
    ("identity", "affine", "mean", "matmul", "cumsum", "concatenate", "loop"),
    ("max", "softmax", "rows", "update", "branch", "sort"),
)


def transformation_cases() -> Iterator[Case]:
    make = lambda: jnp.asarray(X) + jnp.arange(64.0).reshape(8, 8) / 128  # noqa: E731  (no ties)
    calls = tuple(Call(how, (make,), use=use) for how, use in TRANSFORMATIONS.items())
    for names in OF_TRANSFORMATIONS:
        yield together("transformed", {name: FUNCTIONS[name] for name in names}, calls)


# -- errors


class Mine(Exception):
    pass


def raising(error: BaseException) -> Callable[[Any], Any]:
    def fn(x: Any) -> Any:
        raise error

    return fn


BAD: dict[str, Callable[[Any], Any]] = {
    "bool": lambda x: x if x[0, 0] > 0 else -x,
    "float": lambda x: float(x[0, 0]),
    "int": lambda x: int(x[0, 0]),
    "index": lambda x: [1, 2][x[0, 0].astype(int)],
    "numpy": lambda x: np.asarray(x),
    "iterate": lambda x: jnp.zeros(x[0, 0].astype(int)),
    "shapes": lambda x: x + jnp.ones(3),
    "matmul": lambda x: x @ jnp.ones((3, 3)),
    "reshape": lambda x: x.reshape(7),
    "key error": lambda x: {}["missing"],
    "own": raising(Mine("mine")),
    "stop": raising(StopIteration()),
    "attribute": lambda x: x.nothing,
    "text result": lambda x: "text",
    "object result": lambda x: object(),
    "axis": lambda x: lax.psum(x, "nowhere"),
    "assert": raising(AssertionError("no")),
    "loop types": lambda x: lax.fori_loop(0, 2, lambda i, c: (c, c), x),
    "branch types": lambda x: lax.cond(True, lambda: x, lambda: 1),
}


def error_cases() -> Iterator[Case]:
    """Errors of each function, and of calls that reach none."""
    x = ARRAYS["float32"]
    reached = Call("array", (x,)), Call("numpy", (ARRAYS["numpy"],)), Call("by name", (), {"x": x})
    for name, fn in BAD.items():
        yield Case(f"error {name}", lambda x, fn=fn: fn(x), reached)
    wrong: dict[str, Make] = {
        "text": lambda: "text",
        "object": object,
        "array of objects": lambda: np.array([object()]),
        "set": lambda: {1, 2},
        "function": lambda: len,
    }
    calls = Call("none"), Call("two", (x, x)), Call("unknown name", (x,), {"y": x})
    yield Case("error of a call", lambda x: x * 2, calls + tuple(Call(n, (make,)) for n, make in wrong.items()))


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "array": array_cases,
    "number": number_cases,
    "tree": tree_cases,
    "context": context_cases,
    "static": static_cases,
    "donation": donation_cases,
    "transformation": transformation_cases,
    "error": error_cases,
}
CASES = {case.name: case for make in GROUPS.values() for case in make()}
