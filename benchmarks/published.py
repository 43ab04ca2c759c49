"""Planned steps compared with steps that others have measured on TPUs.

    python benchmarks/published.py                   # all rows, two minutes on one CPU core
    python benchmarks/published.py --only mixtral    # those whose name contains the text

The measured steps are those of Google's recipes of MaxText, https://github.com/AI-Hypercomputer/tpu-recipes, at commit c8cfe2f:
the line ``completed step: …, seconds: …`` of ``training/trillium/MODEL-MaxText/SLICE/README.md``, and the table of
``training/ironwood/README.md``. They are single runs of MaxText's model, trainer and compiler flags. The plan has the same sizes,
slice, mesh (FSDP over all devices), sequences and saved residuals. Differences remain:

- MaxText's attention kernel has blocks of 2,048 and, in most of these recipes, one kernel for the backward pass; the planned one
  has blocks of 512, and two kernels.
- The recipes set flags of the compiler (SparseCore reductions, limits of VMEM); the plan assumes the options of `mp.jit`.
- Llama 3.1 scales the angles of RoPE, and MaxText saves queries and keys before the rotation, the planned model after it.
- Mixtral drops tokens beyond 1.25 times an expert's even share on both sides; which tokens compete may differ.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

from tables import Table

import meshpar as mp
from meshpar._src.entry.target import load_target
from meshpar._src.hardware.topology import parse_topology

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True)
class Step:
    """A measured step.

    Attributes:
      target: of the model, in the folder of examples.
      topology: of its slice or slices.
      per_device: sequences on each device.
      seconds: measured time of a step.
      remat: the policy that saves the residuals of the recipe.
      seq: tokens in a sequence.
    """

    target: str
    topology: str
    per_device: int
    seconds: float
    remat: str
    seq: int = 8192


OFFLOAD, OFFLOAD_OUT, SAVE = "offload_input_qkv", "offload_input_qkv_out", "save_qkv_context"
STEPS = (
    Step("llama.py:llama3_8b", "v6e:2x4", 3, 3.443, OFFLOAD_OUT),
    Step("llama.py:llama3_8b", "v6e:4x4", 3, 3.393, OFFLOAD_OUT),
    Step("llama.py:llama3_8b", "v6e:4x8", 3, 3.495, OFFLOAD_OUT),
    Step("llama.py:llama3_8b", "v6e:8x8", 5, 5.652, OFFLOAD_OUT),
    Step("llama.py:llama3_8b", "v6e:8x16", 4, 4.602, OFFLOAD_OUT),
    Step("llama.py:llama3_8b", "v6e:16x16", 4, 4.546, OFFLOAD_OUT),
    Step("llama.py:llama3_70b", "v6e:4x8", 2, 17.790, OFFLOAD),
    Step("llama.py:llama3_70b", "v6e:8x8", 2, 18.688, OFFLOAD),
    Step("llama.py:llama3_70b", "v6e:8x16", 4, 34.786, OFFLOAD),
    Step("llama.py:llama3_70b", "v6e:16x16", 5, 42.656, OFFLOAD),
    Step("llama.py:llama31_405b", "2x v6e:16x16", 1, 54.803, "offload_input"),
    Step("mixtral.py:mixtral_8x7b", "v6e:16x16", 12, 13.484, OFFLOAD_OUT, 4096),
    Step("llama.py:llama3_70b", "tpu7x:4x4x4", 2, 12.20, SAVE),
    Step("llama.py:llama3_70b", "tpu7x:4x8x8", 2, 12.27, SAVE),
)


def planned(step: Step) -> mp.Plan:
    """The plan of FSDP over all devices of the step's topology."""
    where = parse_topology(step.topology)
    mesh, axes = f"data={where.devices}", "data"
    if where.slices > 1:
        mesh, axes = f"slice={where.slices}, data={where.devices // where.slices}", "slice+data"
    options = {"batch": step.per_device * where.devices, "seq": step.seq, "remat": step.remat}
    target = load_target(str(EXAMPLES / step.target), options)
    how = {"dims": target.dims, "donate_argnames": "state"}
    return mp.plan(target.step, *target.args, mesh=mesh, topology=step.topology, layout=f"batch, embed: {axes}", **how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose model and slice contain this text")
    chosen = [s for s in STEPS if parser.parse_args().only in f"{s.target} {s.topology}"]
    table = Table(
        "model, slice", "sequences", "saved residuals", "measured, s", "planned, s", "planned / measured", "peak"
    )
    ratios = []
    for step in chosen:
        plan = planned(step)
        assert plan.seconds is not None
        ratios.append(plan.seconds / step.seconds)
        table.add_row(
            f"{step.target.partition(':')[2]}, {step.topology}",
            f"{step.per_device} a device of {step.seq:,}",
            step.remat,
            f"{step.seconds:.2f}",
            f"{plan.seconds:.2f}",
            f"{ratios[-1]:.2f}",
            f"{plan.memory.peak / 2**30:.1f} GiB",
        )
    table.add_row("median", "", "", "", "", f"{statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
