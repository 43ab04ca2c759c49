"""The registry of primitives: one entry each, with its factor rule, its local form and its traits.

Inference, planner, both lowerings, fusion and the gradients of kernels read it. An entry is registered next to its rule and local
form, in the module of its family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from jax.extend.core import JaxprEqn

from ..compat.jax import bodies_of
from .mesh_in_shard_map import Axes
from .partial import Law
from .rule import OpRule, RuleFn

LocalForm = Callable[..., list[Any]]
"""(:class:`~rules.local_forms.LocalOp`, *shards of the operands) → shards of the results."""


class SplitOp(NamedTuple):
    """An op, and the split of its factors in a plan.

    Attributes:
      eqn, rule: its equation and factor rule.
      axes: the mesh axes over which every factor is split.
      mixed: whether a partial result may be reduce-scattered over one of its axes and all-reduced over another.
    """

    eqn: Any
    rule: OpRule
    axes: Axes
    mixed: bool


class Refusal(NamedTuple):
    """The reason why an op cannot run on shards inside a ``shard_map``.

    Attributes:
      why: continues a sentence that starts with the op's name: ``"with results has no local form: …"``.
      fixes: suggestions to the user, in addition to ``lowering="jit"``.
      eqn: the equation that causes it; None: the op's own.
    """

    why: str
    fixes: tuple[str, ...] = ()
    eqn: JaxprEqn | None = None


def always(op: SplitOp) -> bool:
    """True: for traits that hold for every op of a primitive."""
    return True


MatmulDims = Callable[[Any, Sequence[int], Sequence[int]], tuple[int, int, int, int]]
"""(equation, shape of the left operand, shape of the right one) → (batch, rows, columns, contracted) sizes of the matmul."""


Family = (
    Literal["scan", "while", "cond", "call", "checkpoint", "custom_derivative", "shard_map", "kernel", "opaque"]
    | Literal[
        "add", "div", "cast", "rounding", "barrier", "identity", "random", "reduction", "dot", "ragged_dot", "conv"
    ]
    | Literal["broadcast", "transpose", "reshape", "squeeze", "concatenate", "pad", "slice", "split", "blocks"]
    | Literal["dynamic_slice", "update", "gather", "scatter", "top_k", "transfer"]
)
"""The kind of an op. Each primitive has at most one family; :class:`Primitive` has properties for unions of families.

``add``: adds its operands.
``barrier``: an optimization barrier: several operands, each returned unchanged.
``blocks``: returns its operand, whose shards must consist of complete blocks.
``call``, ``checkpoint``, ``custom_derivative``: run one body once, on their operands as they are. The backward pass recomputes the
body of a ``checkpoint`` (``jax.checkpoint``); the derivative rule of a ``custom_derivative`` is not determined by its body.
``cast``: converts its operand to another dtype.
``dot``: a ``dot_general``, whose ``dimension_numbers`` are ((contracted), (batch)) dims of both operands.
``gather``, ``scatter``: read and write rows of operand 0 at the indices in operand 1; a scatter's result has the shape of
operand 0.
``identity``: states names or a spec.
``kernel``: a kernel of :func:`meshpar.kernel_rule`: ``params["kernel"]`` has its name, rule and work. The planner may split no dims
but the factors of the rule, which is the user's.
``opaque``: code that no analysis sees into; it needs a rule from the user if anything is split.
``ragged_dot``: matmuls of groups of rows with a matrix of each group; operands: rows, matrices, sizes of the groups.
``random``: makes random bits or keys from a key: cheaper to recompute than to save.
``reduction``: a reduction that computes its operands as it reads them.
``reshape``, ``squeeze``: regroup dims; :func:`rules.shape.reshape_order` has the dim order of their operand.
``rounding``: rounds floats to fewer bits without a change of dtype: ``reduce_precision``.
``scan``, ``while``, ``cond``: run bodies repeatedly or conditionally, on operands of their own.
``shard_map``: in the user's program; its specs split operands and results.
``top_k``: the largest elements along a dim, and their indices.
``transfer``: moves arrays between devices, or between device and host memory: ``device_put``.
``update``: writes operand 1 into a window of operand 0, of which no other element changes.
"""


class _OfFamily:
    """An attribute of :class:`Primitive`: whether the primitive is of one of these families."""

    def __init__(self, *families: Family):
        self.families = families

    def __get__(self, entry: Primitive, owner: object) -> bool:
        return entry.family in self.families


@dataclass(frozen=True, slots=True, kw_only=True)
class Primitive:
    """The entry of a JAX primitive. The defaults hold for a primitive without an entry.

    Attributes:
      name: of the primitive.
      rule: (equation, shapes of operands, shapes of results) → factor rule; None for elementwise ops, control flow and identities.
      local: computes a device's shards of the results; None: there is no local form, and no factor may be split.
      family: the kind of the op; None: no family of its own.
      elementwise: every operand has the result's shape (factor i is dim i), stretches to it along dims of size 1, or is a scalar.
      partial: the laws by which the op may be applied to partial operands before they are reduced.
      view: an identity, or one that only reorders or regroups dims, and moves no data.
      fusible: is computed inside the kernels that read its result.
      matmul_dims: the sizes of a matmul or convolution; None: it is neither.
      nested_flops: (equation, whether of the model only) → FLOPs of the matmuls inside a kernel or a nested jaxpr, on unsharded
        operands; None: it has none.
      refuses: for a primitive of which only some ops have a local form: the reason for an op without one, else None.
      pinned: XLA's partitioner computes the op wrongly along split dims, or fails (starts out of bounds, windows, uneven shards):
        the ``"jit"`` lowering constrains results to the plan's sharding, so that no sharding propagates to them from other ops.
      manual: whether the ``"jit"`` lowering runs an op by its local form under a ``shard_map``, even if the plan splits nothing:
        XLA would propagate shardings to the op, and crash or compute other numbers. None: never.
      free: is computed where it is used, or moved at no cost: XLA chooses its sharding by its users.
    """

    name: str
    rule: RuleFn | None = None
    local: LocalForm | None = None
    family: Family | None = None
    elementwise: bool = False
    partial: tuple[Law, ...] = ()
    view: bool = False
    fusible: bool = False
    matmul_dims: MatmulDims | None = None
    nested_flops: Callable[[Any, bool], float] | None = None
    refuses: Callable[[SplitOp], Refusal | None] | None = None
    pinned: bool = False
    manual: Callable[[SplitOp], bool] | None = None
    free: bool = False

    @property
    def matmul(self) -> bool:
        """A matmul or convolution: takes FLOPs, and computes its operands as it reads them."""
        return self.matmul_dims is not None

    slice = _OfFamily("slice", "dynamic_slice", "gather")
    """Reads a part of its operand."""
    contiguous_slice = _OfFamily("slice", "dynamic_slice")
    """Reads one block of its operand."""
    regroups = _OfFamily("reshape", "squeeze")
    """A ``reshape``, or one that only removes dims of size 1."""
    call = _OfFamily("call", "checkpoint", "custom_derivative")
    """Runs one body once, on its operands as they are."""
    loop = _OfFamily("scan", "while")
    """Runs its body repeatedly; a ``scan`` also slices and stacks arrays, and ``params["length"]`` is its trip count."""
    control_flow = _OfFamily("scan", "while", "cond")
    """Runs bodies repeatedly or conditionally, on operands of their own."""
    has_bodies = _OfFamily("call", "checkpoint", "custom_derivative", "scan", "while", "cond")
    """Is a call or control flow."""

    @property
    def cheap(self) -> bool:
        """Cheaper to recompute than to save for a backward pass (for a call: as cheap as its body)."""
        return self.fusible or self.view or self.family == "random" or self.call

    def flops(self, eqn: Any, model: bool = False) -> float:
        """FLOPs of the matmuls of an equation of this primitive, on unsharded operands; 0 for control flow and calls. ``model``: as
        :mod:`rules.opaque_flops`."""
        if self.matmul_dims is not None:
            batch, m, n, k = self.matmul_dims(eqn, *(v.aval.shape for v in eqn.invars[:2]))
            return 2.0 * batch * m * n * k
        return 0.0 if self.nested_flops is None else self.nested_flops(eqn, model)


_entries: dict[str, Primitive] = {}

PRIMITIVES: Mapping[str, Primitive] = MappingProxyType(_entries)
"""The entries, by name."""


def register(*names: str, **entry: Any) -> None:
    """Add the same entry for one or more primitives.

    Args:
      *names: ``eqn.primitive.name`` of each.
      **entry: the attributes of :class:`Primitive`.

    Raises:
      ValueError: a primitive has an entry already.
    """
    for name in names:
        if name in _entries:
            raise ValueError(f"primitive {name!r} has two entries")
        _entries[name] = Primitive(name=name, **entry)


def primitive(name: str) -> Primitive:
    """The entry of a primitive, or one without rule, local form and traits."""
    entry = _entries.get(name)
    return Primitive(name=name) if entry is None else entry


_PER_OPERAND = ("devices", "srcs", "copy_semantics")
"""Parameters of a ``device_put``: tuples with one entry per operand."""


def separated(eqn: JaxprEqn) -> list[Any]:
    """An equation as one equation per operand, if it is a ``device_put``; else the equation itself.

    ``a, b = device_put[devices=(Host, Device)] x y`` becomes ``a = device_put[devices=(Host,)] x`` and
    ``b = device_put[devices=(Device,)] y``. By a factor rule of the joint equation, ``b`` would be a reduction over
    the dims of ``x``.
    """
    if len(eqn.invars) == 1 or primitive(eqn.primitive.name).family != "transfer":
        return [eqn]
    return [
        eqn.replace(
            invars=[x],
            outvars=[y],
            params={**eqn.params, **{p: type(eqn.params[p])([eqn.params[p][i]]) for p in _PER_OPERAND}},
        )
        for i, (x, y) in enumerate(zip(eqn.invars, eqn.outvars, strict=True))
    ]


def bodies(eqn: JaxprEqn) -> list[Any]:
    """The jaxprs of a loop, branch or call, in the order of ``Op.frames``; none for other equations."""
    return [jaxpr for jaxpr, _ in bodies_of(eqn)] if primitive(eqn.primitive.name).has_bodies else []


def having(trait: Callable[[Primitive], object]) -> frozenset[str]:
    """The names of the primitives whose entries satisfy a condition: ``having(lambda p: p.fusible)``."""
    return frozenset(name for name, entry in _entries.items() if trait(entry))
