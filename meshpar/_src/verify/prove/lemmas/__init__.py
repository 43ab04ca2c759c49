"""Lemmas by op: the relation of the results of an equation from the relations of its operands.

A lemma takes a :class:`Context`, the equation and the relations of its operands, and returns the relations of its results; it
raises :class:`Unverified` where its law does not apply. An op without a lemma is not verified.

.. code-block:: text

    table        which op has which lemma
    elementwise  a function of the operands' elements at the same index
    shape        reshapes, transposes, slices, padding: elements move
    contract     matmuls and convolutions
    reduce       reductions, cumulative ops, windows, sorts
    index        slices, gathers and scatters at computed indices
    collective   collectives
    bits         identities of the bits of elements
    random       random keys and bits
    kernel       kernels, whose local form is assumed to compute the global one
    opaque       ops without a lemma of their own, as functions of full arrays
"""

from . import bits, collective, contract, elementwise, index, kernel, opaque, random, reduce, shape
from .opaque import of_full_arrays
from .table import LOCAL_FORM, family_of, lemma_of
