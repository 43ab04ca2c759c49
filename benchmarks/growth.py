"""Weak and strong scaling of planned steps from 8 to 4,096 chips, and the time to plan them.

    python benchmarks/growth.py                          # four models on ten slices of v5p
    python benchmarks/growth.py --only 405b --chips 512 4096
    python benchmarks/growth.py --search                 # under the layout that mp.search returns, in place of FSDP

Llama is under FSDP over all chips, DeepSeek under FSDP and expert parallelism over at most 64 chips; sequences have 4,096 tokens,
and layers full remat. Weak scaling: 2 sequences a chip. Strong scaling: 4,096 sequences a step, in microbatches of at most 2
sequences a chip. Efficiencies: tokens per second and chip, relative to the smallest slice whose plan fits the memory of a chip.
``peak``: of the larger of both plans. ``plan, s``: CPU seconds of tracing and planning both, with memory and step time. Nothing
is compiled or run.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from tables import Table

import meshpar as mp
from meshpar._src.hardware.topology import parse_topology

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import deepseek
import llama

SLICES = {
    8: "v5p:2x2x2", 16: "v5p:2x2x4", 32: "v5p:2x4x4", 64: "v5p:4x4x4", 128: "v5p:4x4x8", 256: "v5p:4x8x8", 512: "v5p:8x8x8",
    1024: "v5p:8x8x16", 2048: "v5p:8x16x16", 4096: "v5p:16x16x16",
}  # fmt: skip
SEQUENCE_LENGTH = 4096
SEQUENCES_PER_CHIP = 2
"""In a step of weak scaling, and the largest number in a microbatch of strong scaling."""
STRONG_BATCH = 4096
"""Sequences in a step of strong scaling: 16.8 million tokens."""
MAX_EXPERT_PARALLELISM = 64


@dataclass(frozen=True)
class Case:
    """A model and its layout.

    Attributes:
      target: from (sequences, tokens in a sequence, microbatches=) to (step, arguments, dims).
      experts: whether experts are sharded over the axis `model`.
    """

    name: str
    target: Callable[..., Any]
    layout: mp.Layout
    experts: bool = False

    def mesh(self, chips: int) -> str:
        """Axes and sizes."""
        model = min(chips, MAX_EXPERT_PARALLELISM) if self.experts else 1
        return f"data={chips // model}, model={model}"


FSDP = mp.Layout(llama.FSDP, resolve="cost")
CASES = (
    Case("llama3_8b", llama.llama3_8b, FSDP),
    Case("llama3_70b", llama.llama3_70b, FSDP),
    Case("llama31_405b", llama.llama31_405b, FSDP),
    Case("deepseek_671b", deepseek.deepseek_671b, mp.Layout(deepseek.FSDP_EXPERT), experts=True),
)


@dataclass(frozen=True)
class Planned:
    """Seconds and peak bytes of a planned step."""

    seconds: float
    peak: float


def planned(case: Case, chips: int, sequences: int, search: bool) -> Planned:
    """The plan of a step of so many sequences."""
    microbatches = max(1, sequences // (SEQUENCES_PER_CHIP * chips))
    step, args, dims = case.target(sequences, SEQUENCE_LENGTH, microbatches=microbatches)
    if search:
        best = mp.search(step, *args, topology=SLICES[chips], dims=dims, donate_argnames="state").best
        return Planned(best.seconds, best.peak)
    plan = mp.plan(
        step, *args, mesh=case.mesh(chips), topology=SLICES[chips], layout=case.layout, dims=dims, lowering="shard_map",
        donate_argnums=0,
    )  # fmt: skip
    assert plan.seconds is not None
    return Planned(plan.seconds, plan.memory.peak)


def efficiencies(steps: dict[int, Planned], capacity: float, strong: bool) -> dict[int, float]:
    """Tokens per second and chip, relative to the smallest number of chips whose plan fits ``capacity`` bytes.

    Args:
      steps: number of chips → planned step.
      strong: whether all steps have the same number of tokens; otherwise it is proportional to the number of chips.
    """
    fitting = {chips: step for chips, step in steps.items() if step.peak <= capacity}
    rates = {chips: 1 / (step.seconds * (chips if strong else 1)) for chips, step in fitting.items()}
    return {chips: rate / rates[min(rates)] for chips, rate in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this text")
    parser.add_argument("--chips", type=int, nargs="+", default=list(SLICES), choices=SLICES, help="(all)")
    parser.add_argument("--search", action="store_true", help="under the layout that mp.search returns")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")
    heads = ("model", "chips", "weak: step, s", "efficiency", "strong: step, s", "efficiency", "peak, GB", "plan, s")
    table = Table(*heads)
    for case in CASES:
        if args.only not in case.name:
            continue
        weak: dict[int, Planned] = {}
        strong: dict[int, Planned] = {}
        for chips in sorted(args.chips):
            began = time.process_time()
            weak[chips] = planned(case, chips, SEQUENCES_PER_CHIP * chips, args.search)
            strong[chips] = planned(case, chips, STRONG_BATCH, args.search)
            took = time.process_time() - began
            capacity = parse_topology(SLICES[chips]).chip.per_device().hbm
            cells = []
            for steps, fixed in ((weak, False), (strong, True)):
                fraction = efficiencies(steps, capacity, fixed).get(chips)
                cells += [f"{steps[chips].seconds:.3f}", "does not fit" if fraction is None else f"{fraction:.2f}"]
            peak = max(weak[chips].peak, strong[chips].peak)
            table.add_row(case.name, f"{chips:,}", *cells, f"{peak / 1e9:.1f}", f"{took:.1f}")


if __name__ == "__main__":
    main()
