"""Matmuls and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn

from ..laws import act, one_partial
from ..non_block_shards import contraction_blocks, element_table, in_mesh_order, sum_over_blocks
from ..relation import Context, Fragments, Rel, Unverified, axes_of_dims, out_dtype, out_shape, require
from ..term import Term, frozen
from ..windows import block_of_windows, candidates, reads
from .table import lemma

NOT_PARAMS = ("dimension_numbers", "out_sharding", "preferred_element_type")
"""Params of a matmul that its term has in another form: labels, and its dtype."""


def product(
    ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel], pairs: Sequence[tuple[int, int]], **how: Any
) -> list[Rel]:
    """A matmul or convolution, which sums over pairs of dims: partial as one operand is, and over the axes of these dims.

    Args:
      how: arguments of :func:`laws.act`; ``term``: of the result, from the operands' terms.
    """
    x, y = rels
    for i, j in pairs:
        require(not isinstance(y.spec[j], Fragments) or bool(x.spec[i]), "a sum over fragments and a constant")
        if x.term.shape[i] == y.term.shape[j] == 1:  # the sum depends on the size
            x, y = ctx.expanded(x, [i]), ctx.expanded(y, [j])
    split = [(i, j) for i, j in pairs if x.spec[i]]
    over = axes_of_dims(x.spec[i] or y.spec[j] for i, j in pairs)
    some = one_partial(rels, eqn.primitive.name)
    own = some.partial if some else frozenset()
    require(not own & over, "a sum over axes that an operand is partial over", refused=True)
    if "term" in how:
        how["term"] = how["term"](x.term, y.term)
    (result,) = act(ctx, eqn, [x, y], **how)
    fragmented = [(i, j) for i, j in split if isinstance(x.spec[i], Fragments) or result.sharded & set(x.spec[i])]
    origins = [(ctx.size(x.spec[i]), (x.term.number, i, y.term.number, j)) for i, j in fragmented or split]
    if not fragmented:
        origin = (x.spec[split[0][0]], origins[0]) if len(split) == 1 else None
        return [replace(result, partial=own | over, origin=origin)]
    require(len(fragmented) == 1, "a sum over several dims in fragments")
    ((i, j),), (origin,), axes = fragmented, origins, in_mesh_order(ctx, x.spec[fragmented[0][0]])
    result = replace(result, partial=own | (over - set(axes)))
    return [sum_over_blocks(ctx, result, axes, contraction_blocks(ctx, x, i, axes), origin)]


@lemma("dot_general")
def dot_general(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Σ_k x[b, i, k] y[b, k, j]: sharded along b, i and j as the operands are; partial over the axes of k."""
    contracted, batch = (list(zip(*dims, strict=True)) for dims in eqn.params["dimension_numbers"])
    labels = [[f"{side}{d}" for d in range(len(r.shape))] for side, r in zip("xy", rels, strict=True)]
    for kind, dims in (("c", contracted), ("b", batch)):
        for k, (i, j) in enumerate(dims):
            labels[0][i] = labels[1][j] = f"{kind}{k}"
    out = [f"b{k}" for k in range(len(batch))] + [n for n in labels[0] + labels[1] if n[0] in "xy"]
    params = {k: v for k, v in eqn.params.items() if k not in NOT_PARAMS and v is not None}

    def term(x: Term, y: Term) -> Term:
        return einsum(ctx, (x, y), labels, out, frozen(params), out_dtype(eqn))

    return product(ctx, eqn, rels, contracted, ins=labels, outs=[out], term=term)


def einsum(
    ctx: Context, args: tuple[Term, Term], labels: Sequence[list[str]], out: Sequence[str], params: Any, dtype: Any
) -> Term:
    """The term of a product of two arrays with labelled dims, transposed to ``out``.

    In normal form the operands are not transposed and in the order of their numbers, and the labels are numbered as they occur.
    """
    sides: list[tuple[Term, list[str]]] = []
    sizes: dict[str, int] = {}
    for term, names in zip(args, labels, strict=True):
        for n, size in zip(names, term.shape, strict=True):
            sizes[n] = max(sizes.get(n, 1), size)
        if term.op == "transpose":
            sides.append((term.args[0], [names[term.params.index(d)] for d in range(len(names))]))
        else:
            sides.append((term, list(names)))

    def numbered(sides: Sequence[tuple[Term, list[str]]]) -> Any:
        number = {n: k for k, n in enumerate(dict.fromkeys(n for _, names in sides for n in names))}
        return tuple(tuple(number[n] for n in names) for _, names in sides)

    chosen = min(sides, sides[::-1], key=lambda s: (s[0][0].number, numbered(s)))
    natural = dict.fromkeys(n for _, names in chosen for n in names)
    kept = tuple(k for k, n in enumerate(natural) if n in out)
    natural = [n for n in natural if n in out]
    params = numbered(chosen), kept, params
    term = ctx.terms.make("einsum", params, [t for t, _ in chosen], [sizes[n] for n in natural], dtype)
    return ctx.terms.transpose(term, [natural.index(n) for n in out])


@lemma("conv_general_dilated")
def convolution(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """A matmul over the input features, for each offset of the window; batch and output features are carried along. Blocks of
    input (or batch) and output features may be those of groups. Along a spatial
    dim in fragments, each device has a block of the windows, or a block of the taps of every window, whose sums are partial."""
    p = eqn.params
    numbers = p["dimension_numbers"]
    window = [f"w{k}" for k in range(len(numbers.lhs_spec) - 2)]
    labels = []
    for dims, names in ((numbers.lhs_spec, "bi"), (numbers.rhs_spec, "oi"), (numbers.out_spec, "bo")):
        label = dict(zip(dims, [*names, *window], strict=True))
        labels.append([label[d] for d in range(len(dims))])
    grouped = (p["feature_group_count"], p["batch_group_count"]) != (1, 1)
    unsharded = [*window, *"bio"] if grouped else window
    shown = {k: v for k, v in p.items() if v is not None and k != "out_sharding"}
    params = frozen(shown | {"dimension_numbers": str(numbers)})
    pairs = [(numbers.lhs_spec[1], numbers.rhs_spec[1])]
    how: dict[str, Any] = {"ins": labels[:2], "outs": labels[2:], "unsharded": unsharded, "params": params}
    x, y = rels
    spatial = list(enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)))
    split = [(k, dims) for k, dims in spatial if x.spec[dims[0]] or y.spec[dims[1]]]
    (batch, feature, *_), out = numbers.lhs_spec, numbers.rhs_spec[0]
    for d, label, key in ((feature, "i", "feature_group_count"), (batch, "b", "batch_group_count")):
        axes = x.spec[d]
        if axes and axes == y.spec[out] and not split and not x.fragmented:  # blocks of groups
            full = shown | {"dimension_numbers": str(numbers), key: p[key] * ctx.size(axes)}
            flat = [x.placed({d: ()}), y.placed({out: ()})]
            own = how | {"unsharded": [*window, label], "params": frozen(full)}
            (result,) = product(ctx, eqn, flat, pairs, **own)
            if ctx.terms.is_known(result.term):
                return [result.placed({numbers.out_spec[1]: axes})]
    if not split:
        return product(ctx, eqn, rels, pairs, **how)
    for term, found in candidates(ctx, eqn.primitive.name, dict(params), [x.term, y.term], [k for k, _ in split]):
        specs: dict[int, tuple[str, ...]] = {}
        taps: list[tuple[str, ...]] = []
        for k, (i, j, o) in split:
            local = reads(p, k, x.shape[i], out_shape(eqn)[o], y.shape[j])
            full = reads(found, k, x.term.shape[i], term.shape[o], y.term.shape[j])
            own = in_mesh_order(ctx, x.spec[i], y.spec[j])
            blocks = isinstance(y.spec[j], tuple)
            some = element_table(ctx, y, j, own)[..., 0] if blocks and y.spec[j] else None
            order = block_of_windows(ctx, x, i, local, full, ("0.0", "0"), some)
            if order is None or not blocks or (some is not None and (order or set(own) != set(x.spec[i]))):
                break
            specs[o] = order
            taps.append(y.spec[j])
        else:
            flat = [r.placed({dims[side]: () for _, dims in split}) for side, r in enumerate(rels)]
            (result,) = product(ctx, eqn, flat, pairs, **how, term=lambda x, y, term=term: term)
            require(not any(result.spec[o] for o in specs), "sums over blocks of features, of windows that are blocks")
            return [replace(result.placed(specs), partial=axes_of_dims([*taps, result.partial]))]
    raise Unverified("a convolution of blocks or fragments, whose windows are not those of one as written")
