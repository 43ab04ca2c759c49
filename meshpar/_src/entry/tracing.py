"""From a call of a step to its program: the traced function, and the dims of every argument and result."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from ...errors import PatternError, UnknownDimError, UnsupportedError
from ..compat import lazy_nnx as nnx
from ..compat.jax import (
    abstract_array,
    explicit_mesh,
    is_ref,
    needs_explicit_axes,
    traced_as,
    user_line,
    without_dead_code,
)
from ..dims import Dims, PathDims, alternatives, fit_dims, format_dims, near, path_matches
from ..flax import Leaf, capture_names, flatten_named, with_states
from ..iterables import grouped
from ..layout import AnyMesh
from ..program import Program, infer, trace
from ..program.ir import Join, Value
from ..program.names_as_path_patterns import patterns_of
from ..program.names_from_uses import inferred_dims, inferred_dims_of_data
from ..program.primitives import rename_dims_p
from ..program.roles import name_parameters
from .arguments import ArgumentPath, Call, Fixed, check_fixed, is_static, join_leaves, named_arguments, with_statics


@dataclass(eq=False, slots=True)
class TracedStep:
    """The program of a call, which depends on no layout, and the structure of its results.

    Attributes:
      out_tree: structure of the results.
      fixed: position → leaf, of the results that are not arrays; the program computes the others.
      avals: abstract arrays of the program's arguments.
      unchanged: position of a result → position of the argument that it is, for variables of nnx objects that no op changes.
      explicit: the mesh with Explicit axes with which the function was traced; None: it was traced without.
    """

    program: Program
    out_tree: Any
    fixed: dict[int, Any]
    avals: tuple[Any, ...]
    unchanged: Mapping[int, int]
    explicit: AnyMesh | None

    def result(self, outs: Sequence[Any]) -> Any:
        """The results as the function returns them, from the flat results of the program."""
        return jax.tree.unflatten(self.out_tree, join_leaves(outs, self.fixed) if self.fixed else outs)


@dataclass(eq=False)
class FlatFunction:
    """A function of the arrays of a call: it rebuilds the arguments, calls ``fn``, and returns its result with None for leaves
    that are not arrays; with nnx objects, (args, kwargs, result), where the arguments are the updated objects as trees.

    Attributes:
      tag: the nnx context tag of the objects that were split into trees; None: there are no such objects.
      out_tree, fixed: set by a call: structure of the results, and position → leaf of those that are not arrays.
    """

    fn: Callable[..., Any]
    call: Call
    tag: Hashable | None
    out_tree: Any = None
    fixed: dict[int, Any] = field(default_factory=dict)

    def __call__(self, *xs: Any) -> Any:
        """``fn`` of the flat arrays ``xs``; the class describes the result. Sets ``out_tree`` and ``fixed``."""
        args, kwargs = jax.tree.unflatten(self.call.tree, join_leaves(xs, self.call.fixed))
        args, kwargs = with_statics(args, kwargs, self.call.statics)
        if self.tag is not None:
            merged = nnx.from_tree((args, kwargs), ctxtag=self.tag, is_inner=True)
            args, kwargs = with_states(merged)
            out = self.fn(*args, **kwargs)
            updated = jax.tree.map(lambda x: x if nnx.is_graph_node(x) else None, merged, is_leaf=nnx.is_graph_node)
            out = nnx.to_tree((*updated, out), ctxtag=self.tag)
        else:
            out = self.fn(*args, **kwargs)
        leaves, self.out_tree = jax.tree.flatten(out)
        self.fixed = {i: x for i, x in enumerate(leaves) if is_static(x)}
        if not self.fixed:
            return out
        check_fixed(out)
        return jax.tree.unflatten(self.out_tree, [None if i in self.fixed else x for i, x in enumerate(leaves)])


def trace_call(
    call: Call, flat: FlatFunction, argument_path: ArgumentPath, patterns: PathDims, mesh: AnyMesh, init: bool
) -> TracedStep:
    """Trace a call and infer the dims of every value.

    Args:
      call: with its leaves; only their shapes, dtypes and names are read.
      flat: the function of the call's arrays.
      patterns: the ``dims=`` of :func:`meshpar.jit`; with ``init``, they apply to the results as well.
      mesh: of the step: its axes' names, and whether they are Explicit.

    Raises:
      PatternError, RankError: patterns that match no array, or arrays of another rank.
      UnsupportedError: a leaf that is not an array, a mutable array, or a collective over a mesh axis.
    """
    named = named_arguments(*call.dynamic, argument_path)
    carried = rename_leaves(named, patterns)
    for leaf in named:
        if is_ref(leaf.value):
            raise UnsupportedError(
                f"{leaf.path}: a mutable array (jax.Ref) cannot be an argument of a sharded step",
                path=leaf.path,
                fixes=["pass its value, ref[...], return the new one, and write that: ref[...] = step(ref[...])"],
            )
    arrays = [
        (_abstract(*cast(tuple, key)), leaf)
        for leaf, key in zip(named, call.leaf_keys, strict=True)
        if not isinstance(key, Fixed)
    ]
    named = [leaf for _, leaf in arrays]
    used: set[str] = set()
    annotations = annotations_of(named, patterns, used)

    if call.fixed:
        check_fixed(call.dynamic, argument_path)
    traced_as(flat, flat.fn, [leaf.path for leaf in named])
    with _explained_errors(named):
        closed, written, shapes, explicit, constrained = _trace_on(mesh, flat, [x for x, _ in arrays], patterns)
    if any(map(is_ref, closed.consts)):
        raise UnsupportedError(
            f"{getattr(flat.fn, '__name__', 'the step')} closes over a mutable array (jax.Ref): a sharded step cannot use it",
            fixes=[
                "pass its value as an argument, and return the new one",
                "or make it inside of the step: jax.new_ref(x)",
            ],
        )
    results, unchanged = _results_of(flat, closed, shapes, argument_path)
    carried |= rename_leaves(results, patterns) | constrained
    if (unknown := patterns.names.keys() - carried) and not init:
        name, known = min(unknown), ", ".join(sorted(carried))
        fix = f"the names that it has: {known}" if known else "it has no names: give some, dims=…"
        text = f"names={{{name!r}: …}}: no metadata and no constraint of the model has this name"
        raise UnknownDimError(text, dim=name, fixes=[fix])
    hidden = next((path[0] for path in map(argument_path, range(len(call.dynamic[0]))) if len(path) > 1), None)
    # a renamed result has its new names, not the names of the input of equal path
    renamed = {id(eqn.outvars[0]) for eqn in closed.jaxpr.eqns if eqn.primitive is rename_dims_p and not init}

    def named_by(patterns: PathDims, annotations: list[Dims | None], used: set[str], live_only: bool) -> Program:
        out_annotations = _result_dims(results, named, annotations, patterns if init else None, used)
        outputs = zip(out_annotations, closed.jaxpr.outvars, strict=True)
        out_annotations = [None if id(var) in renamed else dims for dims, var in outputs]
        _check_patterns(patterns, used, [*named, *(results if init else ())], init, hidden)
        program = _infer_live(closed, annotations, named, out_annotations, results, live_only)
        for value, leaf in zip(program.inputs, named, strict=True):
            value.kind = leaf.kind
        for value, leaf in zip(program.outputs, results, strict=True):
            value.kind = value.kind or leaf.kind
        program.metadata_names = metadata_names([*named, *results], patterns)
        name_parameters(program)
        return program

    given = any(name for dims in annotations for name in dims or ())
    unnamed = not init and (patterns.auto or (patterns.auto is None and not given))
    program = named_by(patterns, annotations, used, live_only=unnamed)
    if unnamed:  # names of constraints and of mp.named stay
        program.inferred = inferred_dims(program)
    elif not init and patterns.auto is None:
        program.inferred = inferred_dims_of_data(program)
    if program.inferred:
        joins, inferred, patterns = program.joins, program.inferred, patterns.then(patterns_of(program))
        annotations, used = annotations_of(named, patterns, used), {p for p, _ in patterns.items}
        program = named_by(patterns, annotations, used, live_only=False)
        program.inferred, program.joins = inferred, joins  # two guesses for one dim are no mistake of the user
    program.joins = [_with_parameters(join, program, patterns) for join in program.joins]
    program.written = written
    return TracedStep(program, flat.out_tree, flat.fixed, tuple(closed.in_avals), unchanged, explicit)


def _results_of(
    flat: FlatFunction, closed: ClosedJaxpr, shapes: Any, argument_path: ArgumentPath
) -> tuple[list[Leaf], dict[int, int]]:
    """The leaves of the results of a traced function, ``shapes``, and :attr:`TracedStep.unchanged`."""
    if flat.tag is None:
        return flatten_named(shapes), {}
    args, kwargs, out = shapes
    updated = named_arguments(args, kwargs, argument_path)  # objects of nnx, which have the paths of the arguments
    positions = {id(var): i for i, var in enumerate(closed.jaxpr.invars)}
    new = enumerate(map(id, closed.jaxpr.outvars[: len(updated)]))
    return [*updated, *flatten_named(out)], {o: positions[var] for o, var in new if var in positions}


def _trace_on(
    mesh: AnyMesh, flat: FlatFunction, arrays: Sequence[Any], patterns: PathDims
) -> tuple[Any, Any, Any, AnyMesh | None, set[str]]:
    """The results of :func:`program.trace`, the mesh with Explicit axes with which the function was traced, or None, and the
    names in its constraints.

    On a mesh with Explicit axes it is traced with these. On another mesh it is traced with them if it uses what JAX has for
    Explicit axes only: ``reshard``, ``out_sharding=``.
    """
    explicit = explicit_mesh(mesh)
    if explicit is not mesh:
        try:
            with capture_names(mesh.axis_names, patterns=patterns) as seen:
                return *trace(flat, arrays, mesh), None, seen
        except ValueError as e:
            if not needs_explicit_axes(e):
                raise
    with capture_names(mesh.axis_names, explicit, patterns) as seen:
        return *trace(flat, arrays, mesh), explicit, seen


def _infer_live(
    closed: ClosedJaxpr,
    annotations: Sequence[Any],
    named: Sequence[Leaf],
    out_annotations: Sequence[Any],
    results: Sequence[Leaf],
    live_only: bool,
) -> Program:
    """The program without equations whose results are not read, with the dims of every value.

    A dim of a result that has no name then takes its name from the complete program: the forward pass, for a gradient that does not
    depend on it; not with ``live_only``, where no name can be found.
    """
    paths = [leaf.path for leaf in named], [leaf.path for leaf in results]
    live = without_dead_code(closed)
    program = infer(live, annotations, paths[0], out_annotations, paths[1])
    if live is closed or live_only or all(None not in program.dims(v) for v in program.outputs):
        return program
    complete = infer(closed, annotations, paths[0], out_annotations, paths[1])
    names = [tuple(d if d and d.isidentifier() else None for d in complete.dims(v)) for v in complete.outputs]
    if all(program.dims(v) == dims for v, dims in zip(program.outputs, names, strict=True)):
        return program
    merged = [a or (dims if any(dims) else None) for a, dims in zip(out_annotations, names, strict=True)]
    program = infer(live, annotations, paths[0], merged, paths[1])
    for value, own, dims in zip(program.outputs, out_annotations, merged, strict=True):
        if own is None and value.annotation == dims and value not in program.inputs:
            value.annotation = None  # inferred: its size need not divide
    return program


def _with_parameters(join: Join, program: Program, patterns: PathDims) -> Join:
    """The join with the pattern and the parameter that give each name, in place of the first array that has it.

    Inference reports the first array in the order of the arguments, which often is optimizer state. The array of the joined class
    whose path ends as the path of that one is reported instead, if it is no optimizer state.
    """
    names = {join.first, join.second}

    def origin(name: str, before: str) -> tuple[str, str]:
        """(the text of the origin, what identifies it in every program of a model: its pattern, or the end of its path)."""
        values = [v for v in (*program.inputs, *program.outputs) if v.annotation and name in v.annotation and v.path]
        reported = before.partition(" names it ")[0].split("/")[::-1]

        def preference(v: Value) -> tuple[bool, bool, int, int]:
            """Smaller for the array to report: one of the joined class, no optimizer state, with the longest common end of the
            path."""
            is_joined = names <= program.unifier.names_now(v.nodes[(v.annotation or ()).index(name)])
            kind = ("params", None, "opt").index(v.kind)
            return not is_joined, v.kind == "opt", -_common_end(reported, v.path or ""), kind

        if not values or " at " in before.partition(" names it ")[0]:  # a line of the model, not a path
            return before, before
        path = min(values, key=preference).path or ""
        match = patterns.match(path)
        if match is None or match[0] == path:
            return f"{path} names it `{name}`", "/".join(path.split("/")[-2:])
        return f'"{match[0]}": "{format_dims(match[1])}" names it `{name}` in {path}', match[0]

    texts, keys = zip(origin(join.first, join.first_origin), origin(join.second, join.second_origin), strict=True)
    return replace(join, first_origin=texts[0], second_origin=texts[1], keys=keys)


def _abstract(shape: tuple[int, ...], dtype: Any, weak_type: bool, host: bool) -> Any:
    """The abstract array that a leaf is traced as; it has no sharding."""
    return abstract_array(shape, jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True), weak_type, host)


@contextlib.contextmanager
def _explained_errors(named: Sequence[Leaf]) -> Iterator[None]:
    """Replace errors of JAX and Python while a step is traced by an UnsupportedError that says what to do: a collective over an
    unbound axis name, a number in an argument whose value is needed, a list of numbers in place of an array, a kernel of cuDNN.

    Args:
      named: the leaves of the arguments.
    """
    try:
        yield
    except NameError as e:
        if "unbound axis name" not in str(e):
            raise
        axis = str(e).partition("unbound axis name:")[2].split(".")[0].split()[0]
        raise UnsupportedError(
            f"`{axis}` is not an axis inside a step: a step is written for global arrays, and a mean over the batch is already the "
            "mean over all devices",
            axis=axis,
            source=user_line(e),
            fixes=["delete the pmean, psum, axis_index, …: the collectives follow from the layout"],
        ) from e
    except RuntimeError as e:
        if "cuDNN is not detected" not in str(e):
            raise
        raise UnsupportedError(
            "JAX traces cuDNN's attention only on a machine that has cuDNN",
            source=user_line(e),
            fixes=["mp.layers.attention(q, k, v, causal=True): it is planned everywhere, and calls cuDNN on GPUs"],
        ) from e
    except TypeError as e:
        needed = re.search(r"depends on the values? of the arguments? ([^\n]*)", str(e))
        paths = re.split(r"[\s,]+", needed[1].rstrip(". ")) if needed else []
        for leaf in named:
            if leaf.path in paths and np.ndim(leaf.value) == 0:
                raise _needs_value(leaf, e) from e
        if "list" in str(e) and (lists := _number_lists(named)):
            raise UnsupportedError(
                f"{lists[0]}: a list of numbers is a tree with an array for each number, not an array",
                path=lists[0],
                source=user_line(e),
                fixes=["pass np.asarray(…) of it"],
            ) from e
        raise


def _needs_value(leaf: Leaf, error: TypeError) -> UnsupportedError:
    """The error for a number in an argument whose value the step needs while it is traced, such as a flag in an Equinox module."""
    name, _, rest = leaf.path.partition("/")
    fixes = [f"make `{name}` static: static_argnames={name!r}"]
    if rest:
        fixes = [
            f"in an Equinox module: arrays, static = eqx.partition({name}, eqx.is_array); pass arrays, and inside of the "
            f"step {name} = eqx.combine(arrays, static)",
            f"or make the field static: {rest.rpartition('/')[2]}: … = eqx.field(static=True)",
        ]
    return UnsupportedError(
        f"{leaf.path}: this {type(leaf.value).__name__} is an argument, so that it is traced and has no value that Python can test",
        path=leaf.path,
        source=user_line(error),
        fixes=[*fixes, "or select by it in the program: jnp.where, jax.lax.cond"],
    )


def _number_lists(leaves: Sequence[Leaf]) -> list[str]:
    """The paths of lists and tuples of Python numbers among the arguments."""
    numbers = (leaf.path for leaf in leaves if isinstance(leaf.value, bool | int | float | complex))
    return list(dict.fromkeys(re.sub(r"(/\d+)+\Z", "", path) for path in numbers if re.search(r"/\d+\Z", path)))


# -- the dims of arguments and results


def rename_leaves(leaves: Iterable[Leaf], patterns: PathDims) -> set[str]:
    """Give the names of the leaves' metadata the names that ``patterns`` has for them; returns the names that there were."""
    found: set[str] = set()
    for leaf in leaves:
        if leaf.dims is not None:
            found.update(filter(None, leaf.dims))
            leaf.dims = patterns.own(leaf.dims)
    return found


def metadata_names(leaves: Iterable[Leaf], patterns: PathDims) -> frozenset[str]:
    """The names of dims that the leaves have from Flax metadata, which no pattern replaces."""
    own = (leaf.dims for leaf in leaves if leaf.dims and patterns.match(leaf.path) is None)
    return frozenset(name for dims in own for name in dims if isinstance(name, str))


def named_tree(tree: Any, patterns: PathDims) -> list[tuple[Leaf, Dims | None]]:
    """(leaf, dims) of a tree. The dims are from a pattern, from Flax metadata or, for optimizer state, of its parameter.

    Raises:
      PatternError, RankError: a pattern that matches no leaf, or one of another rank.
    """
    leaves = flatten_named(tree)
    rename_leaves(leaves, patterns)
    used: set[str] = set()
    dims = state_dims(leaves, patterns, used)
    _check_patterns(patterns, used, leaves)
    return list(zip(leaves, dims, strict=True))


def state_dims(leaves: list[Leaf], patterns: PathDims, used: set[str]) -> list[Dims | None]:
    """:func:`annotations_of` the leaves of a state, in which optimizer state has the dims of its parameters."""
    dims = annotations_of(leaves, patterns, used)
    _name_optimizer_state(leaves, dims)
    return dims


def _result_dims(
    results: list[Leaf], inputs: list[Leaf], input_dims: list[Dims | None], patterns: PathDims | None, used: set[str]
) -> list[Dims | None]:
    """The dims of the results: of a pattern or their metadata, else of the input with the same path. It sets their ``kind`` too.

    A result with the metadata of that input has the dims of the input, which may be a pattern's.

    Args:
      patterns: for the results of :func:`meshpar.init`, whose optimizer state has the dims of its parameters.
      used: the patterns that match are added to it.
    """
    input_of = _input_finder(inputs, input_dims)
    out: list[Dims | None] = []
    for leaf, dims in zip(results, annotations_of(results, patterns, used), strict=True):
        match = input_of(leaf)
        if match is not None:
            if patterns is None and leaf.dims == match[0].dims:
                dims = None  # metadata of the argument, which a pattern may replace
            dims = dims or match[1]
            leaf.kind = leaf.kind or match[0].kind
        out.append(dims)
    if patterns is not None:
        _name_optimizer_state(results, out)
    return out


def _input_finder(inputs: list[Leaf], dims: list[Dims | None]) -> Callable[[Leaf], tuple[Leaf, Dims | None] | None]:
    """A function from a result to (input, its dims) of the same shape whose path is equal up to the first component: for
    ``0/params/w`` of a returned state, ``state/params/w`` of the argument. None: no input matches, or several."""
    exact = {leaf.path: (leaf, names) for leaf, names in zip(inputs, dims, strict=True)}
    tails = grouped((path.partition("/")[2], path) for path in exact)

    def find(result: Leaf) -> tuple[Leaf, Dims | None] | None:
        """(input, its dims) for a result, or None."""
        match = exact.get(result.path)
        for tail in (result.path, result.path.partition("/")[2]):
            if match is None and tail and len(tails.get(tail, ())) == 1:
                match = exact[tails[tail][0]]
        return match if match is not None and np.shape(match[0].value) == np.shape(result.value) else None

    return find


def annotations_of(leaves: list[Leaf], patterns: PathDims | None, used: set[str]) -> list[Dims | None]:
    """The dims of each leaf: of the first pattern that matches, else of its metadata; None without either.

    Optimizer state in the Flax box of its parameter, or with its pattern, has the dims of the parameter that its sizes identify,
    else None: the factored moments of Adafactor and SM3, PowerSGD's factor [columns, rank] of a matrix [rows, columns].

    Args:
      patterns: None: metadata only.
      used: the patterns that match are added to it.

    Raises:
      RankError: a pattern names more or fewer dims than an array has.
    """
    out = [leaf.dims for leaf in leaves]
    states = [k for k, leaf in enumerate(leaves) if leaf.kind == "opt"]
    for k, leaf in enumerate(leaves):
        if leaf.kind != "opt" and patterns is not None:
            out[k] = annotation_of(leaf, patterns, used, leaves)
    parameter_of = _parameter_finder((leaf, dims) for leaf, dims in zip(leaves, out, strict=True) if leaf.kind != "opt")
    for k in states:  # after the parameters: an error is about these
        leaf, match = leaves[k], patterns and patterns.match(leaves[k].path)
        names, shape = match[1] if match else leaf.dims, np.shape(leaf.value)
        param, dims = (parameter_of(leaf) if names else None) or (None, ())
        sized = tuple(None if n == 1 else d for d, n in zip(dims, shape, strict=False))
        if param is not None and names in (dims, sized):
            used.update(match[:1] if match else ())
            out[k] = _dims_like(shape, np.shape(param.value), dims, leaf.path)
        elif patterns is not None:
            out[k] = annotation_of(leaf, patterns, used, leaves)
    return out


def _name_optimizer_state(leaves: list[Leaf], annotations: list[Dims | None]) -> None:
    """Set the missing annotations of optimizer state to the dims of its parameter.

    A moment has the parameter's shape; factored ones (Adafactor, SM3) have some of its dims, where the sizes identify them.
    """
    pairs = zip(leaves, annotations, strict=True)
    parameter_of = _parameter_finder((leaf, dims) for leaf, dims in pairs if leaf.kind == "params")
    for k, leaf in enumerate(leaves):
        if leaf.kind == "opt" and annotations[k] is None and (match := parameter_of(leaf)) is not None:
            annotations[k] = _dims_like(leaf.value.shape, match[0].value.shape, match[1], leaf.path)


def _parameter_finder(pairs: Iterable[tuple[Leaf, Dims | None]]) -> Callable[[Leaf], tuple[Leaf, Dims] | None]:
    """A function from an array of optimizer state to (its parameter, the parameter's dims): of ``pairs``, the one with dims and the
    longest common end of the path. None: none has the array's last path component."""
    by_end = grouped((leaf.path.rsplit("/", 1)[-1], (leaf, dims)) for leaf, dims in pairs if dims)

    def find(state: Leaf) -> tuple[Leaf, Dims] | None:
        end = state.path.split("/")[::-1]
        if end[0] not in by_end and end[0].isdigit():  # SM3 has `kernel/0` and `kernel/1` for `kernel`
            end = end[1:]
        return max(by_end.get(end[0], ()), key=lambda match: _common_end(end, match[0].path), default=None)

    return find


def _common_end(end: Sequence[str], path: str) -> int:
    """The number of last components that a path shares with another one; ``end``: its components, the last one first."""
    pairs = zip(end, path.split("/")[::-1], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _dims_like(shape: Sequence[int], param_shape: Sequence[int], dims: Dims, path: str = "") -> Dims | None:
    """The dims of an array whose dims are a subset of a parameter's; None if the sizes fit several subsets or none.

    Of optax's Adafactor, ``v_row`` lacks the largest dim, and ``v_col`` the second largest: this decides for square parameters.

    Args:
      path: of the array.
    """
    if len(shape) == len(param_shape) and all(n in (1, m) for n, m in zip(shape, param_shape, strict=True)):
        return tuple(None if n == 1 else d for n, d in zip(shape, dims, strict=True))
    subsets = {
        picks
        for picks in itertools.combinations(range(len(param_shape)), len(shape))
        if tuple(param_shape[i] for i in picks) == tuple(shape)
    }
    factored = _ADAFACTOR_DROPS.keys() & set(path.split("/"))
    if len(subsets) > 1 and len(factored) == 1 and len(shape) == len(param_shape) - 1:
        dropped = int(np.argsort(param_shape)[_ADAFACTOR_DROPS[factored.pop()]])
        subsets &= {tuple(i for i in range(len(param_shape)) if i != dropped)}
    if len(subsets) == 1 and shape:
        return tuple(dims[i] for i in subsets.pop())
    return None


_ADAFACTOR_DROPS = {"v_row": -1, "v_col": -2}
"""Factored moment of ``optax.scale_by_factored_rms`` → the dim that it lacks, as an index into the parameter's dims by size."""


def annotation_of(leaf: Leaf, patterns: PathDims, used: set[str], leaves: Sequence[Leaf] = ()) -> Dims | None:
    """The dims that the first matching pattern gives a leaf, else the dims of its metadata.

    Args:
      used: the pattern is added to it.
      leaves: all leaves; an error suggests a pattern that matches only leaves of the right rank.

    Raises:
      RankError: the pattern names more or fewer dims than the leaf has.
    """
    match = patterns.match(leaf.path)
    if match is None:
        return leaf.dims
    pattern, dims = match
    used.add(pattern)
    shape, fixes = np.shape(leaf.value), []
    if len(shape) != len(dims) and (narrower := _narrower(pattern, dims, leaves)) is not None:
        fixes.append(f'match only arrays with {len(dims)} dims: {{"{narrower}": "{format_dims(dims)}"}}')
    fitted = fit_dims(dims, shape, path=leaf.path, origin=f"the pattern {pattern!r}", fixes=fixes)
    if leaf.path.endswith(".scales"):  # of a quantized array: size 1 where elements have a common scale
        return tuple(None if n == 1 else d for n, d in zip(shape, fitted, strict=True))
    return fitted


def _narrower(pattern: str, dims: Sequence[Any], leaves: Sequence[Leaf]) -> str | None:
    """A pattern that matches some of the leaves that ``pattern`` matches, all of the right rank: ``*params/down`` for ``*/down``,
    which also matches the factored moments of Adafactor. The first with the most matches; None: there is no such pattern."""
    if not pattern.startswith("*") or ... in dims:
        return None
    matching = (leaf for leaf in leaves if path_matches(pattern, leaf.path))
    fits = {leaf.path: np.ndim(leaf.value) == len(dims) for leaf in matching}
    segments = dict.fromkeys(segment for path, good in fits.items() if good for segment in path.split("/")[:-1])
    candidates = [f"*{segment}{between}{pattern[1:]}" for between in ("", "*") for segment in segments]
    matched = {p: [good for path, good in fits.items() if path_matches(p, path)] for p in candidates}
    return max((p for p, ok in matched.items() if ok and all(ok)), key=lambda p: len(matched[p]), default=None)


def _similar_pattern(pattern: str, paths: Sequence[str], unnamed: Sequence[str]) -> list[str]:
    """The fix for a pattern that matches no path: with ``*/`` in front, with one component spelled otherwise, or spelled as
    a similar path; else empty.

    Args:
      unnamed: the paths that no pattern matches, which a similar pattern is for, if there are any.
    """
    if (glob := pattern.replace(".*", "*")) != pattern and any(path_matches(glob, path) for path in paths):
        return [f"patterns are not regular expressions: did you mean {glob!r}?"]
    if any(path_matches(f"*/{pattern}", path) for path in paths):
        return [f"did you mean {f'*/{pattern}'!r}?"]
    components, parts = {part for path in paths for part in path.split("/")}, pattern.split("/")
    respelled = (
        "/".join([*parts[:i], other, *parts[i + 1 :]])
        for i, part in enumerate(parts)
        if not set(part) & set("*?[]{}")
        for other in near(part, components)
    )
    fits = [text for text in respelled if any(path_matches(text, path) for path in paths)]
    ends = {"/".join(path.split("/")[-n:]) for path in unnamed or paths for n in (1, 2)} if "*" in pattern else ()
    general = [re.sub(r"(?<=/)\d+(?=/)", "*", path) for path in paths] if "*" in pattern else paths
    similar = fits[:3] or near(pattern, [*general, *(f"*/{end}" for end in ends)])
    return [f"did you mean {' or '.join(map(repr, similar))}?"] if similar else []


def _check_patterns(
    patterns: PathDims, used: set[str], leaves: Sequence[Leaf], init: bool = False, hidden: str | None = None
) -> None:
    """Check that every pattern is used.

    Args:
      leaves: all leaves that patterns may match; errors list the paths of optimizer state last.
      hidden: ``"args"`` if the function takes ``*args``, so that its arguments have no names; else None.

    Raises:
      PatternError: one matches no path, or only paths that an earlier pattern matches, or no path by a text of ``{up,down}``. Of an
        initializer, a pattern may match no path if another one matches and no path is similar.
    """
    paths = list(dict.fromkeys(leaf.path for leaf in sorted(leaves, key=lambda leaf: leaf.kind == "opt")))
    arrays = (leaf.path for leaf in leaves if leaf.kind != "opt" and np.ndim(leaf.value))
    unnamed = [path for path in arrays if not patterns.match(path)]
    for pattern, _ in patterns.items:
        if pattern in used:
            for text, alone in alternatives(pattern):
                if pattern not in paths and not any(path_matches(alone, p) for p in paths):
                    raise PatternError(
                        f"the dims= pattern {pattern!r} matches no tensor by its {text!r}",
                        pattern=pattern,
                        fixes=[*_similar_pattern(alone, paths, unnamed), f"leave {text!r} out"],
                    )
            continue
        shadowed = next((p for p in paths if path_matches(pattern, p)), None)
        if shadowed is not None:
            earlier = patterns.match(shadowed)
            assert earlier is not None
            raise PatternError(
                f"the dims= pattern {pattern!r} is never used: {earlier[0]!r} comes first and matches the same tensors",
                path=shadowed,
                fixes=["the first pattern that matches wins: put the narrower one first"],
            )
        fixes = _similar_pattern(pattern, paths, unnamed)
        if init and used and not fixes:
            continue  # of the batch: a step and its initializer may share one mapping
        of_state = {leaf.path for leaf in leaves if leaf.kind == "opt"}
        unlike = {p: -difflib.SequenceMatcher(None, pattern, p).ratio() for p in paths}
        listed = sorted(paths, key=lambda p: (p in of_state, p not in unnamed, unlike[p]))
        shown = list(dict.fromkeys(re.sub(r"(?<=[/_])\d+(?=/)", "*", p) for p in listed))  # one for all layers
        first, starts = pattern.partition("/")[0], sorted({path.partition("/")[0] for path in paths})
        lists = (path for path in _number_lists(leaves) if path_matches(pattern, path))
        fixes += [f"{path} is a list of numbers: pass np.asarray({path})" for path in lists]
        if hidden in starts:
            fixes += [
                f"the function takes `*{hidden}`, as wrappers and Linen's `apply` do: "
                f'name the first of these arguments by dims={{"{hidden}/0": …}}',
                "or, of checkify, wrap the result of mp.jit in place of the function: checkify.checkify(mp.jit(step, …))",
            ]
        if init:
            fixes.append("mp.init names the arguments and results of the initializer: leave out patterns for the batch")
        if not set(first) & set("*?[{") and first not in starts:
            fixes.append(f"paths begin with {', '.join(starts)}")
        fixes.append(f"paths are: {', '.join(shown[:8])}{', …' if len(shown) > 8 else ''}")
        headline = f"the dims= pattern {pattern!r} matches no tensor; a pattern matches a complete path"
        raise PatternError(headline, pattern=pattern, fixes=fixes)
