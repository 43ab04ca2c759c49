"""Which gathers and scatters a plan finds beside products, what it decides for them, and what it lists instead."""

import json
import math
from collections import Counter
from dataclasses import replace

import jax
import planned_transformer as model
import pytest
from arrays import bf16

import meshpar as mp
from meshpar._src.hardware.chips import CHIPS
from meshpar._src.plan.steps import GatherRing, Reduce, Reshard

SEQUENCE = "batch: data; heads, mlp, vocab: model; seq: model"
MLP = "batch: data; mlp: model; seq: model"
MLP_DIMS = {"x": "batch seq embed", "up": "embed mlp", "down": "mlp embed"}
SLICE = {"mesh": "data=16, model=16", "topology": "v5e:16x16"}
MEGACORE = {"mesh": "data=64, model=8", "topology": "v5p:8x8x8", "batch": 256}
WIDE = 2 * 14336
"""Products that are long enough for rings to pay."""


HBM, VECTOR = 0.89 * 8.1e11, 100 * 1.5e9


def beside(products, traffic, elements, hbm=HBM, vector=VECTOR):
    """Seconds of a kernel of a v5e: what it multiplies beside its bytes, and its elements in the vector units."""
    return math.hypot(products, traffic / hbm + elements / vector)


def product(m, k, n, blocks=1, flops=1.97e14, **of):
    """Seconds of one block of a product whose rows are cut into blocks: all of the other operand is read for it."""
    return beside(2 * m * k * n / blocks / flops, 2 * (m * k / blocks + k * n + m * n / blocks), m * n / blocks, **of)


def mlp(x, up, down):
    return jax.nn.relu((x - x.mean(-1, keepdims=True)) @ up) @ down


def mlp_plan(overlap, width=14336, batch=64, seq=2048, embed=4096, layout=MLP, **where):
    args = bf16(batch, seq, embed), bf16(embed, width), bf16(width, embed)
    return mp.plan(mlp, *args, layout=layout, dims=MLP_DIMS, overlap=overlap, **{**SLICE, **where})


def found(plan):
    return [(o.kind, o.choice, o.axes, o.matmuls) for o in plan.overlaps]


def rings_of(plan):
    """What is sent block by block beside products, in the order of the steps."""
    return [s.ring for s in plan.body.all_steps if isinstance(s, Reshard | Reduce) and s.ring is not None]


def test_a_gather_before_products_and_a_scatter_after_them_are_found():
    plan = mlp_plan("ring")
    assert found(plan) == [("gather", "ring", ("model",), 1), ("scatter", "ring", ("model",), 1)]
    assert all(o.reason == "as requested" for o in plan.overlaps)
    assert {c.op for c in plan.collectives} == {"collective-permute"}
    for replaced in ("all-gather", "reduce-scatter"):
        assert f"; ring steps in place of the {replaced}, overlapped with matmuls" in " ".join(str(plan).split())
    whole = 64 // 16 * 2048 * 4096 * 2
    assert plan.bytes_sent == pytest.approx(2 * whole * 15 / 16)
    # 7 hops each way of a block of 128 rows, and one each way of half of it, both for the gather and for the scatter
    assert Counter((c.bytes, c.count) for c in plan.collectives) == {(whole / 16, 14): 2, (whole / 32, 2): 2}


def test_axes_of_one_device_have_no_rings():
    """A gradient whose dims may be sharded over ``x`` alone, which has one device."""
    loss = jax.grad(lambda x, up, down: jax.numpy.sum(jax.numpy.tanh(x @ up) @ down), (0, 1, 2))
    layout = mp.Layout("hidden: y+x; model?: x; batch?: y", resolve="cost")
    dims = {"x": "batch model", "up": "model hidden", "down": "hidden _"}
    args = bf16(8, 16), bf16(16, 16), bf16(16, 8)
    plan = mp.plan(loss, *args, mesh="x=1, y=8", layout=layout, dims=dims, overlap="ring")
    assert found(plan) == [("gather", "ring", ("y",), 1)]


def test_cost_decides_where_the_chip_is_known():
    plan = mlp_plan("auto", width=WIDE)
    assert [o.choice for o in plan.overlaps] == ["ring", "ring"]
    for o in plan.overlaps:
        assert o.exposed["ring"] < o.exposed["xla"]
        assert o.gain == pytest.approx(o.exposed["xla"] - o.exposed["ring"])
        assert "hidden" in o.reason
        assert o.exposed["pallas"] > 0
        assert 'a fused kernel is possible (overlap="pallas"), but none was timed yet' in o.reason
    native = mlp_plan("xla", width=WIDE)
    assert plan.seconds == pytest.approx(native.seconds - sum(o.gain for o in plan.overlaps))
    # the gather alone takes V·15/16 over both directions of the ring
    whole = 64 // 16 * 2048 * 4096 * 2
    assert native.overlaps[0].exposed["xla"] == pytest.approx(whole * 15 / 16 / (2 * 4.5e10 * 0.8))


def test_products_too_short_to_hide_a_hop_are_left_to_xla():
    plan = mlp_plan("auto", width=256, batch=16, seq=256, embed=256)
    assert {o.choice for o in plan.overlaps} == {"xla"}
    assert {c.op for c in plan.collectives} == {"all-gather", "reduce-scatter"}
    assert all("too short" in o.reason for o in plan.overlaps)


@pytest.mark.parametrize(("width", "options"), [(3584, "off"), (7168, "auto"), (14336, "off"), (WIDE, "auto")])
def test_what_is_sent_together_goes_the_way_of_the_shorter_step(width, options):
    more = 1 / (1 - CHIPS["v5e"].compiler.min_joint_gain)
    for where in (SLICE, MEGACORE):
        auto, xla, ring = (mlp_plan(m, width=width, options=options, **where) for m in ("auto", "xla", "ring"))
        assert auto.seconds <= min(xla.seconds, ring.seconds * more) + 5e-6
        assert len({o.choice for o in auto.overlaps}) == 1


def test_without_a_chip_auto_is_xla_and_says_so():
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    plan = mlp_plan("auto", mesh=mesh, topology=None)
    assert {(o.choice, o.reason, o.gain) for o in plan.overlaps} == {("xla", "the chip is not known", None)}


LINE = {"mesh": "data=8, model=8", "topology": "v6e:8x8", "batch": 128}


@pytest.mark.parametrize("overlap", ["ring", "pallas", "auto"])
def test_a_line_of_the_torus_costs_twice_and_warns_once(overlap):
    ring = mlp_plan(overlap, topology="v6e:16x16", width=WIDE)
    with pytest.warns(mp.errors.TorusWarning) as said:
        line = mlp_plan(overlap, width=WIDE, **LINE)
    (text,) = [str(w.message) for w in said]
    assert text.startswith("`model` is no ring of the torus (8 devices in a line along x): its ring steps share links")
    assert "on v6e:8x8" in text
    assert "no ring of the torus" not in ring.overlaps[0].reason
    assert "`model` is no ring of the torus" in line.overlaps[0].reason
    hop = line.collectives[0]
    assert 2 * hop.seconds == pytest.approx(hop.bytes * 2 / (9e10 * 0.8))
    took = sum(c.seconds * c.count for c in line.collectives)
    took, around = text.split("and take ")[1].split(" a step; around a ring they would take ")
    assert float(took.split(" ms")[0]) == pytest.approx(2 * float(around.split(" ms")[0]), rel=1e-2)


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ("data=8, other=2, model=16", None),  # whole sides
        ("data=32, model=8", "8 devices in a line along x)"),  # half of one
        ("model=8, data=32", None),  # every other one, all around
        ("model=4, other=4, data=1", "4 devices in a line along y)"),  # of which none wraps
        ("data=128, model=2", None),  # two: nothing comes back
    ],
)
def test_which_axes_are_rings(mesh, text, recwarn):
    topology = "v5e:4x4" if "other=4" in mesh else "v5e:16x16"
    plan = mlp_plan("ring", mesh=mesh, topology=topology, batch=128)
    assert {o.choice for o in plan.overlaps} == {"ring"}
    said = [str(w.message) for w in recwarn.list if w.category is mp.errors.TorusWarning]
    assert [text in s for s in said] == ([] if text is None else [True])


def test_products_that_share_a_gather_share_its_ring_and_others_find_it_kept():
    plan = model.plan_of(SEQUENCE, overlap="ring")
    inner = Counter((o.kind, o.matmuls) for o in plan.overlaps if o.count == model.LAYERS)
    assert inner["gather", 3] == 2  # q, k, v, forward; and of what comes back through them, for their weights
    assert inner["scatter", 3] == 1  # the three cotangents of what q, k and v read, added up
    assert any(ring.keep_gathered for ring in rings_of(plan) if isinstance(ring, GatherRing))
    off = plan.replan(overlap="off")
    assert plan.bytes_sent == pytest.approx(off.bytes_sent)  # a ring sends what the collective would


def test_modes_that_do_not_exist_are_refused():
    with pytest.raises(mp.errors.UnsupportedError, match="there is no overlap 'rings'"):
        mlp_plan("rings")
    for lowering, overlap, why in (
        ("jit", "pallas", 'belongs to lowering="shard_map"'),
        ("jit", "ring", 'belongs to lowering="shard_map"'),
        ("shard_map", "fast", "there is no overlap 'fast'"),
    ):
        with pytest.raises(mp.errors.UnsupportedError, match=why):
            mp.jit(mlp, mesh="data=4, model=2", layout=MLP, lowering=lowering, overlap=overlap)


KERNEL = "as requested: one kernel sends chunks while it multiplies others"


def test_the_fused_kernel_takes_what_it_can_and_sends_what_a_ring_would():
    plan, ring = mlp_plan("pallas"), mlp_plan("ring")
    assert found(plan) == [("gather", "pallas", ("model",), 1), ("scatter", "pallas", ("model",), 1)]
    assert {o.reason for o in plan.overlaps} == {KERNEL}
    assert {c.algorithm for c in plan.collectives} == {"pallas"}
    assert [(c.op, c.bytes, c.count) for c in plan.collectives] == [(c.op, c.bytes, c.count) for c in ring.collectives]
    gather, scatter = plan.overlaps
    whole = 64 // 16 * 2048 * 4096 * 2  # what is gathered
    hop = whole / 16 / (4.5e10 * 0.8)
    flops = 2 * 64 // 16 * 2048 * 4096 * 14336 / 16
    assert 7.5 * hop > flops / 1.97e14  # what is sent takes longer than the products, and one hop more shows
    copied = 2 * (64 // 16 * 2048 * 14336 // 16 * 2)  # rows of blocks, of the result and of the operand
    for o, (k, n) in ((gather, (4096, 896)), (scatter, (896, 4096))):
        took = product(64 // 16 * 2048, k, n)
        assert o.exposed["pallas"] == pytest.approx(7.5 * hop - took + hop + 2e-6 + copied / HBM)
    assert plan.seconds == pytest.approx(mlp_plan("xla").seconds - sum(o.gain for o in plan.overlaps))
    assert "2 of 2 matmul–collective pairs are lowered as fused kernels (overlap=pallas), which saves" in str(plan)
    both = replace(plan, overlaps=(replace(gather, choice="ring"), scatter))
    assert "pairs are lowered as 1 rings, 1 fused kernels (overlap=pallas)" in str(both)


ABSTRACT = {"mesh": jax.sharding.AbstractMesh((1, 8), ("data", "model")), "topology": None}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mesh": "data=1, model=8", "topology": "h200:8"}, "it is for TPUs, and h200 is a GPU; "),
        (ABSTRACT, "it is for TPUs, and the chip is not known; "),
        ({"seq": 32}, "no tile of a block of 8 rows"),
        ({"embed": 1000}, "K=1000 and the 896 resulting columns must be multiples of 128; "),
        ({"mesh": "model=2, data=16", "topology": "2x v5e:4x4"}, "remote DMA does not leave a slice; "),
    ],
)
def test_where_no_kernel_runs_the_cost_decides_and_the_reason_says_why(options, why):
    plan, auto = mlp_plan("pallas", **options), mlp_plan("auto", **options)
    assert plan.overlaps[0].reason.startswith(f"no fused kernel: {why}")
    assert [o.choice for o in plan.overlaps] == [o.choice for o in auto.overlaps]


def test_reports_show_the_decisions(tmp_path):
    plan = mlp_plan("auto", width=WIDE)
    assert "2 of 2 matmul–collective pairs are lowered as rings (overlap=auto), which saves" in str(plan)
    facts = json.loads(plan.to_json())["overlap"]
    assert [(f["kind"], f["choice"]) for f in facts] == [("gather", "ring"), ("scatter", "ring")]
    assert all(f["gain"] > 0 and "test_collective_matmul.py" in f["source"] for f in facts)
    plan.save(tmp_path / "plan.html")
    assert "Collective matmuls" in (tmp_path / "plan.html").read_text(encoding="utf8")
    assert "matmul–collective pairs" not in str(mlp_plan("off"))
