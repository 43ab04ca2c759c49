"""Low-rank adapters of weights (LoRA) for any function of weights: the matmuls that read a weight are changed in its jaxpr."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.typing import DTypeLike

from ..errors import PatternError, UnsupportedError
from .compat import lazy_nnx as nnx
from .compat.jax import SourceInfo, at_source, bind, interpret, make_jaxpr, source_line, source_of
from .dims import did_you_mean, path_matches
from .eight_bit_weights import dequantize
from .flax import Leaf, flatten_named
from .program.primitives import name_dims_p
from .rules import primitive
from .rules.control_flow import run_bodies

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapter:
    """The low-rank update ``scale * A @ B`` of one weight; a tree of two arrays.

    Attributes:
      lora_A: ``[*batch, *contracted, rank]``.
      lora_B: ``[*batch, rank, *free]``.
      batch: the dims of the weight of which a matmul reads one index: of stacked layers, and of experts.
      contracted: the dims of the weight that its matmul contracts, ascending.
      free: its other dims, ascending.
      scale: ``alpha / rank``.
    """

    lora_A: Any
    lora_B: Any
    batch: tuple[int, ...] = field(metadata=_STATIC)
    contracted: tuple[int, ...] = field(metadata=_STATIC)
    free: tuple[int, ...] = field(metadata=_STATIC)
    scale: float = field(metadata=_STATIC)

    def update(self) -> jax.Array:
        """``scale * A @ B`` with the dims of the weight, in the dtype of A."""
        letter = {d: chr(ord("a") + d) for d in (*self.batch, *self.contracted, *self.free)}
        parts = self.batch, self.contracted, self.free
        batch, contracted, free = ("".join(letter[d] for d in dims) for dims in parts)
        spec = f"{batch}{contracted}Z,{batch}Z{free}->{''.join(sorted(letter.values()))}"
        return self.scale * jnp.einsum(spec, self.lora_A, self.lora_B)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Weight:
    """A view of a weight inside a function; a tree, so that loops slice the adapter with the weight.

    Attributes:
      adapter: with arrays ``[*batch without removed, …]``; None while the uses of the weight are read.
      dims: for each dim of ``value``, the dim of the weight; a scan's slice still has the sliced dim in front.
      removed: the dims of the weight that loops and indexing have removed, in this order.
      coded: the weight is stored in codes of 8 bits or fewer, and the function multiplies them by scales.
      origin: the equation that made a view of codes, its operands, and which of them is the view before; None: an argument.
    """

    value: Any
    adapter: Adapter | None
    path: str = field(metadata=_STATIC)
    dims: tuple[int, ...] = field(metadata=_STATIC)
    removed: tuple[int, ...] = field(metadata=_STATIC)
    coded: bool = field(metadata=_STATIC)
    origin: tuple[JaxprEqn, list[Any], int] | None = field(default=None, metadata=_STATIC)

    def dequantized(self) -> Any:
        """The value, computed from the codes once more."""
        if self.origin is None:
            return self.value
        eqn, xs, i = self.origin
        return bind(eqn, [*xs[:i], xs[i].dequantized(), *xs[i + 1 :]], eqn.params)[0]

    def without(self, dim: int, value: Any, adapter: Adapter | None) -> _Weight:
        """The view without its dim number ``dim``."""
        dims = (*self.dims[:dim], *self.dims[dim + 1 :])
        return replace(self, value=value, adapter=adapter, dims=dims, removed=(*self.removed, self.dims[dim]))


def _entered(x: Any) -> Any:
    """An operand of a body: of a weight that a scan slices, the view without the sliced dim."""
    sliced = isinstance(x, _Weight) and len(x.dims) > jnp.ndim(x.value)
    return x.without(0, x.value, x.adapter) if sliced else x


@dataclass
class _Evaluator:
    """An interpreter of jaxprs that adds ``(x @ A) @ B`` to each matmul of x and a :class:`_Weight`.

    Attributes:
      uses: path of a weight → its dims of which the first matmul takes one index, contracts, and returns.
      others: path of a weight → the first equation that cannot be adapted; None: a result of the function.
    """

    uses: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    others: dict[str, JaxprEqn | None] = field(default_factory=dict)

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr, of whose operands some are weights."""
        stack = source_of(None).name_stack

        def apply(eqn: JaxprEqn, xs: list[Any]) -> list[Any]:
            with at_source(SourceInfo(eqn.source_info.traceback, stack + eqn.source_info.name_stack)):
                return self.step(eqn, xs)

        return interpret(jaxpr, consts, list(map(_entered, xs)), apply, lambda literal: literal.val)

    def step(self, eqn: JaxprEqn, xs: list[Any]) -> list[Any]:
        """The results of an equation."""
        at = [i for i, x in enumerate(xs) if isinstance(x, _Weight)]
        entry, p = primitive(eqn.primitive.name), eqn.params
        if entry.control_flow or entry.family == "checkpoint":
            xs = [replace(x, origin=None) if isinstance(x, _Weight) else x for x in xs]
        if at and entry.family == "checkpoint":
            options = {k: p[k] for k in ("prevent_cse", "policy")}
            return jax.checkpoint(lambda xs: self.run(p["jaxpr"], (), xs), **options)(xs)
        if at and entry.has_bodies:
            return run_bodies(eqn, xs, self.run)
        if len(at) == len(eqn.outvars) == 1:
            result = self.matmul(eqn, xs, at[0]) if entry.family == "dot" else _viewed(eqn, xs, at[0])
            if result is not None:
                return [result]
        for i in at:
            self.others.setdefault(xs[i].path, eqn)
        return bind(eqn, [x.value if isinstance(x, _Weight) else x for x in xs], p)

    def matmul(self, eqn: JaxprEqn, xs: list[Any], i: int) -> Any:
        """The result of a matmul whose operand ``i`` is a weight, plus that of its adapter; None: another use than before."""
        w, x, p = xs[i], xs[1 - i], eqn.params
        contracted, batch = ([list(pair[j]) for j in (i, 1 - i)] for pair in p["dimension_numbers"])
        own, stack = ([w.dims[d] for d in dims[0]] for dims in (contracted, batch))
        free = [d for d in w.dims if d not in (*own, *stack)]
        use = (*w.removed, *stack), tuple(sorted(own)), tuple(sorted(free))
        adapter = w.adapter
        adapted = use if adapter is None else (adapter.batch, adapter.contracted, adapter.free)
        first = self.uses.setdefault(w.path, adapted)
        if use[0] != first[0] or set(use[1:]) != set(first[1:]):
            return None

        def matmul(x: Any) -> Any:
            return bind(eqn, (x, w.dequantized()) if i else (w.dequantized(), x), p)[0]

        # the backward pass dequantizes once more: saved, and gathered, are the codes
        y = (jax.checkpoint(matmul) if w.coded else matmul)(x)
        if adapter is None:
            return y
        rest = adapter.batch[len(w.removed) :]
        a_dims, b_dims = [*rest, *adapter.contracted, "rank"], [*rest, "rank", *adapter.free]
        pair = (adapter.lora_A, a_dims), (adapter.lora_B, b_dims)
        (a, a_dims), (b, b_dims) = pair if use[1] == adapter.contracted else pair[::-1]
        a = lax.transpose(a, [a_dims.index(d) for d in (*stack, *own, "rank")]).astype(w.value.dtype)
        b = lax.transpose(b, [b_dims.index(d) for d in (*stack, "rank", *free)]).astype(w.value.dtype)
        n, options = len(stack), {k: p[k] for k in ("precision", "preferred_element_type")}
        numbers = ((contracted[1], range(n, n + len(own))), (batch[1], range(n)))
        low = lax.dot_general(x, a, numbers, **options)
        low = name_dims_p.bind(low, names=(*(None,) * (low.ndim - 1), "rank"))
        pair = ((low * adapter.scale).astype(b.dtype), low.ndim - 1), (b, n)
        (left, c_left), (right, c_right) = pair if i else pair[::-1]
        z = lax.dot_general(left, right, (([c_left], [c_right]), (range(n), range(n))), **options)
        return y + z.astype(y.dtype)


def _viewed(eqn: JaxprEqn, xs: list[Any], i: int) -> _Weight | None:
    """The view that an equation makes of a weight; None: it makes another array than a view.

    Transposes, casts and names are views, as are one index of a dim, and codes of 8 bits or fewer after element-wise ops.
    """
    w, p, entry = xs[i], eqn.params, primitive(eqn.primitive.name)
    (value,) = bind(eqn, [*xs[:i], w.value, *xs[i + 1 :]], p)
    w = replace(w, origin=(eqn, xs, i) if w.coded else None)
    dequantizes = w.coded and entry.elementwise and value.shape == w.value.shape
    copies = (entry.view and entry.elementwise) or entry.family in ("identity", "cast", "rounding")
    if dequantizes or copies:
        return replace(w, value=value)
    if entry.family == "transpose":
        return replace(w, value=value, dims=tuple(w.dims[d] for d in p["permutation"]))
    if entry.family == "squeeze":
        for dim in sorted(p["dimensions"], reverse=True):
            w = w.without(dim, value, jax.tree.map(lambda x: x[0], w.adapter))
        return w
    if entry.contiguous_slice and i == 0:
        cut = [d for d, (old, new) in enumerate(zip(w.value.shape, value.shape, strict=True)) if old != new]
        if len(cut) == 1 and value.shape[cut[0]] == 1:
            start = p["start_indices"][cut[0]] if entry.family == "slice" else xs[1 + cut[0]]
            sliced = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, 1), w.adapter)
            return replace(w, value=value, adapter=sliced)
    return None


@dataclass(frozen=True)
class Adapted:
    """A function of weights with adapters, ``(adapters, *args) → fn(*args)``; the result of :func:`lora`."""

    fn: Callable[..., Any]
    patterns: tuple[str, ...]
    rank: int
    scale: float
    argnum: int
    dtype: Any

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the function, after ``adapters``: paths of arguments begin with their names."""
        own, first = inspect.signature(self.fn), inspect.Parameter("adapters", inspect.Parameter.POSITIONAL_ONLY)
        return own.replace(parameters=[first, *own.parameters.values()])

    def __call__(self, adapters: Mapping[str, Adapter], *args: Any, **kwargs: Any) -> Any:
        """``fn(*args, **kwargs)`` with ``W + scale * A @ B`` in place of each adapted weight W.

        An nnx module's variables other than parameters are updated in place, as by ``fn``.

        Raises:
          UnsupportedError: an op other than a matmul reads an adapted weight, or it has other dims than in ``init``.
          PatternError: the weights do not have the path of an adapter.
        """
        out, variables = _Traced(self, args, kwargs, adapters).evaluate(_Evaluator(), adapters)
        if jax.tree.leaves(variables):
            nnx.update(args[self.argnum], variables)
        return out

    def init(self, key: jax.Array, *args: Any, **kwargs: Any) -> dict[str, Adapter]:
        """The adapters of a new run: A uniform in ±1/√fan_in, B zero, so that the function's results do not change.

        Args:
          key: a PRNG key.
          *args: the arguments of ``fn``, from whose trace the uses of the weights follow. Nothing is computed with them.
          **kwargs: its keyword arguments.

        Returns:
          Path of a weight → its adapter.

        Raises:
          PatternError: a pattern matches no weight that a matmul reads.
          UnsupportedError: another op reads a matched weight.
        """
        evaluator, traced = _Evaluator(), _Traced(self, args, kwargs, None)
        jax.eval_shape(lambda: traced.evaluate(evaluator, {})[0])
        found = dict(sorted(evaluator.uses.items()))
        for pattern in self.patterns:
            if not any(_matches(pattern, path) for path in found):
                raise _no_weight(f"{pattern!r} matches no weight that a matmul reads", pattern, traced.known)
        out = {}
        for k, (path, (batch, contracted, free)) in zip(jax.random.split(key, len(found)), found.items(), strict=True):
            shape, dtype = jnp.shape(traced.paths[path].value), jnp.result_type(traced.paths[path].value)
            dtype = self.dtype or (jnp.float32 if dtype.itemsize < 2 else dtype)
            sizes = [[shape[d] for d in dims] for dims in (batch, contracted, free)]
            bound = math.prod(sizes[1]) ** -0.5
            a = jax.random.uniform(k, (*sizes[0], *sizes[1], self.rank), dtype, -bound, bound)
            b = jnp.zeros((*sizes[0], self.rank, *sizes[2]), dtype)
            out[path] = Adapter(a, b, batch, contracted, free, self.scale)
        return out

    @staticmethod
    def merge(adapters: Mapping[str, Adapter], params: Any) -> Any:
        """The weights ``W + scale * A @ B``, in the dtypes of W, without adapters.

        Call it in a step (:func:`meshpar.jit`) for sharded weights. Quantized arrays (:class:`meshpar.types.Quantized`) are
        dequantized.

        Args:
          adapters: of ``init``.
          params: a tree of weights, or an nnx module.

        Returns:
          A tree of the same structure; a new module.

        Raises:
          PatternError: the weights do not have the path of an adapter.
          UnsupportedError: a weight is in codes whose scales are not known.
        """
        if nnx.is_graph_node(params):
            graph, state = nnx.split(params)
            return nnx.merge(graph, Adapted.merge(adapters, state))
        params = dequantize(params)
        leaves = {leaf.path: leaf.value for leaf in flatten_named(params)}
        _check_paths(adapters, leaves)
        for path, adapter in adapters.items():
            if leaves[path].dtype.itemsize < 2:
                raise UnsupportedError(f"mp.train.lora: {path} has codes", fixes=["merge dequantized weights"])
            leaves[path] = (leaves[path] + adapter.update()).astype(leaves[path].dtype)
        return jax.tree.unflatten(jax.tree.structure(params), leaves.values())


def _matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a weight, or the module that has it."""
    return path_matches(pattern, path) or path_matches(pattern, path.rpartition("/")[0])


def _no_weight(text: str, name: str, known: Iterable[str]) -> PatternError:
    return PatternError(f"mp.train.lora: {text}", pattern=name, fixes=did_you_mean(name, known, "weights"))


def _check_paths(adapters: Iterable[str], known: Collection[str]) -> None:
    """Raise PatternError if an adapter belongs to no weight."""
    for path in adapters:
        if path not in known:
            raise _no_weight(f"there is an adapter of {path}, and the weights have no such path", path, known)


class _Traced:
    """A function of weights, traced as a function of some of them.

    Attributes:
      paths: path of each of these weights → its leaf.
      known: the paths of all arrays.
      exact: the paths with adapters, or those that a pattern matches, and not only their modules.
    """

    def __init__(self, adapted: Adapted, args: Sequence[Any], kwargs: Any, adapters: Mapping[str, Adapter] | None):
        """Trace ``adapted.fn`` as a function of the weights with ``adapters``; None: of those that the patterns match."""
        at, patterns = adapted.argnum, adapted.patterns
        if not 0 <= at < len(args):
            text = f"mp.train.lora: this call has no argument {at} after the adapters, whose weights are adapted"
            raise UnsupportedError(text, fixes=["argnum= has the position of the weights in the function, from 0"])
        graph, params = nnx.split(args[at]) if nnx.is_graph_node(args[at]) else (None, args[at])
        leaves, structure = flatten_named(params), jax.tree.structure(params)
        arrays: dict[int, Leaf] = {i: x for i, x in enumerate(leaves) if hasattr(x.value, "dtype")}
        self.known = [x.path for x in arrays.values()]
        names = {i: x.path.removesuffix(".codes") for i, x in arrays.items() if not x.path.endswith(".scales")}
        self.exact = {name for name in names.values() if any(path_matches(p, name) for p in patterns)}
        chosen = {i: n for i, n in names.items() if any(_matches(p, n) for p in patterns)}
        if adapters is not None:
            _check_paths(adapters, names.values())
            self.exact, chosen = set(adapters), {i: n for i, n in names.items() if n in adapters}
        self.paths = {name: arrays[i] for i, name in chosen.items()}

        def of_weights(*values: Any) -> tuple[Any, Any]:
            new = {**{i: x.value for i, x in enumerate(leaves)}, **dict(zip(chosen, values, strict=True))}
            model = jax.tree.unflatten(structure, new.values())
            model = model if graph is None else nnx.merge(graph, model)
            out = adapted.fn(*args[:at], model, *args[at + 1 :], **kwargs)
            return out, None if graph is None else nnx.state(model, nnx.Not(nnx.Param))

        self.closed, self.shapes = make_jaxpr(of_weights, *(x.value for x in self.paths.values()), return_shape=True)

    def evaluate(self, evaluator: _Evaluator, adapters: Mapping[str, Adapter]) -> Any:
        """The results with adapters; without an adapter, a weight is as it is, and ``evaluator`` gets its uses.

        Raises:
          UnsupportedError: a weight has another use than in matmuls.
        """
        weights = [
            _Weight(x.value, adapters.get(path), path, tuple(range(jnp.ndim(x.value))), (), x.value.dtype.itemsize < 2)
            for path, x in self.paths.items()
        ]
        outs = evaluator.run(self.closed.jaxpr, self.closed.consts, weights)
        evaluator.others.update((y.path, None) for y in outs if isinstance(y, _Weight))
        for path, eqn in evaluator.others.items():
            if path in self.exact or path in evaluator.uses:
                use = "a result of the function" if eqn is None else f"an operand of {eqn.primitive.name}"
                raise UnsupportedError(
                    f"mp.train.lora: {path} is {use}, and only operands of matmuls, which contract the same dims, are adapted",
                    path=path,
                    shape=self.paths[path].value.shape,
                    source=eqn and source_line(eqn),
                    fixes=["a pattern that does not match it"],
                )
        return jax.tree.unflatten(jax.tree.structure(self.shapes), outs)


def lora(
    fn: Callable[..., Any], patterns: str | Sequence[str], *, rank: int, alpha: float | None = None, argnum: int = 0,
    dtype: DTypeLike | None = None,
) -> Adapted:  # fmt: skip
    """A function with low-rank adapters of some of its weights: ``x @ W + alpha / rank * (x @ A) @ B`` for each ``x @ W``.

    Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, 2021. The function is traced, and the matmuls that read a
    matched weight, also inside of loops, calls and ``jax.checkpoint``, get the second term; ``W + A @ B`` is never computed. The
    model is not edited: Linen, NNX, Equinox and plain JAX alike. Differentiate by the adapters alone, argument 0: then no
    gradient of W is computed or reduced, and an optimizer of the adapters has no moments of W. A and B have W's names of dims and a
    dim ``rank``, so that the rules for W shard them.

    W may be in codes of 8 bits or fewer with scales (:func:`meshpar.layers.quantize`; Dettmers et al., *QLoRA*, 2023): the adapter
    is added to the dequantized weight. For adapters that differ between rows of a batch, use ``jax.vmap`` over rows of stacked
    adapters.

    Args:
      fn: any function of weights: a loss, or logits. Not the complete train step, which differentiates inside.
      patterns: patterns for paths of weights, or of the modules that have them: ``"*/{q,v}_proj"``. Of a module, the weights that
        matmuls read are adapted.
      rank: size of the dim ``rank``.
      alpha: the update is multiplied by ``alpha / rank``. Default: ``rank``.
      argnum: position of the weights among the arguments of ``fn``: a tree, or an nnx module.
      dtype: of A and B. Default: W's; float32 for codes. They are cast to the dtype in which the matmul reads W.

    Returns:
      A function ``(adapters, *args)``; ``.init(key, *args)`` makes the adapters, and ``.merge(adapters, params)`` adds them to
      the weights.

    Raises:
      UnsupportedError: ``rank`` below 1.

    Example:
      >>> adapted = mp.train.lora(loss_of, "up", rank=4)
      >>> adapters = adapted.init(jax.random.key(0), params, x)
      >>> loss, gradients = jax.value_and_grad(adapted)(adapters, params, x)
      >>> gradients["up"].lora_A.shape, gradients["up"].lora_B.shape
      ((64, 4), (4, 256))
    """
    if rank < 1:
        raise UnsupportedError(f"mp.train.lora: rank={rank}, which must be at least 1", fixes=["rank=16"])
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    return Adapted(fn, patterns, rank, (rank if alpha is None else alpha) / rank, argnum, dtype and jnp.dtype(dtype))
