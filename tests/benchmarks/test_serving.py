"""Decoding sends no more than hand-written PartitionSpecs, in compiled programs of 8 CPU devices."""

import dataclasses

import covering
import pytest
import serving

import llama

CONFIG = dataclasses.replace(llama.TINY, embed=64, heads=8, kv_heads=4, head_dim=8, mlp=128, vocab=64, layers=1)
BATCH, LENGTH = 8, 64


SENT = [c for c in serving.CASES if c.name != "flash decoding, all devices"]


@pytest.mark.parametrize(("case", "kv_heads"), covering.each(SENT, [4, 1]), ids=[c.name for c in SENT])
def test_a_step_sends_no_more_than_hand_written_specs(case, kv_heads):
    config = dataclasses.replace(CONFIG, kv_heads=kv_heads)
    sent = serving.programs(case, config, BATCH, LENGTH, None)
    ours, by_hand = (sum(c.total_bytes for c in sent[how]) for how in ("meshpar", "by hand"))
    assert ours <= by_hand


def test_a_cache_sharded_by_length_sends_softmax_statistics_and_outputs_only():
    (case,) = (c for c in serving.CASES if c not in SENT)
    programs = serving.programs(case, CONFIG, BATCH, LENGTH, None)
    sent = programs["meshpar"]
    assert {c.op for c in sent} == {"all-reduce"}
    devices = 8
    numbers = BATCH * CONFIG.heads * (1 + 1 + CONFIG.head_dim)  # the maximum, the sum and the output of every head
    total, by_hand = (sum(c.total_bytes for c in programs[how]) for how in ("meshpar", "by hand"))
    assert total == CONFIG.layers * numbers * 4 * 2 * (devices - 1) / devices
    assert total <= by_hand
