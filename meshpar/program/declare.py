"""``mp.kernel_rule``: declare how a kernel may be split."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import LayoutSyntaxError, RankError
from .kernel_gradients import differentiable
from .kernels import Kernel, KernelSends, KernelWorks, Local, parse_rule


def kernel_rule(
    text: str,
    *,
    local: Local | None = None,
    sends: KernelSends | None = None,
    works: KernelWorks | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare how a kernel may be split: ``@mp.kernel_rule("tokens embed, embed mlp -> tokens mlp")``.

    The function is called with the shards of its operands, on every device, under both lowerings. Without a mesh it is called
    as it is. Its names are its own: which dims of the program they are follows from the operands.

    Args:
      text: the dims of every operand and result, a comma between arrays (``""`` between commas: a scalar). A name that no
        result has is contracted: split, it leaves partial sums. ``seq!``: every device needs all of it. ``tokens~``: it may be
        split, and ``local`` exchanges what it needs. ``(kv_heads group)``: one dim made of two factors, of which
        ``kv_heads``, the major one, may be split.
      local: ``(*shards, axes={name: mesh axes that split it}) → shards of the results``, called under ``shard_map``;
        needed where a name is marked ``~``. Default: the function itself.
      sends: ``(local operands as ShapeDtypeStruct, {name: parts}) → [KernelSend, …]``: what ``local`` sends, for the plan;
        needed with ``~``.
      works: ``(local operands as ShapeDtypeStruct, {name: parts}) → KernelWork``: the FLOPs of ``local`` and what it holds
        beyond operands and results, for the plan's time and memory. Default: the products that are found in the function,
        divided by the number of parts; and nothing. A backward pass that runs ``local`` again computes three times as much.

    Returns:
      A decorator for a function of arrays (and static keyword arguments, which ``local``, ``sends`` and ``works`` get too) to an
      array or a tuple of arrays. It is differentiable in reverse mode if the function (or ``local``) is. What the function
      keeps for its backward pass is split as its operands are; where tracing it does not tell how, and with ``local``, the
      backward pass calls it again.

    Raises:
      LayoutSyntaxError: text that is no rule, or ``~`` without ``local`` and ``sends``.
      RankError, UnsupportedError: (when called) operands that the rule does not fit.
    """
    notation = parse_rule(text)
    own = [f for f, mark in notation.marks.items() if mark == "~"]
    if own and (local is None or sends is None):
        raise LayoutSyntaxError(
            f"kernel rule {text!r}: `{own[0]}~` needs `local=` and `sends=`",
            rule=text,
            fixes=[f"write `{own[0]}!` if every device needs all of it, or pass what one device does and sends"],
        )

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        name = getattr(fn, "__name__", "kernel")

        @functools.cache
        def made(static: tuple[tuple[str, Any], ...]) -> Kernel:
            options = dict(static)
            if not options:
                return Kernel(fn, notation, local, sends, name, works=works)
            return Kernel(
                functools.partial(fn, **options), notation, local and functools.partial(local, **options),
                sends and functools.partial(sends, **options), name, works=works and functools.partial(works, **options),
            )  # fmt: skip

        @functools.wraps(fn)
        def call(*args: Any, **static: Any) -> Any:
            kernel = made(tuple(sorted(static.items())))
            args = tuple(jnp.asarray(x) for x in args)
            if len(args) != len(notation.ins):
                raise RankError(
                    f"kernel {name}: {len(args)} operands, but the rule {text!r} has {len(notation.ins)}",
                    rule=text,
                    fixes=["one comma-separated list of dims for each operand, before the arrow"],
                )
            kernel.sizes([x.shape for x in args])
            leaves, tree = jax.tree.flatten(kernel.shapes(*args))
            if len(leaves) != len(notation.outs):
                raise RankError(
                    f"kernel {name}: {len(leaves)} results, but the rule {text!r} has {len(notation.outs)}",
                    rule=text,
                    fixes=["one comma-separated list of dims for each result, after the arrow"],
                )
            kernel.sizes([x.shape for x in args], [y.shape for y in leaves])
            return jax.tree.unflatten(tree, differentiable(kernel)(*args))

        return call

    return decorate
