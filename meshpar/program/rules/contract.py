"""Matrix products and convolutions."""

from __future__ import annotations

from .rule import Kind, OpRule, rule


@rule("dot_general")
def dot_general(eqn, ins, outs) -> OpRule:
    """Batch dims and free dims run through, contracted dims leave partial sums."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs, rhs = ins
    r = OpRule([], [])
    left: dict[int, int] = {}
    right: dict[int, int] = {}
    for i, j in zip(lb, rb, strict=True):
        left[i] = right[j] = r.factor(lhs[i])
    for i in range(len(lhs)):
        if i not in left and i not in lc:
            left[i] = r.factor(lhs[i])
    for j in range(len(rhs)):
        if j not in right and j not in rc:
            right[j] = r.factor(rhs[j])
    for i, j in zip(lc, rc, strict=True):
        left[i] = right[j] = r.factor(lhs[i], "sum")
    r.ins = [tuple((left[i],) for i in range(len(lhs))), tuple((right[j],) for j in range(len(rhs)))]
    free = [left[i] for i in range(len(lhs)) if i not in lb and i not in lc]
    free += [right[j] for j in range(len(rhs)) if j not in rb and j not in rc]
    r.outs = [tuple((f,) for f in [left[i] for i in lb] + free)]
    return r


@rule("ragged_dot_general")
def ragged_dot_general(eqn, ins, outs) -> OpRule:
    """Groups, and the dim that is cut into groups, are whole; else as a matrix product."""
    dn = eqn.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = dn.dot_dimension_numbers
    lhs, rhs = ins[0], ins[1]
    r = OpRule([], [])
    left: dict[int, int] = {}
    right: dict[int, int] = {}

    def factor(i: int, kind: Kind = "map") -> int:
        return r.factor(lhs[i], "whole" if i in dn.lhs_ragged_dimensions else kind)

    for i, j in zip(lb, rb, strict=True):
        left[i] = right[j] = factor(i)
    for i, j in zip(lc, rc, strict=True):
        left[i] = right[j] = factor(i, "sum")
    free = [left[i] for i in lb]
    for i in range(len(lhs)):
        if i not in left:
            left[i] = factor(i)
            free.append(left[i])
    for j in range(len(rhs)):
        if j in dn.rhs_group_dimensions:
            right[j] = r.factor(rhs[j], "whole")
        elif j not in right:
            right[j] = r.factor(rhs[j])
            free.append(right[j])
    result = tuple((f,) for f in free)
    if len(outs[0]) > len(result):  # a contracted or batched dim was cut: one result a group
        result = ((r.factor(outs[0][0], "whole"),), *result)
    r.ins = [
        tuple((left[i],) for i in range(len(lhs))),
        tuple((right[j],) for j in range(len(rhs))),
        *((),) * (len(ins) - 2),
    ]
    r.outs = [result]
    return r


@rule("conv_general_dilated")
def conv_general_dilated(eqn, ins, outs) -> OpRule:
    """Batch and output features run through, input features are contracted, groups run through.

    A spatial dim whose window is 1 (and that is neither strided, padded nor dilated) runs through too; other spatial dims are
    whole on every device, only their names pass from operand to result.
    """
    p = eqn.params
    dn = p["dimension_numbers"]
    lhs, rhs = ins
    (out,) = outs
    ls, rs, os = dn.lhs_spec, dn.rhs_spec, dn.out_spec  # (batch, feature, *spatial), (out, in, *spatial)
    groups, batch_groups = p["feature_group_count"], p["batch_group_count"]
    r = OpRule([()], [()])
    left: dict[int, tuple[int, ...]] = {}
    right: dict[int, tuple[int, ...]] = {}
    result: dict[int, tuple[int, ...]] = {}
    batch = r.factor(out[os[0]])
    in_features = r.factor(rhs[rs[1]], "sum")
    if groups > 1:
        g, o = r.factor(groups), r.factor(rhs[rs[0]] // groups)
        left[ls[0]], left[ls[1]] = (batch,), (g, in_features)
        right[rs[0]] = result[os[1]] = (g, o)
    elif batch_groups > 1:
        g, o = r.factor(batch_groups), r.factor(rhs[rs[0]] // batch_groups)
        left[ls[0]], left[ls[1]] = (g, batch), (in_features,)
        right[rs[0]] = result[os[1]] = (g, o)
    else:
        o = r.factor(rhs[rs[0]])
        left[ls[0]], left[ls[1]] = (batch,), (in_features,)
        right[rs[0]] = result[os[1]] = (o,)
    right[rs[1]] = (in_features,)
    result[os[0]] = (batch,)
    for k, (i, j, o) in enumerate(zip(ls[2:], rs[2:], os[2:], strict=True)):
        window = rhs[j]
        plain = p["window_strides"][k] == 1 and p["lhs_dilation"][k] == 1 and tuple(p["padding"][k]) == (0, 0)
        if window == 1 and plain:
            left[i] = result[o] = (r.factor(lhs[i]),)
            right[j] = (r.factor(1),)
        elif plain and out[o] == 1:  # the window is the whole input: contracted
            f = r.factor(lhs[i], "sum")
            left[i] = right[j] = (f,)
            result[o] = (r.factor(1),)
            if lhs[i] != window:
                r.kinds[f] = "whole"
                right[j] = (r.factor(window, "whole"),)
        else:
            left[i], right[j] = (r.factor(lhs[i], "whole"),), (r.factor(window, "whole"),)
            result[o] = (r.factor(out[o], "whole"),)
            # A name passes from input to result, but not in a kernel's gradient, which slides the cotangent over the input and
            # makes a window: its "window" is large, or dilated by the stride.
            if window <= out[o] and p["rhs_dilation"][k] == 1:
                r.kin.append((left[i][0], result[o][0]))
    r.ins = [tuple(left[i] for i in range(len(lhs))), tuple(right[j] for j in range(len(rhs)))]
    r.outs = [tuple(result[i] for i in range(len(out)))]
    return r
