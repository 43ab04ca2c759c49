"""Function → program: a jaxpr plus a name for every dim of every value.

.. code-block:: text

    trace                   a function as a closed jaxpr
    ir                      the classes of a program: values and ops, their names, their lines
    infer                   makes a program from a jaxpr and the names of its inputs
    names                   which dims are the same, and their names: unification
    names_from_uses         names for dims that nobody named, from their uses
    dim_uses                the uses of each dim, as facts
    names_as_path_patterns  these names as patterns of dims=
    primitives              mp.named, mp.rename and explicit specs as primitives
    declare_kernel_rule     mp.kernel_rule
    kernels                 opaque kernels with a declared rule
    kernel_gradients        their backward passes
    roles                   which inputs are parameters, and their new values
    scalars                 constant scalars
    jaxprs                  functions that rewrite jaxprs
    merge_equal_casts       rewrite: equal conversions are merged
    sunk_reductions         rewrite: the dtype of a reduction is applied in the loop that makes the array
    reorder_additions       rewrite: additions of cotangents in another order
    divisible_rewrite       rewrite: slices, concatenations and reshapes of split dims stay split
    pipeline                rewrite: stacked layers as pipeline stages
"""

from .declare_kernel_rule import kernel_rule
from .infer import infer
from .ir import Frame, Join, Op, Program, Value
from .trace import trace
