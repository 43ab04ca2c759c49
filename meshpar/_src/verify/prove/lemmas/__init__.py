"""Lemmas by op: the relation of the results of an equation from the relations of its operands.

A lemma takes a :class:`Context`, the equation and the relations of its operands, and returns the relations of its results; it
raises :class:`Unverified` where its law does not apply. An op without a lemma is not verified.
"""

from . import bits, collective, contract, elementwise, index, kernel, random, reduce, shape
from .table import LOCAL_FORM, family_of, lemma_of
