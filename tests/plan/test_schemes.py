"""One line of layout gives the known schemes: what must come out of the plan, per layer."""

from collections import Counter

import jax
import pytest
from jax.sharding import PartitionSpec
from planned_transformer import F32, LAYERS, MEGATRON, PARAMS, plan_of


def in_layers(plan, op=None, dims=None):
    """Collectives that run once in every layer, as (op, axes, dims) → executions a layer."""
    found = Counter()
    for c in plan.collectives:
        each = c.count is not None and c.count >= LAYERS and c.count % LAYERS == 0
        if each and op in (None, c.op) and (dims is None or dims in c.dims):
            found[c.op, "+".join(c.axes), c.dims] += c.count // LAYERS
    return found


ACTIVATION = "batch seq embed"


def test_data_parallel_is_one_gradient_all_reduce():
    plan = plan_of("batch: data")
    assert {c.op for c in plan.collectives} == {"all-reduce"}
    gradients = [c for c in plan.collectives if c.shape]
    # each weight's gradient once, over all layers
    sent = sum(c.total_bytes for c in gradients)
    weights = sum(x.size * F32 for x in jax.tree.leaves(PARAMS))
    assert sent == pytest.approx(2 * weights * 3 / 4)
    assert all(h.spec == PartitionSpec() for h in plan.inputs if h.kind == "params")


def test_megatron_is_one_all_reduce_after_attention_and_one_after_the_mlp_each_way():
    found = in_layers(plan_of(MEGATRON), dims=ACTIVATION)
    assert found == {("all-reduce", "model", ACTIVATION): 4}


def test_fsdp_gathers_weights_at_use_and_never_all_reduces_a_gradient():
    plan = plan_of("batch: data; embed: data")
    weights = [c for c in plan.collectives if len(c.shape) > 1 and "batch" not in c.dims]
    assert {c.op for c in weights} == {"all-gather", "reduce-scatter"}
    gathered = in_layers(plan, "all-gather")
    # q, k, v and up, once forward and once backward; o and down likewise
    assert gathered["all-gather", "data", "embed heads head_dim"] == 6
    assert gathered["all-gather", "data", "heads head_dim embed"] == 2
    assert gathered["all-gather", "data", "embed mlp"] == 2
    scattered = in_layers(plan, "reduce-scatter")
    assert sum(scattered.values()) == 6
    assert not any("batch" in c.dims for c in plan.collectives)
    for held in plan.inputs:
        if held.kind in ("params", "opt") and held.shape:
            assert "data" in tuple(held.spec), held.path


def test_sequence_parallel_gathers_into_and_scatters_out_of_each_block():
    found = in_layers(plan_of(f"{MEGATRON}; embed: data; seq: model"), dims=ACTIVATION)
    # forward: gather into attention and into the MLP; backward: the same values again, and the two cotangents
    assert found["all-gather", "model", ACTIVATION] == 6
    assert found["reduce-scatter", "model", ACTIVATION] == 4
    assert ("all-reduce", "model", ACTIVATION) not in found


def test_zero_1_scatters_gradients_into_a_sharded_update_and_gathers_new_weights():
    plan = plan_of("batch: data; opt.embed: data")
    for held in plan.inputs:
        if held.shape and held.kind == "opt":
            assert "data" in tuple(held.spec), held.path
        elif held.kind == "params":
            assert held.spec == PartitionSpec(), held.path
    weights = [c for c in plan.collectives if len(c.shape) > 1 and "batch" not in c.dims]
    assert {c.op for c in weights} == {"reduce-scatter", "all-gather"}
    total = sum(x.size * F32 for x in jax.tree.leaves(PARAMS))
    for op in ("reduce-scatter", "all-gather"):
        assert sum(c.total_bytes for c in weights if c.op == op) == pytest.approx(total * 3 / 4)


def test_context_parallel_gathers_keys_and_values():
    found = {key: n for key, n in in_layers(plan_of("seq: data", rename=True)).items() if "batch" in key[2]}
    assert found == {
        ("all-gather", "data", "batch kv_seq heads head_dim"): 2,  # k and v; kept for the backward pass
        ("reduce-scatter", "data", "batch seq heads head_dim"): 2,  # their cotangents
    }


def test_without_rename_the_query_side_keeps_the_axis_and_the_key_side_is_gathered():
    found = {key: n for key, n in in_layers(plan_of("seq: data")).items() if "batch" in key[2]}
    dims = "batch seq heads head_dim"  # what the forward pass gathered is not kept across the loop
    assert found == {("all-gather", "data", dims): 4, ("reduce-scatter", "data", dims): 2}


@pytest.mark.parametrize("order", [("batch", "embed"), ("embed", "batch")])
def test_a_flax_rule_list_is_a_layout_that_sends_at_most_as_much_as_its_text(order):
    rules = [*((dim, "data") for dim in order), ("mlp", "model"), ("vocab", ("model",)), ("kv", None)]
    plan, text = plan_of(rules), plan_of(f"{', '.join(order)}: data; mlp, vocab: model")
    assert [h.spec for h in plan.inputs] == [h.spec for h in text.inputs]
    assert plan.bytes_sent < text.bytes_sent
    up = next(h for h in plan.inputs if h.path == "state/params/up")
    assert up.spec == PartitionSpec(None, "data", "model")
