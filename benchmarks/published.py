"""Planned steps compared with steps that others have measured on TPUs and GPUs.

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

On GPUs: NVIDIA's step of MaxText (https://github.com/NVIDIA/JAX-Toolbox, ``docs/frameworks/maxtext/README.md`` at commit
bcbbfa5), and torchtitan's tokens/s (https://github.com/pytorch/torchtitan, ``benchmarks/llama3_h100_202412_torchtitan.md`` and
``asyncTP_llama3_h100_2025-06_torchtitan.md``, rows in bfloat16 with torch.compile). torchtitan's are steps of another framework, on
H100s that are limited to 500 of 700 W and have memory of 2.4 instead of 3.35 TB/s. Its selective checkpointing saves every second
matmul and attention; the plan saves all but the MLP's gate.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tables import Table

import meshpar as mp
from meshpar._src.entry.cli_target import load_target
from meshpar._src.hardware.topology import parse_topology

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True)
class Step:
    """A measured step.

    Attributes:
      target: of the model, in the folder of examples.
      topology: of its slice or slices.
      per_device: sequences for each device.
      seconds: measured time of a step.
      remat: the policy that saves the residuals of the recipe.
      seq: tokens in a sequence.
      model: devices of a slice that share a sequence, by tensor and sequence parallelism.
      sizes: options of the model where the target's defaults differ.
    """

    target: str
    topology: str
    per_device: float
    seconds: float
    remat: str
    seq: int = 8192
    model: int = 1
    sizes: Mapping[str, Any] = field(default_factory=dict)


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


GPU = {"attention": "gathered"}  # `mp.layers.attention`, which is cuDNN's kernel
LLAMA2_7B = {"kv_heads": 32, "mlp": 11008, "vocab": 32000, **GPU}
SELECTIVE = "minimal_except_gate"
GPU_STEPS = (
    Step("llama.py:llama3_8b", "h100:8", 2, 0.721, "minimal_with_context", 4096, sizes=LLAMA2_7B),
    Step("llama.py:llama3_8b", "h100:8", 2, 2 * 8192 / 6667, SELECTIVE, sizes=GPU),
    Step("llama.py:llama3_8b", "16x h100:8", 2, 2 * 8192 / 6514, SELECTIVE, sizes=GPU),
    Step("llama.py:llama3_8b", "8x h100:8", 1.5, 1.5 * 8192 / 4378, SELECTIVE, model=8, sizes=GPU),
    Step("llama.py:llama3_70b", "32x h100:8", 2, 2 * 8192 / 597.3, "full", model=8, sizes=GPU),
)


def planned(step: Step) -> mp.Plan:
    """The plan of FSDP over all devices of the step's topology, or over those that share no sequence."""
    where = parse_topology(step.topology)
    sizes = {"slice": where.slices, "data": where.devices // where.slices // step.model, "model": step.model}
    sizes = {axis: n for axis, n in sizes.items() if n > 1}
    axes = "+".join(axis for axis in sizes if axis != "model")
    layout = f"batch: {axes}; heads, kv_heads, mlp, vocab: model; embed: {axes}; seq: model"
    options = {"batch": int(step.per_device * where.devices), "seq": step.seq, "remat": step.remat, **step.sizes}
    target = load_target(str(EXAMPLES / step.target), options)
    return mp.plan(
        target.step,
        *target.args,
        mesh=", ".join(f"{axis}={n}" for axis, n in sizes.items()),
        topology=step.topology,
        layout=layout if step.model > 1 else f"batch, embed: {axes}",
        dims=target.dims,
        donate_argnames="state",
    )


def compared(steps: Sequence[Step], summary: str) -> None:
    """Print the steps as a table, whose last row is the median."""
    table = Table(
        "model, slice", "sequences", "saved residuals", "measured, s", "planned, s", "planned / measured", "peak"
    )
    ratios = []
    for step in steps:
        plan = planned(step)
        assert plan.seconds is not None
        ratios.append(plan.seconds / step.seconds)
        model = "llama2_7b" if step.sizes is LLAMA2_7B else step.target.partition(":")[2]
        table.add_row(
            f"{model}, {step.topology}",
            f"{step.per_device} a device of {step.seq:,}" + f", model={step.model}" * (step.model > 1),
            step.remat,
            f"{step.seconds:.2f}",
            f"{plan.seconds:.2f}",
            f"{ratios[-1]:.2f}",
            f"{plan.memory.peak / 2**30:.1f} GiB",
        )
    if ratios:
        table.add_row(summary, "", "", "", "", f"{statistics.median(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose model and slice contain this text")
    text = parser.parse_args().only
    for steps, summary in ((STEPS, "median"), (GPU_STEPS, "median of GPUs")):
        compared([s for s in steps if text in f"{s.target} {s.topology}"], summary)


if __name__ == "__main__":
    main()
