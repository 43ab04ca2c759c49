"""Proofs of the per-device programs of the models of examples/, at their real sizes. Needs neither devices nor a compiler.

    python benchmarks/prove.py [--only llama3_8b]
    python benchmarks/prove.py --fuzz 1000 [--seed 0] [--minutes 10]      # random programs of tests/fuzz, under random layouts
    python benchmarks/prove.py --faults 300 [--seed 0]                   # programs with a fault in one equation

``results``: of the arrays that the step returns, those that are proven to be the ones of the function as written. ``ops``: of the
equations of the per-device program, the part that is proven. ``rewritten``: where the function as written is not proven, the
results and ops that are proven against the program after meshpar's rewrites. ``claims``: those of the plan that hold, of all.
``seconds``: CPU time of the checker.

``--fuzz`` counts the programs that are proven, not verified and refused; a refused one is printed, since the programs are right.
``--faults`` puts faults into the small programs of ``proof_programs.py``: a collective dropped, over another axis or in another
direction, an offset off by one, a mask left out. A program with a fault that is proven is run on 8 virtual devices, and must have
the results of the one without.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import plain
import proof_programs
from agreement import TRIPLES
from tables import Table

import meshpar as mp
from meshpar._src.verify.proofs import claims_of
from meshpar._src.verify.prove import prove_program

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import diloco
import generate
import long_context
import third_party

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
    rounds = llama.llama3_8b(microbatches=16), f"{pipeline}*2; embed: data", "stage=8, data=16", "v5p:4x4x8"
    yield "llama3_8b pipeline of two rounds", lambda: plan(*rounds)
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
    yield "t5 fsdp", lambda: plan(plain.t5(batch=16 * 64), plain.FSDP, "data=64", "v6e:8x8")
    for part in ("inner", "outer"):
        yield f"local_sgd {part} step", lambda part=part: local_sgd(part)
    for name, make in third_party.CASES.items():
        yield f"third party {name}", lambda make=make: unedited(make())


def local_sgd(part: str) -> mp.Plan:
    """The plan of the inner or the outer step of two replicas of the model of examples/diloco.py, on virtual devices."""
    model = diloco.Model(diloco.Config(layers=2, embed=64, mlp=192, dropout=0.0))
    tx = optax.adamw(1e-3)

    def step(state: Any, inputs: Any, targets: Any) -> Any:
        loss, grads = jax.value_and_grad(model.loss)(state["params"], inputs, targets)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def create(key: jax.Array) -> Any:
        params = model.init(key)
        return {"params": params, "opt": tx.init(params)}

    run = mp.train.local_sgd(
        step, over="slice", every=4, outer=optax.sgd(0.7, momentum=0.9, nesterov=True), mesh=mp.mesh("slice=2, data=4"),
        layout="batch: data; embed: data", dims={**model.dims, "inputs": "batch seq", "targets": "batch seq"}, lowering="shard_map",
    )  # fmt: skip
    state, batch = run.init(create)(jax.random.key(0)), jax.numpy.zeros((16, 64), jax.numpy.int32)
    state, _ = run(0, state, batch, batch)
    if part == "outer":
        return run.outer.plan(inner=state["inner"], anchor=state["anchor"], outer=state["outer"])
    return run.inner.plan(state["inner"], *[batch.reshape(2, 8, 64)] * 2)


def unedited(case: third_party.Case) -> mp.Plan:
    """The plan of a model of another package."""
    state = jax.eval_shape(case.create, jax.random.key(0))
    weights = {f"state/{pattern}": dims for pattern, dims in case.weights.items()}
    where = {"mesh": mp.mesh("data=4, model=2"), "layout": case.layout, "lowering": "shard_map"}
    return mp.plan(case.step, state, case.batch, dims=weights | case.data, **where)


def logged(log: Path | None) -> list[dict[str, Any]]:
    """The results in a log."""
    return list(map(json.loads, log.read_text().splitlines())) if log and log.exists() else []


def append(log: Path | None, result: dict[str, Any]) -> None:
    """Write a result to a log at once."""
    if log:
        with log.open("a") as file:
            file.write(json.dumps(result) + "\n")


LAYOUTS = 4
"""Layouts of each random program, which is traced once."""
CACHED_PROGRAMS = 200
"""Random programs until JAX's caches are cleared."""


def fuzz(count: int, seed: str, minutes: float, part: tuple[int, int], log: Path | None) -> None:
    """Prove random programs under random layouts; one line of the log for each."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "fuzz"))
    import programs
    import run
    from writer import Skip

    found = {(r["program"], r["layout"]): r for r in logged(log)}
    end = time.monotonic() + 60 * minutes

    def prove(case: programs.Case, plan: mp.Plan) -> dict[str, Any]:
        with run.CONTEXTS[case.calls[0].context]():
            proof = prove_program(plan.program.traced.written, proof_programs.lowered(plan), claims=claims_of(plan))
        claims = [str(c) for c in proof.failed if c.op == "plan"]
        if proof.status == "refused" or claims or proof.errors:
            print(f"{case}\n# {plan.mesh}, {plan.layout!r}\n{proof}", file=sys.stderr, flush=True)
        causes = collections.Counter[str]()
        for c, n in proof.failed.items():
            causes[f"{c.op}: {c.reason}"[:150]] += n * (c.op not in ("plan", "result"))
        errors = list(map(str, proof.errors))
        return {"status": proof.status, "share": proof.share, "claims": claims, "errors": errors, "causes": causes}

    for k in range(count // LAYOUTS)[part[0] :: part[1]]:
        if (k, LAYOUTS - 1) in found or time.monotonic() > end:
            continue
        rng = random.Random(f"{seed}/{k}")
        case, plan = programs.make_case(rng), None
        for layout in range(LAYOUTS):
            began, result = time.process_time(), {"status": "no per-device program"}
            try:
                if plan is None:
                    plan = run.planned(case, overlap=case.overlap, lowering="shard_map")
                else:
                    where = programs.make_layout(rng, case.program, case.mesh)
                    overlap = rng.choice(("off", "ring"))
                    with run.CONTEXTS[case.calls[0].context]():
                        plan = plan.replan(layout=where, overlap=overlap)
                if plan is not None:
                    result = prove(case, plan)
            except Exception as e:
                result = {"status": f"no plan, or none that is lowered: {type(e).__name__}"}
                if not isinstance(e, mp.errors.MeshparError | Skip):
                    print(f"program {k}, layout {layout}: {e!r}"[:300], file=sys.stderr, flush=True)
            result |= {"program": k, "layout": layout, "seconds": round(time.process_time() - began, 3)}
            found[k, layout] = result
            append(log, result)
        if k // part[1] % CACHED_PROGRAMS == CACHED_PROGRAMS - 1:
            jax.clear_caches()
    causes, programs_of = collections.Counter[str](), collections.Counter[str]()
    counts = collections.Counter(r["status"] for r in found.values())
    for r in found.values():
        causes.update(r.get("causes", {}))
        programs_of.update(list(r.get("causes", {})))
        counts["a claim of the plan does not hold"] += bool(r.get("claims"))
        counts["an internal error in a lemma"] += bool(r.get("errors"))
    seconds = sum(r["seconds"] for r in found.values())
    table = Table("random programs", "number", title=f"seed {seed}, {len(found)} programs, {seconds:.0f} CPU seconds")
    for name, n in counts.most_common():
        table.add_row(name, str(n))
    table = Table("cause", "equations", "programs", title="not proven")
    for text, n in causes.most_common():
        table.add_row(text, str(n), str(programs_of[text]))


def faulty(count: int, seed: str, minutes: float, log: Path | None) -> None:
    """Prove programs with a fault; one line of the log for each."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
    from faults import faults

    made, end = [], time.monotonic() + 60 * minutes
    done = {(r["program"], r["fault"]): r["status"] for r in logged(log)}
    for name, make in proof_programs.programs():
        plan = make()
        written, program = plan.program.traced.written, proof_programs.lowered(plan)
        if prove_program(written, program).proven:
            made.append((name, written, program, list(faults(program))))
    head = "program", "faults", "refused", "not verified", "proven, same results", "proven, other results"
    table = Table(*head, title=f"seed {seed}")
    made.sort(key=lambda m: len(m[3]))  # of the small programs all faults, if they have fewer than their part
    for k, (name, written, program, all_of) in enumerate(made):
        random.Random(f"{seed}/{name}").shuffle(all_of)
        chosen = all_of[: -(-count // (len(made) - k))]
        count -= len(chosen)
        counts: collections.Counter[str] = collections.Counter()
        args = proof_programs.arguments(program)
        wanted = None
        for fault, other in chosen:
            status = done.get((name, fault))
            if status is None and time.monotonic() < end:
                proof = prove_program(written, other)
                status = proof.status
                for error in proof.errors:
                    print(name, error, file=sys.stderr)
                if status == "proven":
                    wanted = wanted or proof_programs.run(program, args)
                    status = "same" if proof_programs.equal(proof_programs.run(other, args), wanted) else "other"
                    print(name, status, fault, file=sys.stderr)
                append(log, {"program": name, "fault": fault, "status": status})
            counts[status or "not run"] += 1
        outcomes = ("refused", "not verified", "same", "other")
        table.add_row(name, str(counts.total() - counts["not run"]), *(str(counts[s]) for s in outcomes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="rows whose name contains one of these")
    parser.add_argument("--fuzz", type=int, metavar="N", help="random programs in place of the steps")
    parser.add_argument("--faults", type=int, metavar="N", help="programs with a fault in place of the steps")
    parser.add_argument("--seed", default="0")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no more random programs or faults after so long"
    )
    parser.add_argument(
        "--log", type=Path, help="file of the results of random programs or faults; those in it do not run again"
    )
    parser.add_argument("--part", type=lambda p: [int(n) for n in p.split("/")], default=[0, 1], metavar="K/N",
                        help="the K-th of every N random programs, to run several processes")  # fmt: skip
    args = parser.parse_args()
    mp.virtual_devices(8)
    warnings.simplefilter("ignore")
    if args.fuzz or args.faults:
        if args.faults:
            return faulty(args.faults, args.seed, args.minutes, args.log)
        return fuzz(args.fuzz, args.seed, args.minutes, (args.part[0], args.part[1]), args.log)
    only = args.only
    head = "step", "results", "ops", "rewritten: results", "ops", "claims", "seconds"
    table = Table(*head, title=f"jax {jax.__version__}")
    for name, make in cases():
        if only and not any(text in name for text in only):
            continue
        proof = make().prove()
        cells = []
        for p in (proof, proof.planned):
            done = "" if p is None else f"{sum(r.status == 'proven' for r in p.results)} of {len(p.results)}"
            cells += [done, "" if p is None else f"{p.share:.0%} of {sum(p.ops.values()) / max(p.share, 1e-9):,.0f}"]
        claims = f"{(proof.claims or 0) - sum(c.op == 'plan' for c in proof.failed)} of {proof.claims}"
        table.add_row(name, *cells, claims, f"{proof.seconds + (proof.planned.seconds if proof.planned else 0):.1f}")
        print(
            name,
            proof.status,
            *[f"\n  {c} ({n})"[:300] for c, n in list(proof.failed.items())[:6]],
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main()
