"""The registry: the default entry, and the consistency of the others."""

import pytest

from meshpar._src.program.infer import CONTROL
from meshpar._src.rules import PRIMITIVES, having, primitive
from meshpar._src.rules.partial import LINEAR
from meshpar._src.rules.registry import register


def test_a_primitive_has_one_entry():
    with pytest.raises(ValueError, match="'cumsum' has two entries"):
        register("cumsum")


def test_expensive_results_are_saved_for_a_backward_pass():
    cheap = having(lambda p: p.cheap)
    assert {"mul", "exp", "reshape", "slice", "iota", "random_bits", "jit"} < cheap
    dear = "dot_general reduce_sum argmax cumsum sort gather scatter-add fft cholesky scan kernel"
    assert not {*dear.split()} & cheap


def test_entries_are_complete():
    for name in PRIMITIVES:
        check_entry(name, primitive(name))


def check_entry(name, entry):
    # infer, the planner and the lowerings each take one of these ways
    opaque = entry.family == "opaque" or name == "custom_partitioning"
    assert sum([entry.elementwise, entry.rule is not None, entry.call or name in CONTROL, opaque]) == 1
    if entry.manual is not None:
        assert entry.local is not None
    if entry.family == "add" or LINEAR in entry.partial:
        assert entry.elementwise
    if entry.elementwise:
        assert entry.fusible
    if entry.family == "identity":
        assert entry.view
