"""A program: values and ops at every call site, the names of their dims, and the places of ops in the user's code, for reports.

A program also caches results that are computed from it (:meth:`Program.cached`), and lists the names that inference joined.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ..compat.jax import bound_axis_names, has_user_line, module_of, on_host, package_line, pass_of, source_line
from ..compat.loop_operands import operands_of_bodies
from ..dims import SPELLING_SIMILARITY, Dims, near
from ..lru_cache import LRUCache
from ..rules import primitive
from ..rules.rule import OpRule
from .names import Nodes, SubDim, Unifier

T = TypeVar("T")

MAX_CACHED_KEYS = 128
"""Results that a program caches of each function with a key."""


@dataclass(eq=False, slots=True, weakref_slot=True, repr=False)
class Value:
    """A value (argument, constant, or result of an equation) of a program, at one call site.

    A function that is called twice has two Values for each variable of its jaxpr.

    Attributes:
      aval: shape and dtype.
      shape: of the aval.
      nodes: a node of the unifier for every dim (-1 where the size is 1).
      annotation: names that the user gave to this value; None: none.
      explicit: a spec that the user gave it (``with_sharding_constraint`` over axes); None: none.
      path: the tree path of an input or output.
      kind: ``params`` or ``opt`` for such inputs and outputs; else None.
      elements: number of elements.
      op: the op that computes it; None for inputs.
      on_host: it is in host memory.
    """

    aval: Any
    nodes: Nodes
    annotation: Dims | None = None
    op: Op | None = None
    explicit: tuple[tuple[str, ...], ...] | None = None
    path: str | None = None
    kind: str | None = None
    shape: tuple[int, ...] = field(init=False)
    elements: int = field(init=False)
    on_host: bool = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.aval.shape
        self.elements = math.prod(self.shape)
        self.on_host = on_host(self.aval)

    def __repr__(self) -> str:
        return f"Value({self.path or ''}{list(self.aval.shape)})"


class Op:
    """An equation of a program, at one call site: a function that is called twice has two Ops for each equation of its
    jaxpr.

    Attributes:
      eqn: the jaxpr equation; name: of its primitive; primitive: the registry's entry, with its traits.
      ins: its operands (None for literals).
      outs: its results; a call whose body returns an operand has this operand as a result (see :attr:`makes`).
      rule: its factor rule, one object for all ops with equal equations; None for elementwise ops (factor i is dim i) and for
        control flow.
      frames: its bodies, for control flow.
      frame: the frame that has the op.
    """

    __slots__ = ("__weakref__", "eqn", "frame", "frames", "ins", "name", "outs", "primitive", "rule")

    def __init__(self, eqn: Any, frame: Frame, ins: list[Value | None]):
        """An op of ``frame`` without results, rule or bodies, which the inference adds; ``ins``: its operands, None for
        literals."""
        self.eqn, self.frame, self.ins = eqn, frame, ins
        self.name: str = eqn.primitive.name
        self.primitive = primitive(self.name)
        self.outs: list[Value] = []
        self.rule: OpRule | None = None
        self.frames: list[Frame] = []

    @property
    def label(self) -> str:
        """The name of the op in reports: the name of its kernel or primitive."""
        return self.eqn.params["kernel"].name if self.primitive.family == "kernel" else self.name

    @property
    def factor_rule(self) -> OpRule:
        """The rule of an op that has one."""
        assert self.rule is not None, f"{self.name} has no factor rule"
        return self.rule

    @property
    def recomputes(self) -> bool:
        """Whether the op is a call that recomputes part of the forward pass behind a barrier."""
        p = self.eqn.params
        if self.primitive.family != "checkpoint" or not p["differentiated"]:
            return False
        guarded = p["prevent_cse"]
        return any(guarded) if isinstance(guarded, tuple) else bool(guarded)

    @property
    def derivative_pass(self) -> str | None:
        """``"forward"`` or ``"backward"``: the pass of the op, or of a loop or call around it; None: nothing is differentiated."""
        own, parent = pass_of(self.eqn), self.frame.parent
        return own if own == "backward" or parent is None else parent.derivative_pass or own

    @property
    def makes(self) -> list[Value]:
        """The values that the op computes, also inside its bodies; without operands that a call returns unchanged."""
        if not self.frames:
            return self.outs
        inner = (made for frame in self.frames for op in frame.walk() for made in op.outs if made.op is op)
        return [*(v for v in self.outs if v.op is self), *inner]

    @property
    def source(self) -> str:
        """The user's line, ``file.py:12 (function)``, of the op or of the innermost call around it that has one.

        Without one, the line of a package, or "".
        """
        eqn, calls = self._where()
        return source_line(eqn, libraries=False) or next(filter(None, map(source_line, calls)), "")

    @property
    def module(self) -> str:
        """The path of the Flax modules and named scopes that the op is in, ``ViT/encoder/layer_0/attention``. Without any, as in
        Flax NNX, the path of a weight that a matmul reads, ``blocks/0/up`` of ``model/blocks/0/up/kernel``; "" without either."""
        parent = self.frame.parent
        scopes = "/".join(filter(None, ("" if parent is None else parent.module, module_of(self.eqn))))
        if scopes or not self.primitive.matmul:
            return scopes
        return next(filter(None, (module_of_argument(v, self.frame) for v in self.ins if v is not None)), "")

    @property
    def package_line(self) -> str:
        """The line of an installed package that made the op, for a model that is not the user's own; else ""."""
        return next(filter(None, map(package_line, self._where()[1])), "")

    @property
    def location(self) -> str:
        """Where the op is, for reports: the path of the modules and the user's line, ``Block/mlp/up (llama.py:324)``.

        Without modules, the user's line and the line in the model's package: ``train.py:12 (loss), in package.py:7 (up)``.
        """
        return self._location(self.module)

    @property
    def location_of_layers(self) -> str:
        """:attr:`location` with ``*`` for the numbers in the path of modules: it is the same for all layers of a model.

        ``GPT2/h/3/mlp`` becomes ``GPT2/h/*/mlp``: a number after a letter of the first part belongs to the name of the model.
        """
        first, slash, others = self.module.partition("/")
        return self._location(re.sub(r"(?<![A-Za-z])\d+", "*", first) + slash + re.sub(r"\d+", "*", others))

    def _location(self, module: str) -> str:
        source, part = self.source, self.package_line
        if module:
            return f"{module} ({source.rpartition(' (')[0]})" if source else module
        return source if source.endswith(part) else ", in ".join(filter(None, (source, part)))

    @property
    def where(self) -> Any:
        """The equation with the user's line: of the op, or of the innermost call around it that has one."""
        return self._where()[0]

    def _where(self) -> tuple[Any, list[Any]]:
        """(equation with the user's line, equations of the op and the calls around it up to that one)."""
        calls: list[Any] = []
        op: Op | None = self
        while op is not None:
            calls.append(op.eqn)
            if has_user_line(op.eqn):
                return op.eqn, calls
            op = op.frame.parent
        return self.eqn, calls


@dataclass(eq=False, slots=True)
class Frame:
    """One (sub-)jaxpr at one call site: the ops in order and the value of every variable.

    Attributes:
      parent: the loop, branch or call that has this body; None: the program.
      trip_count: runs of the body each time ``parent`` runs; None: not known.
      env: variable of the jaxpr → value.
    """

    jaxpr: Jaxpr
    parent: Op | None = None
    trip_count: int | None = 1
    env: dict[Any, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def ins(self) -> list[Value]:
        """The values of the jaxpr's arguments."""
        return [self.env[v] for v in self.jaxpr.invars]

    def outs(self) -> list[Value | None]:
        """The values of the jaxpr's results; None for literals."""
        return [None if isinstance(v, Literal) else self.env[v] for v in self.jaxpr.outvars]

    @property
    def is_call(self) -> bool:
        """Whether it is the body of a call (``jit``, ``checkpoint``, …), which JAX inlines into the frame of the call."""
        return self.parent is not None and not self.parent.primitive.control_flow

    @property
    def home(self) -> Frame:
        """The frame that this one is inlined in, through calls: of the program, a loop's body, or a branch."""
        frame = self
        while frame.parent is not None and frame.is_call:
            frame = frame.parent.frame
        return frame

    def walk(self) -> Iterator[Op]:
        """All ops in order; before a loop, branch or call come the ops of its bodies."""
        for op in self.ops:
            for frame in op.frames:
                yield from frame.walk()
            yield op

    def walk_counted(self, count: int = 1) -> Iterator[tuple[Op, int]]:
        """(op, number of runs) of all ops, if the frame runs ``count`` times; a loop of unknown length counts once."""
        for op in self.ops:
            for frame in op.frames:
                yield from frame.walk_counted(count * (1 if frame.trip_count is None else frame.trip_count))
            yield op, count


def module_of_argument(value: Value, frame: Frame) -> str:
    """The path of the module that has an argument: ``blocks/0/up`` of ``model/blocks/0/up/kernel``; "" without one."""
    return path_in_model(value, frame).rpartition("/")[0]


def path_in_model(value: Value, frame: Frame) -> str:
    """The path of an argument in its tree: ``blocks/0/up/kernel`` of ``model/blocks/0/up/kernel``; "" for another value."""
    return "/".join(part for part in _argument_of(value, frame).split("/")[1:] if part != "params")


def _argument_of(value: Value, frame: Frame) -> str:
    """The path of the argument that a value in a frame is, or that it is a slice, cast or transpose of; "" without one."""
    while value.path is None or value.op is not None:
        operands: Sequence[Value | None] = ()
        if value.op is not None:
            operands, frame = (
                ([v for v in value.op.ins if v is not None], value.op.frame) if not value.op.frames else ((), frame)
            )
        elif frame.parent is not None and value in (inner := frame.ins()):
            bodies = operands_of_bodies(frame.parent.eqn, frame.parent.ins)
            operands = [bodies[frame.parent.frames.index(frame)][inner.index(value)]]
            frame = frame.parent.frame
        if len(operands) != 1 or operands[0] is None:
            return ""
        value = operands[0]
    return value.path


def location_of(ops: Iterable[Op]) -> str:
    """The location of some ops: with ``*`` for numbers of layers where they differ, of the first one; "" without ops."""
    every = [*ops]
    if not every:
        return ""
    alike = len({op.location for op in every}) == 1
    return every[0].location if alike else every[0].location_of_layers


@dataclass(eq=False, slots=True)
class Join:
    """Two names that inference joined into one dim of the program, with the origin of each.

    Attributes:
      source: the line of the op that joins them, if it is known.
      keys: what identifies both origins in every program of a model (a train step, an evaluation): their patterns, or the ends of
        their paths.
    """

    first: str
    second: str
    first_origin: str
    second_origin: str
    source: str | None = None
    keys: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        question = ": is one of them misspelled?" * self.is_misspelled
        return f"{self.first} = {self.second} ({self.first_origin}; {self.second_origin}){where}{question}"

    @property
    def is_misspelled(self) -> bool:
        """Whether the names are so similar that one is probably a misspelling of the other."""
        return bool(near(self.first, [self.second], cutoff=SPELLING_SIMILARITY))


@dataclass(eq=False, slots=True, repr=False)
class Program:
    """A traced function: a jaxpr, and a name for every dim of every value.

    Attributes:
      closed: the ClosedJaxpr.
      root: its frame.
      inputs, outputs: values in the order of the flat arguments and results, with their paths.
      joins: pairs of names that are one dim.
      original: the program before a rewrite, if this one is its result (:mod:`program.divisible_rewrite`,
        :mod:`program.pipeline`).
      pipelines: its loops over layers that are rewritten as pipelines (:class:`program.pipeline.Pipeline`).
      inferred: path of an argument → the names that :mod:`program.names_from_uses` gave to its dims; empty if the user named dims.
      metadata_names: of the program as traced, the names of dims in the Flax metadata of its arguments and results.
      written: of the program as traced, the closed jaxpr before all changes.
    """

    closed: ClosedJaxpr
    root: Frame
    inputs: list[Value]
    outputs: list[Value]
    unifier: Unifier
    joins: list[Join] = field(default_factory=list)
    original: Program | None = None
    pipelines: tuple[Any, ...] = ()
    inferred: dict[str, Any] = field(default_factory=dict)
    metadata_names: frozenset[str] = frozenset()
    written: Any = None
    _results: dict[Callable[..., Any], Any] = field(default_factory=dict, init=False)

    def cached(self, make: Callable[..., T], *key: Hashable) -> T:
        """``make(program, *key)``, computed once and shared by the plans of all layouts; freed with the program.

        Of a function with a key (the sizes of a mesh, a property of a chip), the results of the ``MAX_CACHED_KEYS`` most recently
        used keys are cached. A result may be a table that its callers fill.
        """
        if not key:
            if make not in self._results:
                self._results[make] = make(self)
            return self._results[make]
        results = self._results.get(make)
        if results is None:
            results = self._results[make] = LRUCache(MAX_CACHED_KEYS)
        return results.setdefault(key, lambda: make(self, *key))

    @property
    def traced(self) -> Program:
        """The program as traced, before all rewrites."""
        return self if self.original is None else self.original.traced

    @property
    def is_derived_as_traced(self) -> bool:
        """Whether derivatives from outside are taken of the program as traced, before rewrites (:mod:`lower.jit`)."""
        return self.traced.cached(_is_derived_as_traced)

    @property
    def constants(self) -> list[Value]:
        """The arrays that the function closes over, in the order of the jaxpr's constants."""
        return [self.root.env[var] for var in self.closed.jaxpr.constvars]

    def sub_dims(self, value: Value, i: int) -> tuple[SubDim, ...]:
        """(names, size) of the sub-dims of dim ``i``, major to minor. Only merged dims have several."""
        if value.annotation is not None and value.annotation[i] is not None:
            return (((value.annotation[i],), value.aval.shape[i]),)  # type: ignore[return-value]
        return self.unifier.sub_dims_of(value.nodes[i])

    def dim_name(self, value: Value, i: int) -> str | None:
        """The name of dim ``i`` for display: its annotation or first inferred name, ``(a b)`` if merged; None: it has no name."""
        sub_dims = self.sub_dims(value, i)
        if not sub_dims or not any(names for names, _ in sub_dims):
            return None
        if len(sub_dims) == 1:
            return sub_dims[0][0][0]
        return "(" + " ".join(names[0] if names else "_" for names, _ in sub_dims) + ")"

    def dims(self, value: Value) -> Dims:
        """The names of a value's dims for display."""
        return tuple(self.dim_name(value, i) for i in range(len(value.shape)))

    def all_names(self) -> set[str]:
        """The names of all dims of the program."""
        return self.unifier.all_names()

    def coverage(self) -> tuple[int, int, list[tuple[Op, Value, int]]]:
        """Of the dims larger than 1 of the inputs and of the results of all ops: how many have a name, how many there are, and
        the dims of results without a name, as (op, value, dim)."""
        made_by: dict[Value, Op | None] = dict.fromkeys(self.inputs)
        for op in self.root.walk():
            for value in op.outs:
                made_by.setdefault(value, op)
        dims = [(op, v, i) for v, op in made_by.items() for i, n in enumerate(v.shape) if n > 1]
        unnamed = [(op, v, i) for op, v, i in dims if self.dim_name(v, i) is None]
        missing = [(op, v, i) for op, v, i in unnamed if op is not None]
        return len(dims) - len(unnamed), len(dims), missing


def _is_derived_as_traced(program: Program) -> bool:
    on_host = any(v.on_host for v in (*program.inputs, *program.outputs))
    return not (bound_axis_names() or program.closed.effects or on_host)
