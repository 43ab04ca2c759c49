"""``mp.kernel_rule``: declares along which dims a kernel may be sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import LayoutSyntaxError, RankError
from .kernel_gradients import differentiable
from .kernels import Kernel, KernelSends, KernelWorks, Local, parse_rule


def kernel_rule(
    text: str,
    *,
    local: Local | None = None,
    sends: KernelSends | None = None,
    works: KernelWorks | None = None,
    choices: Mapping[str, Sequence[Any]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare along which dims a kernel may be sharded: ``@mp.kernel_rule("tokens embed, embed mlp -> tokens mlp")``.

    Under a mesh, each device calls the function with its shards of the operands; without a mesh it is called as it is. The names in
    the rule are local to it; the dims of the program that they represent follow from the operands.

    Args:
      text: the dims of every operand and result, with a comma between arrays (``""`` between commas: a scalar). A name in no result
        is contracted: if it is sharded, the results are partial. ``seq!`` is replicated, and so is ``_``, which has no name.
        ``tokens~`` may be sharded, and ``local`` communicates as it needs. ``(kv_heads group)`` is one dim with two factors, of
        which the major one, ``kv_heads``, may be sharded.
      local: ``(*shards, axes={name: mesh axes that shard it}) → shards of the results``, called under ``shard_map``; required
        with ``~``. Default: the function itself.
      sends: ``(local operands as ShapeDtypeStruct, {name: number of shards}) → [KernelSend, …]``: the collectives of ``local``,
        for the plan; required with ``~``.
      works: ``(local operands as ShapeDtypeStruct, {name: number of shards}) → KernelWork``: FLOPs and temporary memory of
        ``local``, for the plan's time and memory. Default: the FLOPs of the matmuls in the function, divided by the number of
        shards, and no temporary memory. A backward pass that recomputes the kernel has three times the FLOPs.
      choices: static keyword argument → its values, of which a plan chooses one where the argument is ``"auto"``: the one whose
        ``sends`` are exposed (:attr:`KernelSend.hidden`) the fewest seconds; the first one without a chip. The results must not
        depend on it.

    Returns:
      A decorator for a function of arrays (and static keyword arguments, which ``local``, ``sends`` and ``works`` also get) that
      returns an array or a tuple of arrays. It is differentiable in reverse mode if the function (or ``local``) is. Its residuals
      are sharded like its operands; with ``local``, or if tracing does not tell their dims, the backward pass recomputes it.

    Raises:
      LayoutSyntaxError: the text is not a rule, or has ``~`` without ``local`` and ``sends``.
      RankError, UnsupportedError: (when called) the operands do not fit the rule.

    Example:
      >>> @mp.kernel_rule("tokens embed! -> tokens embed!")
      ... def normalize(x):
      ...     return x / jnp.linalg.norm(x, axis=1, keepdims=True)
      >>> plan = mp.plan(normalize, x, mesh=mesh, layout="batch: data; embed: model", dims={"x": "batch embed"})
      >>> [(c.op, c.axes) for c in plan.collectives]
      [('all-gather', ('model',))]
    """
    notation = parse_rule(text)
    own = [f for f, mark in notation.marks.items() if mark == "~"]
    if own and (local is None or sends is None):
        raise LayoutSyntaxError(
            f"kernel rule {text!r}: `{own[0]}~` needs `local=` and `sends=`",
            rule=text,
            fixes=[
                f"write `{own[0]}!` if every device needs all of it, or pass the local function and its collectives"
            ],
        )

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the rule attached: it computes the same results, as one kernel of the program that it is
        traced in."""
        kernel_name = getattr(fn, "__name__", "kernel")

        @functools.cache
        def made(static: tuple[tuple[str, Any], ...]) -> Kernel:
            """The Kernel for these keyword arguments, given as sorted (name, value) pairs."""
            for name, values in (choices or {}).items():
                if (name, "auto") in static:
                    first, *others = (made(tuple((n, v if n == name else u) for n, u in static)) for v in values)
                    return replace(first, forms=tuple(others), options=dict(static), memo={})

            def fixed(f: Any) -> Any:
                return functools.partial(f, **dict(static)) if f and static else f

            own, declared = (fixed(fn), notation, fixed(local), fixed(sends)), fixed(works)
            return Kernel(*own, kernel_name, works=declared, options=dict(static))

        @functools.wraps(fn)
        def call(*args: Any, **static: Any) -> Any:
            """Apply the kernel to arrays; keyword arguments are static. Returns the results of the decorated function.

            Raises:
              RankError: the number of operands or results, or a rank, differs from the rule.
            """
            kernel = made(tuple(sorted(static.items())))
            args = tuple(jnp.asarray(x) for x in args)
            _check_number(kernel_name, text, "operand", len(args), len(notation.ins), "before")
            kernel.sizes([x.shape for x in args])
            leaves, tree = jax.tree.flatten(kernel.shapes(*args))
            _check_number(kernel_name, text, "result", len(leaves), len(notation.outs), "after")
            kernel.sizes([x.shape for x in args], [y.shape for y in leaves])
            return jax.tree.unflatten(tree, differentiable(kernel)(*args))

        return call

    return decorate


def _check_number(name: str, rule: str, what: str, number: int, declared: int, side: str) -> None:
    """Raise RankError if a kernel has another number of operands or results than its rule."""
    if number != declared:
        raise RankError(
            f"kernel {name}: {number} {what}s, but the rule {rule!r} has {declared}",
            rule=rule,
            fixes=[f"one comma-separated list of dims for each {what}, {side} the arrow"],
        )
