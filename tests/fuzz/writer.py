"""Writing random programs as Python text: variables with known shapes, statements appended one by one.

A program is text because text is its own reproducer. Statements know of each operand a bound on its values and whether it
is exact (a small multiple of a power of two, which no order of summation rounds), so that what jumps at ties (argmax, sort,
comparisons) only ever sees exact operands, and values stay within bounds in which f32 is meaningful.
"""

from __future__ import annotations

import math
import random
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.random import threefry2x32_p

import meshpar as mp

LARGEST = 4096
"""Elements of the largest value."""
OUTER = "outer"
"""The axis of an outer ``vmap`` under which a program may be called."""


class Skip(Exception):
    """The statement does not fit what there is."""


@dataclass(frozen=True)
class Var:
    """A variable: its kind, |values| <= ``top``, and multiples of 2**-``bits``, if not None.

    ``kind`` is ``f`` (f32), ``i`` (int32), ``b`` (bool), ``k`` (typed keys), ``s`` (f32 with NaN, infinities and signed zeros),
    or ``o`` (a result of any dtype). Statements pick operands of the kinds that they name, so ``s`` and ``o`` reach only the
    statements that are written for them.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    top: float
    bits: int | None = None

    @property
    def exact(self) -> bool:
        return self.bits is not None and math.log2(max(self.top, 1)) + self.bits <= 20


@dataclass(frozen=True)
class Input:
    """A parameter of the program, and how to fill it."""

    name: str
    shape: tuple[int, ...]
    kind: str
    dims: tuple[str | None, ...]

    def value(self, seed: int, real: Any = np.float32) -> Any:
        rng = np.random.default_rng([seed, *self.name.encode()])
        if self.kind == "i":
            return rng.integers(0, 8, self.shape).astype(np.int32)
        if self.kind == "k":
            key = jax.random.key(int(rng.integers(1 << 30)))
            return jax.random.split(key, self.shape) if self.shape else key
        if self.kind == "s":
            return special(rng, self.shape).astype(real)
        return (rng.integers(-8, 9, self.shape) / 4).astype(real)


def special(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers among which are one NaN, one infinity, signed zeros, or mostly zeros: one of these kinds per array."""
    x = rng.integers(-8, 9, shape) / 4.0
    flat = x.reshape(-1)
    style = rng.integers(5)
    if not flat.size:
        return x
    if style == 0:
        flat[rng.integers(flat.size)] = np.nan
    elif style == 1:
        flat[rng.integers(flat.size)] = rng.choice([np.inf, -np.inf])
    elif style == 2:
        flat[:] = rng.choice([0.0, -0.0, -0.0], flat.size)
    elif style == 3:  # positive, in few places
        flat[:] = np.where(rng.random(flat.size) < 0.25, np.abs(flat), 0.0)
    else:
        flat[rng.random(flat.size) < 0.2] = np.nan
        flat[rng.random(flat.size) < 0.1] = -0.0
    return x


@dataclass
class Program:
    """Text of statements over inputs; what it returns; with respect to what it is differentiated."""

    inputs: list[Input]
    lines: list[list[str]]  # a statement each
    outs: list[str]
    grads: list[str]
    seed: int
    vars: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)  # shape and kind of what statements make
    needs: tuple[str, ...] = ()  # how the statements ask to be called: contexts, "axis", "ring"
    renamed: tuple[tuple[str, int], ...] = ()  # the names that dims are given, and their sizes

    @property
    def text(self) -> str:
        """The function ``program``, which returns a tuple: the results, and the gradients of a projection of them."""
        names = ", ".join(i.name for i in self.inputs)
        body = [line for statement in self.lines for line in statement]
        out = [f"def forward({names}):", *("    " + line for line in body), f"    return ({', '.join(self.outs)},)", ""]
        out += [f"def program({names}):"]
        floats = [k for k, name in enumerate(self.outs) if self.vars[name][1] == "f"]
        if not self.grads or not floats:
            return "\n".join([*out, f"    return forward({names})"])
        out += [
            f"    def projected({', '.join(self.grads)}):",
            f"        outs = forward({names})",
            f"        return sum((outs[k] * weights(outs[k])).sum() for k in {floats}), outs",
            f"    grads, outs = jax.grad(projected, {tuple(range(len(self.grads)))}, has_aux=True)({', '.join(self.grads)})",
            "    return (*outs, *grads)",
        ]
        return "\n".join(out)

    def function(self, real: Any = jnp.float32, name: str = "program") -> Callable[..., tuple[Any, ...]]:
        """``program``, or ``forward``, which returns the results alone."""
        scope = namespace(real)
        exec(compile(self.text, "<program>", "exec"), scope)
        return scope[name]

    def values(self, real: Any = np.float32, copy: int = 0) -> list[Any]:
        """An array for each input that is one, others for each ``copy``."""
        return [i.value(self.seed + copy, real) for i in self.inputs]

    @property
    def dims(self) -> dict[str, tuple[str | None, ...]]:
        return {i.name: i.dims for i in self.inputs if any(i.dims)}


def weights(x: Any) -> Any:
    """Small whole numbers, another one for each element of a result: what the results are projected on."""
    i = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)
    return ((i * 7 + i // 5) % 5 - 2).astype(x.dtype)


def namespace(real: Any) -> dict[str, Any]:
    """What programs may use; ``F`` is the dtype of their floats, ``N`` its scalar type in numpy.

    ``BF16``, ``F16`` and ``E4M3`` (float8_e4m3fn) hold what is narrowed to them exactly, but not its sums and cotangents. In f64
    they are f64, so that the distance from it has their rounding in it.
    """
    narrow = {"BF16": jnp.bfloat16, "F16": jnp.float16, "E4M3": jnp.float8_e4m3fn}
    if np.dtype(real) == np.float64:
        narrow = dict.fromkeys(narrow, real)
    modules = {"jax": jax, "jnp": jnp, "lax": lax, "np": np, "mp": mp, "nn": jax.nn, "optax": optax}
    others = {"F": real, "N": np.dtype(real).type, "weights": weights, "threefry2x32": threefry2x32_p.bind}
    return {**narrow, **modules, **others}


class Writer:
    """A function body that is being written."""

    def __init__(
        self, rng: random.Random, sizes: dict[str, int], parent: Writer | None = None, split: Sequence[int] = ()
    ):
        self.rng, self.sizes, self.parent = rng, sizes, parent
        self.split: Sequence[int] = parent.split if parent else split
        self.vars: list[Var] = list(parent.vars) if parent else []
        self.forward_only = False
        self.lines: list[list[str]] = []
        self.inputs: list[Input] = parent.inputs if parent else []
        self.count: list[int] = parent.count if parent else [0]
        self.used: set[str] = parent.used if parent else set()
        self.depth: int = parent.depth + 1 if parent else 0
        self.needs: set[str] = parent.needs if parent else set()
        self.renamed: set[tuple[str, int]] = parent.renamed if parent else set()

    # -- choosing

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def of(self, items: Sequence[Any]) -> Any:
        if not items:
            raise Skip
        return items[self.rng.randrange(len(items))]

    def pick(
        self,
        kind: str = "f",
        ranks: Sequence[int] = (1, 2, 3, 4),
        exact: bool = False,
        such: Callable[[Var], bool] = lambda v: True,
    ) -> Var:
        """A variable, the later the likelier."""
        found = [
            v
            for v in self.vars
            if v.kind in kind and len(v.shape) in ranks and (v.exact or not exact) and 0 not in v.shape and such(v)
        ]
        if not found:
            raise Skip
        recent = found[-4:] if self.chance(0.6) else found
        var = self.of(recent)
        self.used.add(var.name)
        return var

    def like(self, var: Var, exact: bool = False) -> Var:
        """Another variable that broadcasts with this one."""

        def fits(v: Var) -> bool:
            try:
                return v.name != var.name and np.broadcast_shapes(v.shape, var.shape) == var.shape
            except ValueError:
                return False

        try:
            return self.pick(ranks=(0, 1, 2, 3, 4), exact=exact, such=fits)
        except Skip:
            shape = tuple(n if self.chance(0.8) else 1 for n in var.shape[self.rng.randrange(2) :])
            return self.fresh(shape)

    def fresh(self, shape: Sequence[int], kind: str = "f", names: Sequence[str | None] = ()) -> Var:
        """A new input of the program; ``names``: its dims, if they are not to be drawn by size."""
        if len(self.inputs) >= 9 or math.prod(shape) > 2048:
            raise Skip
        dims: list[str | None] = list(names)
        for n in () if names else shape:
            alike = [a for a, size in self.sizes.items() if size == n and a not in dims]
            dims.append(self.of(alike) if alike and self.chance(0.85) else None)
        name = self.name()
        self.inputs.append(Input(name, tuple(shape), kind, tuple(dims)))
        var = Var(name, tuple(shape), kind, 2.0 if kind == "f" else 7.0, {"f": 2, "i": 0}.get(kind))
        writer: Writer | None = self
        while writer is not None:  # it is there in every body that is open
            writer.vars.insert(0, var)
            writer = writer.parent
        self.used.add(name)
        return var

    def ids(self, ranks: Sequence[int] = (1,)) -> Var:
        """Integers of these ranks; four new ones if there are none."""
        known = any(v.kind == "i" and len(v.shape) in ranks for v in self.vars)
        return self.pick("i", ranks) if known else self.fresh((4,), "i")

    def axis(self, var: Var) -> int:
        """A dim of a variable, of a size that the layout splits three times as likely as others."""
        rank = len(var.shape)
        return self.of([i for i in range(rank) for _ in range(3 if var.shape[i] in self.split else 1)])

    def split_size(self) -> int:
        """A size that the layout splits, if there is one."""
        return self.of(self.split or [4, 8, 16])

    def name(self) -> str:
        self.count[0] += 1
        return f"v{self.count[0]}"

    # -- writing

    def emit(
        self, expr: str, top: float = 2.0, bits: int | None = None, before: Sequence[str] = (), scale: bool = True,
        kind: str | None = None,
    ) -> list[Var]:  # fmt: skip
        """Append ``name = expr``; values that may be large are scaled by a power of two; ``kind``: if not by dtype."""
        if scale and top > 16 and math.isfinite(top):
            k = math.ceil(math.log2(top / 4))
            expr, top = f"({expr}) * {2.0**-k}", top * 2.0**-k
            bits = None if bits is None else bits + k
        shapes = self.shapes(before, expr)
        leaves = jax.tree.leaves(shapes)
        if not leaves or any(math.prod(s.shape) > LARGEST or len(s.shape) > 5 for s in leaves):
            raise Skip
        new = []
        for s in leaves:
            of = kind or _kind(s.dtype)
            new.append(Var(self.name(), tuple(s.shape), of, top, bits if of == "f" else 0))
        names = ", ".join(v.name for v in new)
        single = not isinstance(shapes, list | tuple)
        comma = "," if len(new) == 1 and not single else ""
        self.lines.append([*before, f"{names}{comma} = {expr}"])
        self.vars += new
        return new

    def shapes(self, before: Sequence[str], expr: str) -> Any:
        """The shapes of an expression."""
        env = {v.name: jax.ShapeDtypeStruct(v.shape, _DTYPES[v.kind]) for v in self.vars if v.kind in _DTYPES}
        keys = {
            v.name: jax.random.split(jax.random.key(0), v.shape) if v.shape else jax.random.key(0)
            for v in self.vars
            if v.kind == "k"
        }

        def run(env: dict[str, Any]) -> Any:
            scope = {**namespace(jnp.float32), **keys, **env}
            exec("\n".join([*before, f"_out = {expr}"]), scope)
            return scope["_out"]

        if f"'{OUTER}'" not in expr:
            return jax.eval_shape(run, env)
        mapped = jax.eval_shape(jax.vmap(run, in_axes=None, axis_name=OUTER, axis_size=2, out_axes=0), env)
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), mapped)

    @contextmanager
    def body(self, params: Sequence[Var]) -> Iterator[Writer]:
        """A writer of a nested function's body."""
        inner = Writer(self.rng, self.sizes, self)
        inner.vars += params
        yield inner

    def define(self, inner: Writer, params: Sequence[Var], result: str) -> tuple[str, list[str]]:
        """(the name of the nested function, its text)."""
        name = f"f{self.name()[1:]}"
        lines = [line for statement in inner.lines for line in statement]
        head = f"def {name}({', '.join(p.name for p in params)}):"
        return name, [head, *("    " + line for line in lines), f"    return {result}"]

    def param(self, shape: Sequence[int], kind: str = "f", top: float = 2.0, bits: int | None = None) -> Var:
        return Var(self.name(), tuple(shape), kind, top, bits)


_DTYPES = types.MappingProxyType({"f": jnp.float32, "i": jnp.int32, "b": jnp.bool_, "s": jnp.float32})


def _kind(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "k"
    if dtype == jnp.bool_:
        return "b"
    if dtype == jnp.float32:
        return "f"
    if dtype == jnp.int32:
        return "i"
    raise Skip
