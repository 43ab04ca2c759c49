"""The registry of primitives: one entry each, with its factor rule, its local form and its traits.

Inference, planner, both lowerings, fusion and the gradients of kernels read it. An entry is registered next to its rule and local
form, in the module of its family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from ..compat.jax import bodies_of
from .partial import Law
from .rule import OpRule, RuleFn

LocalForm = Callable[..., list[Any]]
"""(:class:`~meshpar.rules.local.LocalOp`, *shards of the operands) → shards of the results."""


class SplitOp(NamedTuple):
    """An op, and the split of its factors in a plan.

    Attributes:
      eqn, rule: its equation and factor rule.
      axes: the mesh axes over which every factor is split.
      mixed: whether a partial result may be reduce-scattered over one of its axes and all-reduced over another.
    """

    eqn: Any
    rule: OpRule
    axes: Sequence[tuple[str, ...]]
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
    eqn: Any = None


def always(op: SplitOp) -> bool:
    """True: for traits that hold for every op of a primitive."""
    return True


MatmulDims = Callable[[Any, Sequence[int], Sequence[int]], tuple[int, int, int, int]]
"""(equation, shape of the left operand, shape of the right one) → (batch, rows, columns, contracted) sizes of the matmul."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Primitive:
    """The entry of a JAX primitive. The defaults hold for a primitive without an entry.

    Attributes:
      name: of the primitive.
      rule: (equation, shapes of operands, shapes of results) → factor rule; None for elementwise ops, control flow and identities.
      local: computes a device's shards of the results; None: there is no local form, and no factor may be split.
      elementwise: every operand has the result's shape (factor i is dim i), stretches to it along dims of size 1, or is a scalar.
      partial: the laws by which the op may be applied to partial operands before they are reduced.
      addition: adds its operands.
      cast: converts its operand to another dtype.
      rounding: rounds floats to fewer bits without a change of dtype: ``reduce_precision``.
      view: an identity, or one that only reorders or regroups dims, and moves no data.
      reshape: a ``reshape`` or ``squeeze``; :func:`meshpar.rules.shape.reshape_order` has the dim order of its operand.
      squeeze: a ``reshape`` that only removes dims of size 1.
      transpose: permutes dims by ``permutation``.
      broadcast: a ``broadcast_in_dim``.
      slice: reads a part of its operand: ``slice``, ``dynamic_slice``, ``gather``.
      static_slice: reads parts of its operand at indices that its parameters fix: ``slice``, ``split``.
      lookup: reads or writes rows of operand 0 at the indices in operand 1: ``gather``, and all scatters.
      scatter: a lookup that writes rows; its result has the shape of operand 0.
      in_place: writes operand 1 into a window of operand 0, of which no other element changes.
      adds_rows: a scatter that adds to rows, or subtracts from them.
      concatenation: concatenates its operands along a dim.
      transfer: moves arrays between devices, or between device and host memory: ``device_put``.
      fusible: is computed inside the kernels that read its result.
      reduction: a reduction that computes its operands as it reads them.
      matmul_dims: the sizes of a matmul or convolution; None: it is neither.
      dot: a ``dot_general``, whose ``dimension_numbers`` are ((contracted), (batch)) dims of both operands.
      convolution: a convolution.
      nested_flops: equation → FLOPs of the matmuls inside a kernel or a nested jaxpr, on unsharded operands; None: it has none.
      kernel: a kernel of :func:`meshpar.kernel_rule`: ``params["kernel"]`` has its name, rule and work.
      random: makes random bits or keys from a key: cheaper to recompute than to save.
      identity: an identity that states names or a spec.
      barrier: an optimization barrier: several operands, each returned unchanged.
      call: runs one body once, on its operands as they are.
      own_derivative: a call with a derivative rule that its body does not determine.
      recomputation: a call whose body the backward pass recomputes: ``jax.checkpoint``.
      fixed_factors: a user has written the rule, and the planner may split no dims but its factors.
      label: (equation) → the name of the equation in reports; None: the primitive's name.
      loop: runs its body repeatedly: ``scan``, ``while``.
      scan: a loop whose trip count is ``params["length"]``, and which slices and stacks arrays.
      branch: runs one of several bodies: ``cond``.
      shard_map: a ``shard_map`` in the user's program, whose specs split operands and results.
      opaque: code that no analysis sees into; it needs a rule from the user if anything is split.
      refuses: for a primitive of which only some ops have a local form: the reason for an op without one, else None.
      pinned: XLA's partitioner computes the op wrongly along split dims, or fails (starts out of bounds, windows, uneven shards):
        the ``"jit"`` lowering constrains results to the plan's sharding, so that no sharding propagates to them from other ops.
      manual: whether the ``"jit"`` lowering runs an op by its local form under a ``shard_map``, even if the plan splits nothing:
        XLA would propagate shardings to the op, and crash or compute other numbers. None: never.
      free: is computed where it is used, or moved at no cost: XLA chooses its sharding by its users.
      per_operand: for a primitive whose result i depends on operand i alone, so that an equation with several operands is one op
        per operand: the names of the parameters that are tuples with one entry per operand. None: results depend on all operands.
    """

    name: str
    rule: RuleFn | None = None
    local: LocalForm | None = None
    elementwise: bool = False
    partial: tuple[Law, ...] = ()
    addition: bool = False
    cast: bool = False
    rounding: bool = False
    view: bool = False
    reshape: bool = False
    squeeze: bool = False
    transpose: bool = False
    broadcast: bool = False
    slice: bool = False
    static_slice: bool = False
    lookup: bool = False
    scatter: bool = False
    in_place: bool = False
    adds_rows: bool = False
    concatenation: bool = False
    transfer: bool = False
    fusible: bool = False
    reduction: bool = False
    matmul_dims: MatmulDims | None = None
    dot: bool = False
    convolution: bool = False
    nested_flops: Callable[[Any], float] | None = None
    kernel: bool = False
    random: bool = False
    identity: bool = False
    barrier: bool = False
    call: bool = False
    own_derivative: bool = False
    recomputation: bool = False
    fixed_factors: bool = False
    label: Callable[[Any], str] | None = None
    loop: bool = False
    scan: bool = False
    branch: bool = False
    shard_map: bool = False
    opaque: bool = False
    refuses: Callable[[SplitOp], Refusal | None] | None = None
    pinned: bool = False
    manual: Callable[[SplitOp], bool] | None = None
    free: bool = False
    per_operand: tuple[str, ...] | None = None

    @property
    def matmul(self) -> bool:
        """A matmul or convolution: takes FLOPs, and computes its operands as it reads them."""
        return self.matmul_dims is not None

    @property
    def gather(self) -> bool:
        """A lookup that reads rows."""
        return self.lookup and not self.scatter

    @property
    def contiguous_slice(self) -> bool:
        """Reads one block of its operand: ``slice``, ``dynamic_slice``."""
        return self.slice and not self.lookup

    @property
    def control_flow(self) -> bool:
        """Runs bodies repeatedly or conditionally, on operands of their own: ``scan``, ``while``, ``cond``."""
        return self.loop or self.branch

    @property
    def cheap(self) -> bool:
        """Cheaper to recompute than to save for a backward pass (for a call: as cheap as its body)."""
        return self.fusible or self.view or self.random or self.call

    def flops(self, eqn: Any) -> float:
        """FLOPs of the matmuls of an equation of this primitive, on unsharded operands; 0 for control flow and calls."""
        if self.matmul_dims is not None:
            batch, m, n, k = self.matmul_dims(eqn, *(v.aval.shape for v in eqn.invars[:2]))
            return 2.0 * batch * m * n * k
        return 0.0 if self.nested_flops is None else self.nested_flops(eqn)


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


def separated(eqn: Any) -> list[Any]:
    """An equation as one equation per operand, if its primitive has ``per_operand`` parameters; else the equation itself.

    ``a, b = device_put[devices=(Host, Device)] x y`` becomes ``a = device_put[devices=(Host,)] x`` and
    ``b = device_put[devices=(Device,)] y``. By a factor rule of the joint equation, ``b`` would be a reduction over
    the dims of ``x``.
    """
    params = primitive(eqn.primitive.name).per_operand
    if params is None or len(eqn.invars) == 1:
        return [eqn]
    return [
        eqn.replace(
            invars=[x],
            outvars=[y],
            params={**eqn.params, **{p: type(eqn.params[p])([eqn.params[p][i]]) for p in params}},
        )
        for i, (x, y) in enumerate(zip(eqn.invars, eqn.outvars, strict=True))
    ]


def bodies(eqn: Any) -> list[Any]:
    """The jaxprs of a loop, branch or call, in the order of ``Op.frames``; none for other equations."""
    entry = primitive(eqn.primitive.name)
    return [jaxpr for jaxpr, _ in bodies_of(eqn)] if entry.call or entry.control_flow else []


def having(trait: Callable[[Primitive], object]) -> frozenset[str]:
    """The names of the primitives whose entries satisfy a condition: ``having(lambda p: p.fusible)``."""
    return frozenset(name for name, entry in _entries.items() if trait(entry))
