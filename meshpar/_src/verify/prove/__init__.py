"""Proof that the per-device program of a step computes the function as it was written, for given shapes and a given mesh.

Read it in this order:

.. code-block:: text

    term              global values as hash-consed expressions, in a normal form
    relation          which block, partial value or copy of a global value a device has
    laws              the effect of an op on dims and on partial values: the two laws that most lemmas consist of
    lemmas            for each op and collective: the relation of the results from the relations of the operands
    walk              the function and the per-device program, equation by equation
    loops             scan and while: invariants
    device_values     values that depend on the device: offsets, masks, and the rows that each device has
    non_block_shards  the elements that each device has of a dim, where they are no block: halos, and blocks that go round a ring
    windows           sliding windows of fragments
    claims            what the plan says about its collectives and shardings
    certificate       the certificate

A lemma is sound for every operand of its signature: a relation with fragments has elements outside of the array, and incomplete
sums; one with two dims over one axis has only blocks on a diagonal. :func:`laws.act` rejects the first two, and
:func:`relation.axes_of_dims` the third; a lemma that builds a relation of its own must.

The package imports neither rules, planner nor lowering: it shares no code with what it verifies.
"""

from .certificate import Proof
from .claims import DECOMPOSED, Claims
from .walk import prove_program
