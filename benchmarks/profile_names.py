"""Collectives of plans that are found by name in the final programs of the TPU compiler, for Llama 3 8B.

    pip install -e . "jax[tpu]"
    python benchmarks/profile_names.py                                    # all rows, 32 layers
    python benchmarks/profile_names.py --layers 2 --topology v5e:4x4      # some of them, with fewer layers

``plan.compare(trace)`` joins a profile with the plan by these names. A collective counts as found if an instruction of its kind has
its name (column "own name"), or if XLA combined it with others over the same axes ("combined"): that instruction has the name of
one of them, and an array of its bytes. An instruction without a name has the one of its reduction computation: the TPU compiler
replaces some reduce-scatters by an all-reduce and a slice. "Without a name": collective instructions of the final program that no
planned collective belongs to. Compiled ahead of time, not run.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import meshpar as mp
from meshpar._src.plan.plan import Plan
from meshpar._src.verify import hlo
from meshpar._src.verify.hlo_text import parse
from meshpar._src.verify.profile import names_of

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from tables import Table

import llama

TOPOLOGIES = ("v5e:4x4", "v5p:2x2x4")
CASES = (
    ("fsdp", "data=16"),
    ("zero1", "data=16"),
    ("fsdp_tensor", "data=4, model=4"),
    ("sequence_parallel", "data=4, model=4"),
)
FEWER_LAYERS = {("v5e:4x4", "zero1"): 4}
"""Layers of the rows whose replicated weights do not fit otherwise."""


class Found(NamedTuple):
    """How the collectives of a plan are found in a compiled program.

    Attributes:
      collectives: name scope → number of collectives of the plan with this name.
      own: names of instructions or of their reduction computations.
      combined: names that are found by their bytes in an instruction that has another name.
      unnamed: names of collective instructions that have none of the plan's names.
    """

    collectives: dict[str, int]
    own: set[str]
    combined: set[str]
    unnamed: list[str]

    def count(self, names: set[str]) -> int:
        """The number of planned collectives with these names."""
        return sum(self.collectives[name] for name in names)


def found(plan: Plan, text: str) -> Found:
    """How the collectives of a plan are found in the HLO text of its final program."""
    collectives: dict[str, int] = {}
    for c in plan.collectives:
        collectives[plan.scope_name(c)] = collectives.get(plan.scope_name(c), 0) + 1
    shares = names_of(plan, parse(text))
    own = {next(iter(names)) for names in shares.values()}
    combined = {name for names in shares.values() for name in names} - own
    sent = {c.name for c in hlo.collectives(text)}
    return Found(collectives, own, combined, sorted(sent - set(shares)))


def compiled(topology: str, mesh: str, layout: str, layers: int, batch: int = 32) -> mp.types.Compiled:
    """A train step of Llama 3 8B with some of its layers, compiled."""
    step, args, dims = llama.llama3_8b(batch=batch, layers=layers)
    return mp.compile(
        step,
        *args,
        mesh=mesh,
        topology=topology,
        layout=llama.LAYOUTS[layout],
        dims=dims,
        donate_argnums=0,
        effort="fast",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", action="append", help="a slice of 16 chips; may be repeated (default: all)")
    parser.add_argument("--layers", type=int, default=llama.LLAMA3_8B.layers)
    args = parser.parse_args()
    table = Table(
        "slice", "mesh", "layout", "layers", "collectives", "names", "own name", "combined", "found", "without a name",
        title="Llama 3 8B, 32 sequences of 2,048 tokens, fast effort",
    )  # fmt: skip
    for topology in args.topology or TOPOLOGIES:
        for layout, mesh in CASES:
            layers = min(args.layers, FEWER_LAYERS.get((topology, layout), args.layers))
            program = compiled(topology, mesh, layout, layers)
            assert program.plan is not None
            f = found(program.plan, program.as_text())
            total, named = sum(f.collectives.values()), f.count(f.own | f.combined)
            table.add_row(
                topology, mesh, layout, f"{layers}", f"{total}", f"{len(f.collectives)}", f"{f.count(f.own)}",
                f"{f.count(f.combined)}",
                f"{named / total:.0%}", f"{len(f.unnamed)}",
            )  # fmt: skip
            for name in sorted(set(f.collectives) - f.own - f.combined):
                print(f"not found: {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
