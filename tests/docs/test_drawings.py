"""The drawings in docs/static are those that docs/drawings.py makes."""

import re

import drawings
import pytest


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_stored_drawing_is_current(name):
    assert (drawings.FOLDER / name).read_text() == drawings.DRAWINGS[name]()


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb"])
def test_the_bubble_of_a_schedule_is_the_idle_slots_that_are_drawn(name):
    text = drawings.schedule_drawing(name)
    idle, slots = (text.count(fill) for fill in ('fill="var(--line)"', "<rect "))
    (said,) = re.findall(r"(\d+) of the ([\d+ ]+) slots of a stage are idle: bubble (\d+)%", text)
    assert 4 * int(said[0]) == idle - 1  # the legend has one
    of_a_stage = sum(map(int, said[1].split(" + ")))  # in each loop of the stage
    assert 4 * of_a_stage == slots - 1 - text.count('height="12"')  # the background, the legend
    assert int(said[2]) == round(100 * int(said[0]) / of_a_stage)


def test_a_sharded_tensor_has_the_devices_of_each_distinct_shard_and_lines_between_shards():
    import meshpar as mp

    lines = drawings.tensor("embed mlp", (16, 32), mp.Layout("embed: data"), 0, 0, 5)
    texts = [line.split(">")[1].split("<")[0] for line in lines if line.startswith("<text")]
    assert texts[2:] == ["0 1", "2 3", "4 5", "6 7"]
    assert [line.count(f'stroke="{drawings.colour(["data"])}"') for line in lines if "<path" in line] == [1, 1, 1]


def test_the_collectives_of_a_scheme_are_those_of_its_plan():
    """In the literature FSDP gathers weights and scatters gradients, Megatron reduces activations, and sequence parallelism
    gathers and scatters them."""
    want = {
        "data": ["all-reduce gradients"],
        "zero1": ["reduce-scatter gradients", "all-gather weights"],
        "fsdp": ["all-gather weights", "reduce-scatter gradients"],
        "megatron": ["all-reduce activations", "all-reduce gradients"],
        "sequence": ["all-gather activations", "reduce-scatter activations"],
        "pipeline": ["collective-permute activations"],
    }
    for name, collectives in want.items():
        text = drawings.scheme_drawing(name)
        assert [c for c in collectives if f">{c}<" not in text] == []
