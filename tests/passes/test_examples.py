"""Every pass, text in and text out: the example in its docstring, its other rules, and steps that it leaves as they are."""

import re
import textwrap

import pytest
from steps_text import changes, halves, parse_plan

from meshpar._src.passes import PASSES
from meshpar._src.passes.all_reduce_choice import choose_all_reduce
from meshpar._src.passes.barriers import (
    compute_results_early,
    pad_rows,
    separate_matmuls,
    separate_slices,
    serialize_loops,
    serialize_results,
)
from meshpar._src.passes.collective_matmul import find_pairs, with_overlaps
from meshpar._src.passes.matmul_order import schedule
from meshpar._src.passes.merge_halo_exchanges import merge_equal_sends


def jit_on(topology):
    return {"topology": topology, "lowering": "jit"}


WHERE = {serialize_results: {"donated": (0, 1)}, choose_all_reduce: jit_on("v5e:2x4")}
"""Pass → attributes of the plan of its example, besides its steps."""


def example(run):
    """The example in the docstring of a pass."""
    _, _, text = run.__doc__.partition("::\n\n")
    return textwrap.dedent(re.match("(?:        .*\n|\n)*", text)[0].rstrip())


@pytest.mark.parametrize("run", [each.run for each in PASSES])
def test_the_example_of_a_pass(run):
    changes(run, example(run), **WHERE.get(run, {}))


def test_the_example_of_rings():
    changes(lambda plan: with_overlaps(plan, find_pairs(plan), {}).body, example(with_overlaps), overlap="ring")


UNCHANGED = {
    "a small reduction after no loop": (serialize_loops, {"4096": "1024", "scan × 2": "while"}),
    "a small array": (compute_results_early, {"65536": "8192"}),
    "nothing donated": (serialize_results, {}, {"donated": ()}),
    "small results": (serialize_results, {"2048": "1024"}),
    "slices are cast to a type of the same size": (separate_slices, {"bfloat16": "int32"}),
    "several rows": (pad_rows, {"rows=1": "rows=2"}),
    "a small weight": (pad_rows, {"embed=256": "embed=128"}),
    "a small matmul": (separate_matmuls, {"8192": "4096"}),
    "one matmul reads the result": (separate_matmuls, {"dot_general %3, x": "dot_general gate, x"}),
    "small operands": (schedule, {"embed=4096": "embed=256", "batch=4096": "batch=256"}),
    "another cotangent reads the gathered weight": (
        schedule,
        {"  x:": "  z: float32[batch=4096:data mlp]\n  x:", "dot_general dy, %3": "dot_general z, %3"},
    ),
    "other elements": (merge_equal_sends, {"first row of the device after\n  %3": "second row\n  %3"}),
    "another array": (merge_equal_sends, {"conv_general_dilated x, b": "conv_general_dilated %1, b"}),
    "tpu7x, whose partitioner reduce-scatters": (choose_all_reduce, {"=8": "=16"}, jit_on("tpu7x:2x2x2")),
    "several slices": (
        choose_all_reduce,
        {"over data": "over slice+data", ":data": ":slice+data", "data=8": "slice=2, data=16"},
        jit_on("2x v5e:4x4"),
    ),
    "GPUs": (choose_all_reduce, {}, jit_on("h100:8")),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_steps_that_a_pass_leaves_as_they_are(case):
    run, replacements, *where = UNCHANGED[case]
    before, _ = halves(example(run))
    for old, new in replacements.items():
        assert old in before
        before = before.replace(old, new)
    changes(run, before, **(where[0] if where else WHERE.get(run, {})))


NORM = """
      every device of data=8 runs:
      x: float32[batch=16384:data embed=2048]
      w: float32[embed mlp=8192]
      dy: float32[batch:data mlp]
      %1 = dot_general dy, w: float32[batch:data embed]
    - %2 = mul %1, x: float32[batch:data embed]
    + %1b = barrier %1
    + %2 = mul %1b, x: float32[batch:data embed]
      %3 = reduce_sum %2: float32[batch:data]
      return %2, %3
"""


def test_a_matmul_that_reads_tiles_is_separate_from_reductions_of_other_arrays():
    """A device has 2048 rows; 32 MiB of an operand stay in v5p's memory, 64 in v5e's."""
    changes(separate_matmuls, NORM, topology="v5p:2x2x2")
    before, _ = halves(NORM)
    changes(separate_matmuls, before, topology="v5e:2x4")
    for old, new in (("8192", "4096"), ("mul %1, x", "mul %1, %1")):
        changes(separate_matmuls, before.replace(old, new), topology="v5p:2x2x2")
    # the pass is for compilers with the defect that it works around
    (separate,) = [each for each in PASSES if each.run is separate_matmuls]
    assert not separate.applies_to(parse_plan(before, "v4:2x2x2"))
    assert separate.applies_to(parse_plan(before, "v5p:2x2x2"))


def test_a_smaller_reduction_is_sliced_at_once_and_no_loop_waits_for_it():
    changes(serialize_loops, example(serialize_loops).replace("4096", "2048").replace("after %2, %7", "after %2"))


def test_an_all_reduce_has_no_slice_that_could_be_moved():
    text, _ = halves(example(serialize_loops))
    text = text.replace("scan × 2", "while").replace("embed:data mlp]", "embed mlp]")
    changes(serialize_loops, text.replace("reduce-scatter", "all-reduce (sum)"))


def test_gradients_of_layers_are_not_left_to_the_end():
    changes(
        schedule,
        """
          every device of data=8 runs:
          w: float32[embed=4096 mlp=4096]
          x: float32[batch=8192:data embed]
          y: float32[batch:data mlp]
          dy: float32[batch:data embed]
          %1 = dot_general dy, w: float32[batch:data mlp]
          %2 = dot_general y, dy: float32[mlp embed], partial (sum) over data
          %3 = dot_general %1, w: float32[batch:data embed]
          %4 = dot_general %1, x: float32[mlp embed], partial (sum) over data
        - %5 = dot_general %3, w: float32[batch:data mlp]
        + %3b = barrier %3, after %2
        + %5 = dot_general %3b, w: float32[batch:data mlp]
          %6 = dot_general y, %3: float32[mlp embed], partial (sum) over data
          %7 = dot_general %5, w: float32[batch:data embed]
          return %2, %4, %6, %7
    """,
    )
