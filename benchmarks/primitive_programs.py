"""Small programs for `primitives.py`: each is a function, and the dims, dtype and values of its arguments.

The sizes of the dims are in `SIZES`; `_` and a number is an unnamed dim of that size.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental.ode import odeint

SIZES = {
    "b": 16,
    "s": 32,
    "e": 16,
    "f": 32,
    "v": 64,
    "h": 8,
    "d": 8,
    "x": 8,
    "g": 8,
    "y": 16,
    "z": 16,
    "c": 8,
    "o": 8,
    "e2": 16,
}

LAYOUTS = {
    "batch": "b: data",
    "sequence": "s: data; y: data",
    "tensor": "e, x, c: data; f, v, h, o: model",
    "fsdp+tensor": "b: data; e, x, c: data; f, v, h, o: model",
    "batch+sequence": "b: data; s, y: model",
}
"""For a mesh ``data=4, model=2``. A program needs not have all these dims."""


class Input(NamedTuple):
    """An argument.

    Attributes:
      dims: named dims by `SIZES`, unnamed ones as ``_N``.
      below: random integers in [0, below) rather than floats; 0: floats.
      positive: floats are in [0.5, 1.5) rather than normally distributed.
      ascending: values are sorted along the first dim.
    """

    dims: str
    below: int = 0
    positive: bool = False
    ascending: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n[1:]) if n.startswith("_") else SIZES[n] for n in self.dims.split())

    @property
    def names(self) -> str:
        return re.sub(r"_\d+", "_", self.dims)

    def array(self, rng: np.random.Generator) -> np.ndarray:
        if self.below:
            found: np.ndarray = rng.integers(0, self.below, self.shape).astype(np.int32)
        elif self.positive:
            found = rng.uniform(0.5, 1.5, self.shape).astype(np.float32)
        else:
            found = rng.normal(size=self.shape).astype(np.float32)
        return np.sort(found, 0) if self.ascending else found


class Program(NamedTuple):
    """A function of arrays.

    Attributes:
      fn: the function; its arguments have the names of ``inputs``.
      grad: whether its float results have gradients worth comparing.
    """

    name: str
    fn: Callable[..., Any]
    inputs: Mapping[str, Input]
    grad: bool

    def gradient(self) -> Callable[..., Any] | None:
        """The gradients in the float arguments of half the sum of squares of the float results."""
        at = [k for k, i in enumerate(self.inputs.values()) if not i.below]
        if not self.grad or not at:
            return None

        def loss(*args: Any) -> Any:
            found = [y for y in jax.tree.leaves(self.fn(*args)) if jnp.issubdtype(y.dtype, jnp.floating)]
            return sum(jnp.sum(jnp.square(y)) for y in found) / 2

        def gradient(*args: Any) -> Any:
            return jax.grad(loss, at)(*args)

        # mp.jit finds the names of the arguments in the signature
        gradient.__signature__ = _signature(self.inputs)  # type: ignore[attr-defined]
        return gradient


def _signature(names: Mapping[str, Any]) -> Any:
    import inspect

    return inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names])


PROGRAMS: dict[str, Program] = {}


def program(*, grad: bool = True, **inputs: str | Input) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a program, named after its function."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        name = fn.__name__
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(name, fn, {k: Input(v) if isinstance(v, str) else v for k, v in inputs.items()}, grad)
        return fn

    return add


def ids(dims: str, below: int, ascending: bool = False) -> Input:
    return Input(dims, below=below, ascending=ascending)


def positive(dims: str) -> Input:
    return Input(dims, positive=True)


# -- indexing


@program(x="s e", u="_4 e", i=ids("", 28))
def dynamic_update_rows(x, u, i):
    return lax.dynamic_update_slice(x, u, (i, 0))


@program(x="b s", u="b _1", i=ids("", 32))
def dynamic_update_column(x, u, i):
    return lax.dynamic_update_slice(x, u, (0, i))


@program(x="s e", i=ids("", 28))
def dynamic_slice_rows(x, i):
    return lax.dynamic_slice_in_dim(x, i, 4, 0)


@program(x="b s e", i=ids("", 32))
def dynamic_index(x, i):
    return x[:, i]


@program(x="s e", u="e", i=ids("", 32))
def set_row(x, u, i):
    return x.at[i].set(u)


@program(x="s e", u="_4 e", i=ids("_4", 32))
def set_rows(x, u, i):
    return x.at[i].set(u)


@program(x="s e", u="_4 e", i=ids("_4", 32))
def add_rows(x, u, i):
    return x.at[i].add(u)


@program(x="s e", u="_4 e", i=ids("_4", 32))
def max_rows(x, u, i):
    return x.at[i].max(u)


@program(x="b s", u="b", i=ids("", 32))
def set_column(x, u, i):
    return x.at[:, i].set(u)


@program(x="b s", u="b _3", i=ids("_3", 32))
def add_columns(x, u, i):
    return x.at[:, i].add(u)


@program(x="b s", u="b", i=ids("b", 32))
def set_per_row(x, u, i):
    return x.at[jnp.arange(16), i].set(u)


@program(x="v e", i=ids("b s", 64))
def embedding(x, i):
    return jnp.take(x, i, axis=0)


@program(x="s e", i=ids("_6", 32))
def take_rows(x, i):
    return x[i]


@program(x="b s", i=ids("_6", 32))
def take_columns(x, i):
    return jnp.take(x, i, axis=1)


@program(x="b v", i=ids("b _1", 64))
def take_along_last(x, i):
    return jnp.take_along_axis(x, i, axis=1)


@program(x="b s e", i=ids("b _4", 32))
def take_along_middle(x, i):
    return jnp.take_along_axis(x, i[..., None], axis=1)


@program(i=ids("b s", 64), w="v e", grad=True)
def one_hot_embedding(i, w):
    return jax.nn.one_hot(i, 64) @ w


@program(cache="b s h d", k="b _1 h d", q="b h d", at=ids("", 32))
def kv_cache_step(cache, k, q, at):
    cache = lax.dynamic_update_slice_in_dim(cache, k, at, 1)
    scores = jnp.einsum("bhd,bshd->bhs", q, cache)
    scores = jnp.where(jnp.arange(32) <= at, scores, -1e9)
    return cache, jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores), cache)


@program(cache="b s h d", k="b h d", at=ids("b", 32))
def kv_cache_ragged_write(cache, k, at):
    return jax.vmap(lambda c, k, i: lax.dynamic_update_index_in_dim(c, k, i, 0))(cache, k, at)


@program(queue="s e", keys="b e", at=ids("", 2))
def moco_queue(queue, keys, at):
    return lax.dynamic_update_slice(queue, keys, (at * 16, 0))


@program(q="b e", k="b e", queue="s e", at=ids("", 2))
def moco_step(q, k, queue, at):
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    logits = jnp.concatenate([jnp.sum(q * k, -1, keepdims=True), q @ lax.stop_gradient(queue).T], 1) / 0.07
    queue = lax.dynamic_update_slice(queue, lax.stop_gradient(k), (at * 16, 0))
    return -jax.nn.log_softmax(logits)[:, 0].mean(), queue


@program(x="s e", u="e", at=ids("", 100))
def ring_buffer(x, u, at):
    return x.at[at % 32].set(u)


@program(x="b s e", n=ids("b", 32))
def last_token(x, n):
    return x[jnp.arange(16), n]


# -- order


@program(x="b v")
def top_k(x):
    return lax.top_k(x, 4)


@program(x="s e")
def top_k_rows(x):
    _, i = lax.top_k(jnp.sum(jnp.square(x), 1), 4)
    return x[i]


@program(x="b s", grad=False)
def argmax(x):
    return jnp.argmax(x, 1), jnp.argmax(x, 0)


@program(x="b s e", grad=False)
def argmin(x):
    return jnp.argmin(x, 1)


@program(x="b s")
def sort_last(x):
    return jnp.sort(x, 1)


@program(x="b s")
def sort_first(x):
    return jnp.sort(x, 0)


@program(x="s")
def sort_vector(x):
    return jnp.sort(x)


@program(x="b s", grad=False)
def argsort_last(x):
    return jnp.argsort(x, 1)


@program(x="b s", y="b s")
def sort_pairs(x, y):
    return lax.sort((x, y), dimension=1, num_keys=1)


@program(x="b s")
def median(x):
    return jnp.median(x, 1)


@program(x="b s")
def quantile(x):
    return jnp.quantile(x, 0.9, axis=1)


@program(x="v", q="b s", grad=False)
def searchsorted(x, q):
    return jnp.searchsorted(jnp.sort(x), q)


@program(x=ids("b s", 20), grad=False)
def unique(x):
    return jnp.unique(x, size=20, fill_value=-1)


@program(x="b s", grad=False)
def nonzero(x):
    return jnp.nonzero(x > 1.5, size=32, fill_value=0)


@program(x=ids("b s", 16), grad=False)
def bincount(x):
    return jnp.bincount(x.ravel(), length=16)


@program(x="b s", grad=False)
def histogram(x):
    return jnp.histogram(x, bins=8, range=(-3.0, 3.0))[0]


# -- segments and groups


@program(x="s e", i=ids("s", 8))
def segment_sum(x, i):
    return jax.ops.segment_sum(x, i, 8)


@program(x="s e", i=ids("s", 8, ascending=True))
def segment_sum_sorted(x, i):
    return jax.ops.segment_sum(x, i, 8, indices_are_sorted=True)


@program(x="s e", i=ids("s", 8))
def segment_max(x, i):
    return jax.ops.segment_max(x, i, 8)


@program(x="s e", i=ids("s", 8))
def segment_mean_back(x, i):
    total, n = jax.ops.segment_sum(x, i, 8), jax.ops.segment_sum(jnp.ones(32), i, 8)
    return x - (total / jnp.maximum(n, 1)[:, None])[i]


@program(x="b e", w="x e f")
def ragged_dot(x, w):
    return lax.ragged_dot(x, w, jnp.full(8, 2, jnp.int32))


@program(x="s e", w="_4 e f", i=ids("s", 4, ascending=True))
def ragged_dot_rows(x, w, i):
    return lax.ragged_dot(x, w, jnp.bincount(i, length=4).astype(jnp.int32))


@program(x="s e", w="x e f", v="x f e", r="e x")
def moe_one_hot(x, w, v, r):
    gate, i = lax.top_k(jax.nn.softmax(x @ r), 2)
    mask = jax.nn.one_hot(i, 8)
    at = (jnp.cumsum(mask.reshape(-1, 8), 0).reshape(32, 2, 8) - 1) * mask
    dispatch = jnp.einsum("skx,skxc->sxc", mask, jax.nn.one_hot(at.astype(jnp.int32), 12))
    inner = jax.nn.relu(jnp.einsum("xce,xef->xcf", jnp.einsum("sxc,se->xce", dispatch, x), w))
    out = jnp.einsum("xcf,xfe->xce", inner, v)
    return jnp.einsum("sxc,xce,sx->se", dispatch, out, jnp.einsum("skx,sk->sx", mask, gate))


@program(x="s e", w="x e f", r="e x")
def moe_by_sort(x, w, r):
    i = jnp.argmax(x @ r, -1)
    order = jnp.argsort(i)
    out = lax.ragged_dot(x[order], w, jnp.bincount(i, length=8).astype(jnp.int32))
    return jnp.zeros((32, 32)).at[order].set(out)


# -- running operations


@program(x="b s e")
def cumsum(x):
    return jnp.cumsum(x, 1)


@program(x="b s")
def cumsum_reverse(x):
    return lax.cumsum(x, axis=1, reverse=True)


@program(x=positive("b s"))
def cumprod(x):
    return jnp.cumprod(x, 1)


@program(x="b s")
def cummax(x):
    return lax.cummax(x, axis=1)


@program(x="b s")
def cumlogsumexp(x):
    return lax.cumlogsumexp(x, axis=1)


@program(a=positive("b s e"), x="b s e")
def associative_scan(a, x):
    return lax.associative_scan(lambda p, r: (p[0] * r[0], p[1] * r[0] + r[1]), (a, x), axis=1)[1]


@program(x="s e")
def associative_scan_sum(x):
    return lax.associative_scan(jnp.add, x, axis=0)


# -- loops


@program(x="b e", w="_4 e e2")
def scan_layers(x, w):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


@program(x="b s e")
def scan_time(x):
    return lax.scan(lambda h, x: ((h := 0.9 * h + x), h), jnp.zeros((16, 16)), jnp.swapaxes(x, 0, 1))[1]


@program(x="b e", grad=False)
def while_loop(x):
    return lax.while_loop(lambda c: (c[0] < 5) & (jnp.max(c[1]) < 1e3), lambda c: (c[0] + 1, c[1] * 1.5), (0, x))


@program(x="b e", w="e e2")
def fori_loop(x, w):
    return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w) + x, x)


@program(x="b e", p=ids("", 2))
def cond(x, p):
    return lax.cond(p == 1, lambda x: x - jnp.mean(x, 0), lambda x: x * jnp.max(x), x)


@program(x="b e", p=ids("", 3))
def switch(x, p):
    return lax.switch(p, [jnp.sin, lambda x: x - x.sum(1, keepdims=True), lambda x: x[::-1]], x)


@program(x="s e", w="e f")
def lax_map(x, w):
    return lax.map(lambda r: jnp.tanh(r @ w), x)


@program(x="b s e", wx="e f", wh="_32 f")
def gru(x, wx, wh):
    def cell(h, x):
        z = jax.nn.sigmoid(x @ wx + h @ wh)
        return (1 - z) * h + z * jnp.tanh(x @ wx), None

    return lax.scan(cell, jnp.zeros((16, 32)), jnp.swapaxes(x, 0, 1))[0]


@program(x="b s e", w="e _64", u="_16 _64")
def lstm(x, w, u):
    def cell(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ w + h @ u, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    return lax.scan(cell, (jnp.zeros((16, 16)),) * 2, jnp.swapaxes(x, 0, 1))[0]


@program(x="b s e", a=positive("e _4"), w="e _4")
def ssm_scan(x, a, w):
    def cell(h, x):
        h = h * jnp.exp(-a) + x[..., None] * w
        return h, h.sum(-1)

    return lax.scan(cell, jnp.zeros((16, 16, 4)), jnp.swapaxes(x, 0, 1))[1]


@program(x="b e", w="e e2")
def ode(x, w):
    return odeint(lambda y, t: jnp.tanh(y @ w) - y, x, jnp.array([0.0, 0.5, 1.0]))


@program(x="b s v", y=ids("b _6", 63))
def ctc(x, y):
    return optax.ctc_loss(x, jnp.zeros((16, 32)), y + 1, jnp.zeros((16, 6)))


@program(x="b e", w="e f", n="b s e")
def microbatches(x, w, n):
    def micro(g, x):
        return g + jax.grad(lambda w: jnp.square(x @ w).mean())(w), None

    return lax.scan(micro, jnp.zeros_like(w), n.transpose(1, 0, 2))[0]


@program(x="e e2", grad=False)
def power_iteration(x):
    def body(_, v):
        v = x.T @ (x @ v)
        return v / jnp.linalg.norm(v)

    return lax.fori_loop(0, 4, body, jnp.ones(16))


@program(x="b e", c="_4 e", grad=False)
def kmeans(x, c):
    near = jnp.argmin(jnp.square(x[:, None] - c).sum(-1), 1)
    hot = jax.nn.one_hot(near, 4)
    return (hot.T @ x) / jnp.maximum(hot.sum(0), 1)[:, None]


@program(x="b e", y="s e", grad=False)
def nearest_neighbours(x, y):
    return lax.top_k(-jnp.square(x[:, None] - y).sum(-1), 3)


@program(tokens=ids("b s", 64), scores="b _4", logits="b _4 v", grad=False)
def beam_step(tokens, scores, logits):
    total = (scores[..., None] + jax.nn.log_softmax(logits)).reshape(16, -1)
    best, i = lax.top_k(total, 4)
    return best, i // 64, i % 64


# -- windows


@program(x="b y z c", w="_3 _3 c o")
def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@program(x="b y z c", w="_3 _3 c o")
def conv_strided(x, w):
    return lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@program(x="b y z c", w="_3 _3 c o")
def conv_dilated(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", rhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@program(x="b y z c", w="_3 _3 _2 o")
def conv_grouped(x, w):
    dn = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dn, feature_group_count=4)


@program(x="b y z c", w="_3 _3 _1 c")
def conv_depthwise(x, w):
    dn = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dn, feature_group_count=8)


@program(x="b y z c", w="_2 _2 c o")
def conv_transpose(x, w):
    return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@program(x="b s e", w="_4 e f")
def conv1d_causal(x, w):
    dn = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, w, (1,), [(3, 0)], dimension_numbers=dn)


@program(x="b y z c", w="_4 _4 c o")
def patch_embedding(x, w):
    return lax.conv_general_dilated(x, w, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@program(x="b y z c")
def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@program(x="b y z c")
def avg_pool_overlapping(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") / 9


@program(x="b y z c")
def global_pool(x):
    return x.mean((1, 2))


@program(x="b y z c")
def resize(x):
    return jax.image.resize(x, (16, 32, 32, 8), "linear")


@program(x="b y z c")
def upsample_nearest(x):
    return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)


@program(x="s", q="b")
def interpolation(x, q):
    return jnp.interp(q, jnp.linspace(-3.0, 3.0, 32), x)


# -- normalization and losses


@program(x="b e", g="e", c="e")
def batch_norm(x, g, c):
    mean, var = x.mean(0), x.var(0)
    return (x - mean) * lax.rsqrt(var + 1e-5) * g + c, mean, var


@program(x="b s e", g="e")
def layer_norm(x, g):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g


@program(x="b s e", g="e")
def rms_norm(x, g):
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * g


@program(x="b y z c", g="c")
def group_norm(x, g):
    y = x.reshape(16, 16, 16, 4, 2)
    y = (y - y.mean((1, 2, 4), keepdims=True)) * lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
    return y.reshape(x.shape) * g


@program(x="b s")
def softmax(x):
    return jax.nn.softmax(x)


@program(x="b s e")
def softmax_middle(x):
    return jax.nn.softmax(x, 1)


@program(x="b v")
def logsumexp(x):
    return jax.nn.logsumexp(x, 1)


@program(x="b s e", w="e v", y=ids("b s", 64))
def cross_entropy(x, w, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean()


@program(x="b s e", w="e v", y=ids("b s", 64))
def cross_entropy_shifted(x, w, y):
    return optax.softmax_cross_entropy_with_integer_labels((x @ w)[:, :-1], y[:, 1:]).mean()


@program(x="b v", y=ids("b", 64))
def focal_loss(x, y):
    p = jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1)[:, 0]
    return -jnp.mean(jnp.square(1 - jnp.exp(p)) * p)


@program(a="b e", p="b e")
def contrastive_loss(a, p):
    a, p = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, p))
    logits = a @ p.T / 0.1
    return -(jnp.diagonal(jax.nn.log_softmax(logits)) + jnp.diagonal(jax.nn.log_softmax(logits.T))).mean()


@program(x="b s", t="b s")
def huber(x, t):
    return optax.huber_loss(x, t).mean()


@program(x="b y z c", n="b y z c", t=ids("b", 10), w="c o", u="o c")
def diffusion_step(x, n, t, w, u):
    a = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 10))[t][:, None, None, None]
    noisy = jnp.sqrt(a) * x + jnp.sqrt(1 - a) * n
    return jnp.square(jax.nn.silu(noisy @ w) @ u - n).mean()


@program(w="e f", u="f")
def spectral_norm(w, u):
    v = w @ u
    v = v / (jnp.linalg.norm(v) + 1e-6)
    u = w.T @ v
    u = u / (jnp.linalg.norm(u) + 1e-6)
    return w / (v @ w @ u)


@program(x="b s e")
def vector_norm(x):
    return jnp.linalg.norm(x, axis=-1), jnp.linalg.norm(x)


# -- attention


@program(q="b s h d", k="b s h d", v="b s h d")
def attention(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


@program(q="b s h d", k="b s h d", v="b s h d")
def attention_causal(q, k, v):
    scores = jnp.where(jnp.tril(jnp.ones((32, 32), bool)), jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@program(q="b s h d", k="b s _2 d", v="b s _2 d")
def attention_grouped(q, k, v):
    q = q.reshape(16, 32, 2, 4, 8)
    p = jax.nn.softmax(jnp.einsum("bqkgd,bskd->bkgqs", q, k) / 3)
    return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(16, 32, 8, 8)


@program(q="b s h d", k="b s h d", v="b s h d")
def attention_window(q, k, v):
    i = jnp.arange(32)
    near = (i[:, None] >= i) & (i[:, None] - i < 8)
    p = jax.nn.softmax(jnp.where(near, jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


@program(q="b s h d", k="b s h d", v="b s h d")
def attention_library(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@program(x="b s h d")
def rope(x):
    angle = jnp.arange(32)[:, None] * 10000.0 ** (-jnp.arange(4) / 4)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    p, r = jnp.split(x, 2, -1)
    return jnp.concatenate([p * cos - r * sin, r * cos + p * sin], -1)


@program(x="b s e", q="e h d", o="h d e")
def attention_projections(x, q, o):
    y = jnp.einsum("bse,ehd->bshd", x, q)
    return jnp.einsum("bshd,hde->bse", jnp.tanh(y), o)


@program(x="b s e", w="e f", v="f e")
def mlp(x, w, v):
    return jax.nn.gelu(x @ w) @ v


# -- matmuls and reductions


@program(x="b s e", w="e f")
def matmul(x, w):
    return x @ w


@program(x="b s e", y="b e f")
def batched_matmul(x, y):
    return x @ y


@program(x="b e", y="s e")
def outer_scores(x, y):
    return x @ y.T


@program(x="b", y="s")
def outer_product(x, y):
    return jnp.outer(x, y)


@program(x="b s e", y="b s f")
def einsum_contract_two(x, y):
    return jnp.einsum("bse,bsf->ef", x, y)


@program(x="b s e", w="e f", y="b f")
def einsum_three(x, w, y):
    return jnp.einsum("bse,ef,bf->bs", x, w, y)


@program(x="b s e")
def einsum_transposed(x):
    return jnp.einsum("bse->esb", x)


@program(x="b e", y="b e", w="e f")
def einsum_bilinear(x, y, w):
    return jnp.einsum("be,ce,ef->bcf", x, y, w)


@program(x="b s e")
def gram(x):
    return jnp.einsum("bse,bte->bst", x, x)


@program(x="b e")
def covariance(x):
    return jnp.cov(x, rowvar=False)


@program(x="b s e")
def mean_all(x):
    return x.mean()


@program(x="b s e")
def variance(x):
    return x.var(1), x.std(0)


@program(x="b s e")
def reduce_max(x):
    return x.max(1), x.min((0, 2))


@program(x=positive("b s"))
def product(x):
    return x.prod(0), x.prod(1)


@program(x="b s", grad=False)
def any_all(x):
    return (x > 0).any(0), (x > -9).all(1)


@program(x="b s e", w="e")
def broadcast_sum(x, w):
    return (x * w).sum(-1) + x.sum((0, 1))[3]


# -- shapes


@program(x="b s e")
def transpose(x):
    return x.transpose(2, 0, 1) * 2


@program(x="b e")
def transpose_add(x):
    return x + x.T


@program(x="b s e")
def merge_dims(x):
    return x.reshape(-1, 16) * 2


@program(x="b s e")
def merge_minor(x):
    return jnp.tanh(x.reshape(16, -1))


@program(x="b f")
def split_dims(x):
    return x.reshape(16, 8, 4).sum(-1)


@program(x="b s e")
def ravel_norm(x):
    return x.ravel() / (1 + jnp.linalg.norm(x.ravel()))


@program(x="b s e", y="b s e")
def concatenate_last(x, y):
    return jnp.concatenate([x, y], -1)


@program(x="b s e", y="b s e")
def concatenate_middle(x, y):
    return jnp.concatenate([x, y], 1)


@program(x="b e", c="e")
def prepend_token(x, c):
    return jnp.concatenate([c[None], x], 0)


@program(x="b e", y="b e")
def stack(x, y):
    return jnp.stack([x, y], 1)


@program(x="b s f")
def split_last(x):
    p, r = jnp.split(x, 2, -1)
    return p * jax.nn.sigmoid(r)


@program(x="b s e")
def pad(x):
    return jnp.pad(x, ((0, 0), (2, 2), (0, 0)))


@program(x="b s e")
def roll(x):
    return jnp.roll(x, 1, 1)


@program(x="b s e")
def flip(x):
    return x[:, ::-1]


@program(x="b s")
def tile(x):
    return jnp.tile(x, (1, 3))


@program(x="b s")
def repeat(x):
    return jnp.repeat(x, 3, 1)


@program(x="b s e")
def slice_middle(x):
    return x[:, 4:12]


@program(x="b s e")
def slice_strided(x):
    return x[:, ::2]


@program(x="b s e")
def differences(x):
    return x[:, 1:] - x[:, :-1]


@program(x="b s e")
def first_token(x):
    return x[:, 0]


@program(x="b s")
def triangular(x):
    return jnp.tril(x), jnp.triu(x, 2)


@program(x="b s")
def where_clip(x):
    return jnp.where(x > 0, jnp.clip(x, -1, 1), 0.1 * x)


@program(x="b e")
def diagonal(x):
    return jnp.diagonal(x), jnp.trace(x)


@program(x="b y z c")
def space_to_depth(x):
    return x.reshape(16, 8, 2, 8, 2, 8).transpose(0, 1, 3, 2, 4, 5).reshape(16, 8, 8, 32)


@program(x="b s e")
def split_heads(x):
    return x.reshape(16, 32, 4, 4).transpose(0, 2, 1, 3)


@program(x="b s e")
def chunk_sequence(x):
    return x.reshape(16, 8, 4, 16).mean(2)


# -- transforms, linear algebra, random numbers


@program(x="b s")
def fft(x):
    return jnp.abs(jnp.fft.rfft(x))


@program(x="b y z")
def fft2(x):
    return jnp.real(jnp.fft.fft2(x))


@program(x="b e _8")
def cholesky(x):
    return jnp.linalg.cholesky(jnp.einsum("bei,bej->bij", x, x) + 4 * jnp.eye(8))


@program(x="b _8 _8", y="b _8")
def solve(x, y):
    return jnp.linalg.solve(x + 8 * jnp.eye(8), y[..., None])[..., 0]


@program(x="b s _4")
def qr(x):
    return jnp.linalg.qr(x)[1]


@program(x="b s _4", grad=False)
def singular_values(x):
    return jnp.linalg.svd(x, compute_uv=False)


@program(x="b s e", grad=True)
def dropout(x):
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, x.shape)
    return jnp.where(keep, x / 0.9, 0)


@program(x="b s e")
def gaussian_noise(x):
    return x * jax.random.normal(jax.random.key(1), x.shape)


@program(x="b e", grad=True)
def random_permutation(x):
    return jax.random.permutation(jax.random.key(2), x)


@program(x="b v", grad=False)
def categorical(x):
    return jax.random.categorical(jax.random.key(3), x)


@program(mu="b e", s="b e")
def reparametrize(mu, s):
    return mu + jnp.exp(s) * jax.random.normal(jax.random.key(4), mu.shape)


# -- optimizers


def _step(opt: Any, w: Any, g: Any) -> Any:
    updates, state = opt.update({"w": g}, opt.init({"w": w}), {"w": w})
    return optax.apply_updates({"w": w}, updates), state


@program(w="e f", g="e f", grad=False)
def adam(w, g):
    return _step(optax.adamw(1e-3), w, g)


@program(w="v f", g="v f", grad=False)
def adafactor(w, g):
    return _step(optax.adafactor(1e-3, min_dim_size_to_factor=8), w, g)


@program(w="e f", g="e f", grad=False)
def lion(w, g):
    return _step(optax.lion(1e-3), w, g)


@program(w="e f", v="f e", grad=False)
def clip_by_global_norm(w, v):
    n = optax.global_norm([w, v])
    return [x * jnp.minimum(1, 1 / n) for x in (w, v)]


@program(x="b e", w="e f", v="f e", grad=False)
def sgd_step(x, w, v):
    grads = jax.grad(lambda p: jnp.square(jnp.tanh(x @ p[0]) @ p[1] - x).mean())([w, v])
    return [p - 0.1 * g for p, g in zip([w, v], grads, strict=True)]


@program(w="e f", m="e f", grad=False)
def ema(w, m):
    return 0.99 * m + 0.01 * w


@program(w="e e2", grad=False)
def muon_orthogonalize(w):
    x = w / (jnp.linalg.norm(w) + 1e-7)
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


# -- vmapped functions


@program(x="b s", i=ids("b", 32))
def vmap_dynamic_slice(x, i):
    return jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (4,)))(x, i)


@program(x="b s", i=ids("b _4", 32))
def vmap_take(x, i):
    return jax.vmap(lambda x, i: x[i])(x, i)


@program(x="b s e", w="e")
def vmap_grad(x, w):
    return jax.vmap(jax.grad(lambda w, x: jnp.square(jnp.tanh(x @ w)).sum()), (None, 0))(w, x)


@program(x="b e", w="e f")
def jacobian_trace(x, w):
    return jax.vmap(lambda x: jnp.trace(jax.jacfwd(lambda x: jnp.tanh(x @ w) @ w.T)(x)))(x)


@program(x="b e", w="e f")
def checkpointed(x, w):
    return jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w.T))(x)


@program(x="b s e", y="b s e")
def dynamic_time_warping(x, y):
    @functools.partial(jax.vmap)
    def dtw(c):
        def row(prev, c):
            def cell(left, args):
                up, diag, c = args
                v = c + jnp.minimum(jnp.minimum(up, diag), left)
                return v, v

            return (out := lax.scan(cell, 1e3, (prev, jnp.roll(prev, 1), c))[1]), out[-1]

        return lax.scan(row, jnp.zeros(32), c)[0][-1]

    return dtw(jnp.square(x[:, :, None] - y[:, None]).sum(-1))
