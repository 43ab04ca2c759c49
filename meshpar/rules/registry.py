"""The registry of primitives: one entry each, with its factor rule, its local form and its traits.

Inference, planner, both lowerings, fusion and the gradients of kernels read it. An entry stands beside its rule and local form,
in the file of its family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from .partial import Law
from .rule import OpRule, RuleFn

LocalForm = Callable[..., list[Any]]
"""(:class:`~meshpar.rules.local.LocalOp`, *shards of the operands) → shards of the results."""


class SplitOp(NamedTuple):
    """An op as a plan splits it.

    Attributes:
      eqn, rule: its equation and factor rule.
      axes: the mesh axes that split every factor.
      mixed: an unreduced result may be scattered over one of its axes and all-reduced over another.
    """

    eqn: Any
    rule: OpRule
    axes: Sequence[tuple[str, ...]]
    mixed: bool


class Refusal(NamedTuple):
    """Why one device cannot do its part of an op inside a ``shard_map``.

    Attributes:
      why: continues the op's name: ``"with results has no local form: …"``.
      fixes: what to write instead, besides ``lowering="jit"``.
      eqn: the equation at fault; None: the op's own.
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
    """What is known of a JAX primitive. The default of every trait is what holds for a primitive without an entry.

    Attributes:
      name: of the primitive.
      rule: (equation, shapes of operands, shapes of results) → factor rule; None for elementwise ops, control flow and identities.
      local: what one device does to its shards; None: nothing is known, and no factor may be split.
      elementwise: every operand has the result's shape (factor i is dim i), stretches to it along dims of size 1, or is a scalar.
      partial: the laws by which the op is applied to partial operands before they are reduced.
      addition: adds its operands.
      cast: converts its operand to another dtype.
      rounding: rounds floats to fewer bits without a change of dtype: ``reduce_precision``.
      view: an identity or a relabelling of dims; moves no data.
      reshape: a ``reshape`` or ``squeeze``; :func:`meshpar.rules.shape.reshape_order` has the dim order of its operand.
      squeeze: a ``reshape`` that only removes dims of size 1.
      transpose: permutes dims by ``permutation``.
      broadcast: a ``broadcast_in_dim``.
      slice: reads a part of its operand: ``slice``, ``dynamic_slice``, ``gather``.
      static_slice: its results are parts of its operand at positions that the parameters fix: ``slice``, ``split``.
      lookup: reads or writes rows of operand 0 at the indices in operand 1: ``gather``, and all scatters.
      scatter: a lookup that writes rows; its result has the shape of operand 0.
      adds_rows: a scatter that adds to rows, or subtracts from them.
      concatenation: joins its operands along a dim.
      transfer: moves arrays between devices, or between device and host memory: ``device_put``.
      fusible: computed inside the kernels that read its result.
      reduction: a reduction that computes its operands as it reads them.
      matmul_dims: the sizes of a matmul or convolution; None: it is neither.
      dot: a ``dot_general``, whose ``dimension_numbers`` are ((contracted), (batch)) dims of both operands.
      convolution: a convolution.
      nested_flops: equation → FLOPs of the matmuls inside a kernel or a nested jaxpr, on unsharded operands; None: there are none.
      kernel: a kernel of :func:`meshpar.kernel_rule`: ``params["kernel"]`` has its name, rule and work.
      random: makes random bits or keys from a key: cheaper to recompute than to save.
      identity: an identity that says names or a spec.
      barrier: an optimization barrier: several operands, each returned unchanged.
      call: runs one body once, on its operands as they are.
      own_derivative: a call with a derivative rule of its own.
      fixed_factors: the rule of an equation, which its user wrote, fixes along which dims it may be split: the planner chooses no
        others.
      label: (equation) → the name of the equation in reports; None: that of the primitive.
      loop: runs its body repeatedly: ``scan``, ``while``.
      scan: a loop whose trip count is ``params["length"]``, and which slices and stacks arrays.
      branch: runs one of several bodies: ``cond``.
      shard_map: a ``shard_map`` of the user: its specs say how operands and results are split.
      opaque: code that no analysis sees into; it needs a rule from the user where something is split.
      refuses: why the op has no local form, or None where it has one; for ops of which only some have one.
      pinned: XLA's partitioner gets the op wrong along dims that are split, or fails (starts out of bounds, windows, uneven
        shards): the ``"jit"`` lowering constrains results to where the plan makes them, so that the split of a neighbour does not
        spread into them.
      manual: whether the ``"jit"`` lowering partitions the op itself, by its local form under a ``shard_map``, also where the plan
        splits nothing: XLA would, as the neighbours are split, and crash or give other numbers. None: never.
      free: made where it is used, or moved at no cost: XLA lays it out as its neighbours need it.
      per_operand: result i depends on operand i alone: an equation of several operands is one op per operand. The names of the
        parameters that are tuples with one entry per operand. None: the operands belong together.
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
    """Add an entry for each of some primitives.

    Args:
      *names: of the primitives, as in ``eqn.primitive.name``.
      **entry: the attributes of :class:`Primitive`.

    Raises:
      ValueError: a primitive has an entry already.
    """
    for name in names:
        if name in _entries:
            raise ValueError(f"primitive {name!r} has two entries")
        _entries[name] = Primitive(name=name, **entry)


def primitive(name: str) -> Primitive:
    """The entry of a primitive; one without rule, local form and traits if it has none."""
    found = _entries.get(name)
    return Primitive(name=name) if found is None else found


def separated(eqn: Any) -> list[Any]:
    """The equations that an equation consists of: one per operand if its primitive treats each operand by itself.

    ``a, b = device_put[devices=(Host, Device)] x y`` becomes ``a = device_put[devices=(Host,)] x`` and
    ``b = device_put[devices=(Device,)] y``. A factor rule of the joint equation would state that the dims of ``a`` are
    reduced in ``b``.
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


def having(trait: Callable[[Primitive], object]) -> frozenset[str]:
    """The names of the primitives with a trait: ``having(lambda p: p.fusible)``."""
    return frozenset(name for name, entry in _entries.items() if trait(entry))
