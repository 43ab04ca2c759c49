"""Primitives without a factor rule: calls, loops, branches, identities that state names or specs, and opaque code.

The equations in the bodies of calls, loops and branches have their own rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from ..compat.jax import bodies_of
from ..compat.loop_operands import loop_parts, operands_of_bodies
from .opaque_flops import pallas_flops
from .partial import MOVES
from .registry import Refusal, SplitOp, primitive, register


def _partitions_itself(op: SplitOp) -> Refusal:
    return Refusal("has no factor rule, and cannot be nested in the shard_map that the lowering makes")


register("scan", family="scan")
register("while", family="while")
register("cond", family="cond")
register("jit", "closed_call", "call", "composite", family="call")
register("remat2", family="checkpoint")
register("custom_jvp_call", "custom_vjp_call", "custom_linear_solve", family="custom_derivative")
register("name_dims", "rename_dims", "place", "sharding_constraint", family="identity", view=True, partial=(MOVES,))
register("pallas_call", family="opaque", nested_flops=pallas_flops)
register("ffi_call", "tpu_custom_call", family="opaque")
register("custom_partitioning", refuses=_partitions_itself)

Evaluate = Callable[[Jaxpr, Sequence[Any], Sequence[Any]], list[Any]]
"""(jaxpr, its constants, operands) → results."""


def run_bodies(eqn: JaxprEqn, xs: Sequence[Any], run: Evaluate) -> list[Any]:
    """The results of a loop, branch or call for the operands ``xs``; ``run`` evaluates its bodies.

    A ``while`` under ``vmap``, with one condition for each element of the batch, has a scalar condition here: it runs until all
    elements are done. Done elements are not changed, as in the compiled program.
    """
    operands, parts = operands_of_bodies(eqn, xs), bodies_of(eqn)
    entry, p = primitive(eqn.primitive.name), eqn.params
    if entry.family == "cond":
        branches = [lambda *args, body=body, consts=consts: run(body, consts, args) for body, consts in parts]
        return lax.switch(lax.convert_element_type(xs[0], "int32"), branches, *operands[0])
    if entry.call:
        return run(*parts[0], operands[0])
    loop = loop_parts(eqn)
    consts, first, stacks = loop.split(xs)
    if entry.family == "while":
        condition, body = parts
        result: Any = condition[0].outvars[0].aval
        batch = range(result.ndim)

        def continues(carry: list[Any]) -> Any:
            return run(*condition, [*xs[: len(loop.condition)], *carry])[0]

        def step(carry: list[Any]) -> list[Any]:
            """The new carry; elements of the batch that are done retain their old one."""
            new = run(*body, [*consts, *carry])
            if not batch:
                return new
            active = continues(carry)
            masks = (lax.broadcast_in_dim(active, old.shape, batch) for old in carry)
            return [lax.select_n(mask, old, x) for mask, old, x in zip(masks, carry, new, strict=True)]

        return lax.while_loop(lambda c: lax.reduce_or(continues(c), batch) if batch else continues(c), step, first)

    def one(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        return loop.split_results(run(*parts[0], [*consts, *carry, *slices]))

    carry, ys = lax.scan(one, first, stacks, length=p["length"], reverse=p["reverse"], unroll=p["unroll"])
    return [*carry, *ys]
