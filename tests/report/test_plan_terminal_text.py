"""A plan in the terminal: the bar of a device's memory, colours of axes."""

import io
import re

import jax
import jax.numpy as jnp
import lab_program
import pytest
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.text import Text

import meshpar as mp
from meshpar._src.hardware.chips import GIB
from meshpar._src.report.colours import PALETTE
from meshpar._src.report.document import plain
from meshpar._src.report.facts import collective_groups
from meshpar._src.report.plan_terminal_text import BAR_CELLS, memory_bar
from meshpar._src.report.tables import Wrapped
from meshpar._src.units import format_bytes

DIMS = {"w": "embed mlp", "x": "batch embed"}
ARGS = (jax.ShapeDtypeStruct((256, 512), jnp.float32), jax.ShapeDtypeStruct((64, 256), jnp.float32))


def styles_of(text):
    """The text of every span of a rich text, with its style."""
    return {(text.plain[s.start : s.end], str(s.style)) for s in text.spans}


@pytest.mark.parametrize(
    ("peak", "filled", "colour"),
    [
        (0.001, 1, PALETTE[0]),
        (4, 5, PALETTE[0]),
        (13.5, 17, PALETTE[0]),
        (13.7, 17, "yellow"),
        (16, 20, "yellow"),
        (40, 20, "red"),
    ],
)
def test_the_bar_of_a_devices_memory(peak, filled, colour):
    bar = memory_bar(peak * GIB, 16 * GIB)
    assert bar.plain.count("█") == filled
    assert bar.plain.count("█") + bar.plain.count("░") == BAR_CELLS
    assert bar.plain.endswith(f"] {peak / 16:.0%}".replace("%", " %"))
    assert {style.removeprefix("bold ") for text, style in styles_of(bar) if "█" in text} == {colour}


def test_the_head_has_the_rate_of_tokens_and_the_share_of_the_step_that_sends():
    tokens, table = jax.ShapeDtypeStruct((64, 512), jnp.int32), jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    dims = {"table": "vocab embed", "tokens": "batch seq"}

    def loss(table, tokens):
        return jnp.square(table[tokens] @ table.T).mean()

    where = {"mesh": "data=8", "topology": "tpu7x:2x2x1", "layout": "batch, vocab: data"}
    plan = mp.plan(jax.grad(loss), table, tokens, dims=dims, **where)
    text = plain(plan, 160)
    assert f"{64 * 512 / plan.seconds / 4:,.0f} tokens/s a chip" in text  # of two devices
    (bar,) = (line.partition("[")[2].partition("]")[0] for line in text.splitlines() if line.startswith("  sends"))
    share = sum(c.total_seconds for c in plan.collectives) / plan.seconds
    assert 0.02 < share < 0.98
    assert bar.count("█") == pytest.approx(BAR_CELLS * share, abs=0.5)
    assert len(bar) == BAR_CELLS


@pytest.mark.parametrize(("rows", "label"), [(13.3, "fits"), (13.5, "tight"), (15.8, "too large")])
def test_a_plan_above_the_memory_that_a_search_allows_is_tight(rows, label):
    """``rows`` × 1 GiB of weights on a device with 15.75 GiB, of which a search allows 85 %, 13.39 GiB."""
    weights = jax.ShapeDtypeStruct((int(rows * 2**14), 2**14), jnp.float32)
    x, where = jax.ShapeDtypeStruct((4, weights.shape[0]), jnp.float32), "v5e:2x2"
    layout, dims = "batch: data", {"x": "batch embed"}
    plan = mp.plan(lambda w, x: x @ w, weights, x, mesh="data=4", topology=where, layout=layout, dims=dims)
    lines = [line.split() for line in str(plan).splitlines()]
    assert [label.split()[0]] == [words[0] for words in lines if words and words[0] in ("fits", "tight", "too")]
    assert ("a search allows 85 %" in str(plan)) == (label == "tight")
    assert ('<b class="tight">Tight' in plan._repr_html_()) == (label == "tight")
    assert f"batch 4 × embed {weights.shape[0]:,}" in str(plan)


@pytest.mark.parametrize("width", range(9, 40))
def test_separators_end_lines_and_are_never_alone(width):
    items = ["one", "two two", "three three three", "four four", "five"]
    lines = plain(Wrapped([Text(item) for item in items], " · ", Text("head")), width).split("\n")
    assert max(map(len, lines)) <= width
    assert not any(line.strip() == "·" or line.lstrip().startswith("·") or line != line.rstrip() for line in lines)
    assert " ".join(lines).split() == f"head {' · '.join(items)}".split()


def test_a_plan_with_colours_has_the_same_text():
    options = {"mesh": "data=4, model=2", "topology": "v5e:2x4", "layout": "batch: data; mlp: model", "dims": DIMS}
    plan = mp.plan(lambda w, x: jnp.tanh(x @ w), *ARGS, **options)
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=True, color_system="truecolor").print(plan)
    decoded = "\n".join(line.plain.rstrip() for line in AnsiDecoder().decode(out.getvalue())).strip()
    assert decoded == str(plan).strip()
    assert "░] 0 %  " in str(plan)


def test_collectives_of_a_known_chip_are_ordered_by_time():
    """Many short all-reduces of scalars send less than one of a weight's gradient, and take longer."""

    def fn(w, x):
        largest = sum((x * k).max() for k in range(40))
        return x.T @ (x @ w), largest

    def plan(topology):
        return mp.plan(fn, *ARGS, mesh="data=8", topology=topology, layout="batch: data", dims=DIMS)

    timed, untimed = plan("v5e:2x4"), plan(None)
    for each, cost in ((timed, "seconds"), (untimed, "bytes")):
        costs = [getattr(g, cost) for g in collective_groups(each.collectives)]
        assert costs == sorted(costs, reverse=True)
    first = [collective_groups(p.collectives)[0] for p in (timed, untimed)]
    assert first[0].bytes < first[1].bytes
    assert 'plan.save("plan.html")' in str(untimed)  # the scalars are less than 1 % of the bytes


@pytest.mark.parametrize(
    ("layout", "mesh", "why"),
    [
        (
            "batch: data; embed, mlp: model",
            "data=4, model=4",
            "",
        ),
        (
            "batch, embed, mlp: data",
            "data=16",
            "`mlp: data`: `embed` or `batch` already takes `data` in {n} of the {n} arrays with `mlp`",
        ),
        ("batch: data; layers?: model", "data=2, model=8", "`layers?: model`: 8 does not divide 4"),
    ],
)
def test_a_rule_that_shards_nothing_is_named_with_the_reason(layout, mesh, why):
    text = " ".join(plain(lab_program.planned(mesh, layout), 160).split())
    head = text.partition(" lowering ")[0]
    said = head.partition(" no effect ")[2]
    assert re.sub(r"\d+ of the \d+", "{n} of the {n}", said) == why


@pytest.mark.parametrize(
    ("mesh", "topology", "says"),
    [
        ("slice=2, data=8", "2x v5e:2x4", "(slice 2 × data 8); slice connects the slices, over DCN"),
        ("data=16", "2x h100:8", "(data 16); data connects the nodes"),
        ("data=8", "v5e:2x4", "(data 8)"),
    ],
)
def test_the_head_says_which_axis_connects_slices_and_what_it_sends(mesh, topology, says):
    layout = "batch: slice+data; embed: data" if "slice" in mesh else "batch, embed: data"
    plan = lab_program.planned(mesh, layout, topology)
    text = " ".join(plain(plan, 160).split())
    assert f" of {topology} {says} inputs " in text
    assert (f"between {'nodes' if 'h100' in topology else 'slices'} {format_bytes(plan.dcn_bytes)}" in text) == (
        "connects" in says
    )
