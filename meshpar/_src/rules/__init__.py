"""One entry per primitive: factor rule, local form and traits, in a module per family of primitives.

.. code-block:: text

    elementwise            elementwise primitives
    matmul_conv            matmuls, ragged matmuls, convolutions
    reduce                 reductions of dims
    cumulative             cumulative sums, products and extrema
    window                 pooling, and its gradient
    shape                  broadcasts, transposes, reshapes, slices, concatenations, iota
    constant_index_gather  rolls, permutations and slices by a constant table
    index                  gather, scatter, dynamic slices and updates
    sort                   sort, top-k, argmax, argmin
    linalg                 linear algebra, Fourier transforms
    random                 random keys and bits
    control_flow           calls, loops, branches, and primitives without a factor rule
    user_shard_map         the user's own shard_map
    kernel                 opaque kernels with a rule of the user's
    host                   callbacks into Python
    registry               the table of all entries
    rule                   the class of factor rules
    local_forms            the class of local forms
    exchange_along_dim     which elements of other shards every device needs, and the collectives by which it gets them
    halo                   windows of a split dim, with elements of other shards
    one_owner              arrays to which one device contributes each element
    partial                which ops may be applied to partial values
    mesh_in_shard_map      mesh axes, device indices and collectives inside a shard_map
    opaque_flops           FLOPs of the matmuls inside opaque equations
"""

from . import (
    constant_index_gather as rearrange,
)
from . import (
    control_flow,
    cumulative,
    elementwise,
    host,
    index,
    kernel,
    linalg,
    matmul_conv,
    random,
    reduce,
    shape,
    sort,
    window,
)
from . import (
    user_shard_map as mapped,
)
from .local_forms import check_local, refusal, run_local
from .registry import PRIMITIVES, Primitive, bodies, having, primitive, separated
from .rule import OpRule, no_rule

ELEMENTWISE = having(lambda p: p.elementwise)
