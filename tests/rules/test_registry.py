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


def faults(name, entry):
    """What is inconsistent in an entry."""
    # infer, the planner and the lowerings each take one of these ways
    opaque = entry.family == "opaque" or name == "custom_partitioning"
    ways = [entry.elementwise, entry.rule is not None, entry.call or name in CONTROL, opaque]
    adds = entry.family == "add" or LINEAR in entry.partial
    holds = {
        "one way": sum(ways) == 1,
        "a manual form has a local form": entry.manual is None or entry.local is not None,
        "what adds is elementwise": not adds or entry.elementwise,
        "what is elementwise is fusible": not entry.elementwise or entry.fusible,
        "an identity is a view": entry.family != "identity" or entry.view,
    }
    return [what for what, true in holds.items() if not true]


def test_entries_are_complete():
    """In one test: 211 of them would take a hundred times as long."""
    found = {name: faults(name, primitive(name)) for name in PRIMITIVES}
    assert {name: which for name, which in found.items() if which} == {}
