"""Proofs of the per-device programs of the models of examples/, at their real sizes. Needs neither devices nor a compiler.

    python benchmarks/prove.py [--only llama3_8b]

``results``: of the arrays that the step returns, those that are proven to be the ones of the function as written. ``ops``: of the
equations of the per-device program, the part that is proven. ``rewritten``: where the function as written is not proven, the
results and ops that are proven against the program after meshpar's rewrites. ``seconds``: CPU time of the checker.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from agreement import TRIPLES
from tables import Table

import meshpar as mp

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import generate
import long_context

import gpt3_bert_vit
import llama


def cases() -> Iterator[tuple[str, Callable[[], mp.Plan]]]:
    """(name, plan) of each row."""
    for t in TRIPLES:
        yield t.name, t.plan

    def plan(target: Any, layout: str, mesh: str, topology: str) -> mp.Plan:
        step, args, dims = target
        return mp.plan(step, *args, layout=layout, mesh=mesh, topology=topology, dims=dims, lowering="shard_map")

    large = "data=128, model=8", "v5p:8x8x16"
    for name in ("fsdp_tensor", "sequence_parallel"):
        yield f"llama31_405b {name}", lambda name=name: plan(llama.llama31_405b(), llama.LAYOUTS[name], *large)
    pipeline = "batch: data; vocab: stage; layers: stage"
    yield "llama3_8b pipeline", lambda: plan(llama.llama3_8b(), pipeline, "stage=8, data=16", "v5p:4x4x8")
    for name in llama.CONTEXT_PARALLEL:
        pod = long_context.POD_LAYOUT, long_context.POD_MESH, long_context.POD
        yield (
            f"llama3_8b {name} attention",
            lambda name=name, pod=pod: plan(llama.llama3_8b(batch=16, seq=32768, attention=name), *pod),
        )
    for name in ("data", "heads", "cache", "cache+tensor"):
        where = generate.LAYOUTS[name], "data=4, model=4", "v5e:4x4"
        yield f"llama3_8b_decode {name}", lambda where=where: plan(generate.llama3_8b_decode(), *where)
    for name, model in (("gpt3_175b", 8), ("bert_base", 4), ("vit_22b", 8)):
        target, mesh = getattr(gpt3_bert_vit, name), f"data={1024 // model}, model={model}"
        where = "batch: data; heads, mlp: model; embed?: data", mesh, "v5p:8x8x16"
        yield f"{name} fsdp_tensor", lambda target=target, where=where: plan(target(batch=2048), *where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="rows whose name contains one of these")
    only = parser.parse_args().only
    table = Table("step", "results", "ops", "rewritten: results", "ops", "seconds", title=f"jax {jax.__version__}")
    for name, make in cases():
        if only and not any(text in name for text in only):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            proof = make().prove()
        cells = []
        for p in (proof, proof.planned):
            done = "" if p is None else f"{sum(r.status == 'proven' for r in p.results)} of {len(p.results)}"
            cells += [done, "" if p is None else f"{p.share:.0%} of {sum(p.ops.values()) / max(p.share, 1e-9):,.0f}"]
        table.add_row(name, *cells, f"{proof.seconds + (proof.planned.seconds if proof.planned else 0):.1f}")
        print(name, proof.status, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
