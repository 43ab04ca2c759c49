"""GPT-3, BERT and ViT-22B of the examples: published sizes, equal runs under two layouts."""

import math

import jax
import pytest
from arrays import count_weights, drawn
from lowered import same

import gpt3_bert_vit as models
import meshpar as mp


def layer(d, mlp):
    """Weights of a layer with biases and two norms."""
    return 4 * d * d + 4 * d + 2 * d * mlp + mlp + d + 4 * d


def test_gpt3_has_the_published_size():
    d, weights = 12288, count_weights(models.gpt3_175b())
    assert weights == 96 * layer(d, 4 * d) + (50257 + 2048) * d + 2 * d
    assert round(weights / 1e6, -2) == 174_600  # millions, table D.1


@pytest.mark.parametrize(
    ("make", "layers", "d", "published"), [(models.bert_base, 12, 768, 110e6), (models.bert_large, 24, 1024, 340e6)]
)
def test_bert_has_the_published_size(make, layers, d, published):
    weights = count_weights(make())
    embedding = (30522 + 512 + 2) * d + 2 * d
    heads = 2 * (d * d + d) + 2 * d + 30522 + 2 * d + 2
    assert weights == layers * layer(d, 4 * d) + embedding + heads
    assert weights == pytest.approx(published, rel=0.012)


def test_vit_has_the_published_size():
    target, d = models.vit_22b(), 6144
    layers = sum(math.prod(x.shape) for x in jax.tree.leaves(target[1][0]["params"]["layers"]))
    pool = 12 * d * d + d + 4 * d + d + d + 2 * 128  # of out, up and down biases; norms of inputs, queries, keys
    assert layers == 48 * pool
    assert layers == pytest.approx(21_743e6, rel=2e-4)  # millions, table 1
    rest = (14 * 14 * 3 + 1) * d + 256 * d + d + d  # patches, positions, probe, norm
    assert count_weights(target) == layers + rest + pool + (d + 1) * 29593


@pytest.mark.slow
def test_no_layout_changes_a_number():
    """Of BERT; a ViT is on docs/vision.md."""
    step, shapes, dims = models.bert_base(batch=8, **models.TINY, tokens=16, vocab=48, masked=4)
    args = drawn(shapes, 48, segments=2, next=2, masked=16)
    how = {"meshes": ["data=4, model=2"], "lowerings": ["jit"], "tolerance": 1e-4}
    same(step, *args, layout=models.LAYOUTS["sequence_parallel"], dims=dims, **how)


def test_vit_splits_attention_and_mlp_of_a_layer_with_one_all_reduce_each_way():
    step, args, dims = models.vit_22b(batch=1024)
    plan = mp.plan(
        step, *args, dims=dims, mesh="data=8, model=8", topology="v5p:4x4x4", layout="batch: data; heads, mlp: model"
    )
    layers = [c for c in plan.collectives if c.axes == ("model",) and (c.count or 0) >= 48]
    assert {c.op for c in layers} == {"all-reduce"}
    assert sum(c.count for c in layers if "seq" in c.dims.split()) == 3 * 48  # forward, recomputed, backward
