"""Operations out of HLO text: written by hand as the TPU compiler does, and compiled for CPUs with counts known beforehand."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshpar._src.verify.hlo_flops import flops


def module(line: str, left: str, right: str) -> str:
    return f"""HloModule m
ENTRY %main (a: f32[], b: f32[]) -> f32[] {{
  %a = {left} parameter(0)
  %b = {right} parameter(1)
  ROOT %c = {line}
}}
"""


MATMULS = {  # of the final text for TPUs: all of them matrix products
    "plain": ("bf16[2048,4096]{1,0} convolution(%a, %b), dim_labels=bf_oi->bf", "bf16[2048,2048]", "bf16[4096,2048]",
              2 * 2048 * 4096 * 2048),
    "batch": ("bf16[8,640,1433]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
              "bf16[8,640,512]", "bf16[8,512,1433]", 2 * 8 * 640 * 1433 * 512),
    "two results": ("bf16[512,16,128]{2,0,1} convolution(%a, %b), window={size=16 pad=15_15 rhs_reversal=1}, "
                    "dim_labels=bf0_0oi->b0f", "bf16[512,256,1]", "bf16[16,128,256]", 2 * 512 * 16 * 128 * 256),
    "two summed": ("bf16[409,896,1]{1,0,2} convolution(%a, %b), window={size=4}, dim_labels=0fb_0io->bf0",
                   "bf16[4,512,409]", "bf16[4,512,896]", 2 * 409 * 896 * 4 * 512),
    "both": ("bf16[4,64,2,128]{3,1,2,0} convolution(%a, %b), window={size=1x2 pad=0_0x1_1 rhs_reversal=0x1}, "
             "dim_labels=0bf1_i1o0->0b1f", "bf16[4,64,32,1]", "bf16[32,2,128,1]", 2 * 4 * 64 * 2 * 128 * 32),
    "kernel": ('bf16[8]{0} custom-call(%a, %b), backend_config={"custom_call_config":{"body":"TUzvUg==","cost_estimate":'
               '{"flops":"50331648","transcendentals":"0"}}}', "bf16[8]", "bf16[8]", 50331648),
    "sum": ("bf16[8]{0} add(%a, %b)", "bf16[8]", "bf16[8]", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MATMULS)
def test_what_the_compiler_writes(name):
    line, left, right, expected = MATMULS[name]
    assert flops(module(line, left, right)) == expected


@pytest.mark.parametrize("dilate", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("pad", [0, 2])
def test_a_convolution_by_counting(stride, pad, dilate):
    """A 9×9 picture, 3×5 taps with holes 1 and 2 wide, next to a count one by one."""
    size, taps, dilation = (9, 9), (3, 5), (1, 2)
    extent = [(s - 1) * dilate + 1 for s in size]
    out = [(e + 2 * pad - (t - 1) * a - 1) // stride + 1 for e, t, a in zip(extent, taps, dilation, strict=True)]
    window = (
        f"size=3x5 stride={stride}x{stride} pad={pad}_{pad}x{pad}_{pad} lhs_dilate={dilate}x{dilate} rhs_dilate=1x2"
    )
    line = f"f32[2,{out[0]},{out[1]},6] convolution(%a, %b), window={{{window}}}, dim_labels=b01f_01io->b01f"
    pairs = 0
    for y, x, u, v in itertools.product(*map(range, (*out, *taps))):
        at = (y * stride + u * dilation[0] - pad, x * stride + v * dilation[1] - pad)
        pairs += all(0 <= p < e and p % dilate == 0 for p, e in zip(at, extent, strict=True))
    assert flops(module(line, "f32[2,9,9,4]", "f32[3,5,4,6]")) == 2 * 2 * 6 * 4 * pairs


def test_loops_and_branches():
    """A loop of 5 products, a branch that multiplies and one that does not, and a loop whose end depends on the data."""

    def f(x, n):
        y = lax.fori_loop(0, 5, lambda i, y: y @ x + i, x)
        y = lax.cond(n > 3, lambda: y @ x, lambda: y)
        return lax.while_loop(lambda y: y.sum() < 1e3, lambda y: y @ x, y)

    text = jax.jit(f).lower(jnp.ones((8, 8)), 4).compile().as_text()
    one = 2 * 8**3
    assert flops(text) == 7 * one
    assert flops(text, unknown=0) == 6 * one
    with pytest.raises(ValueError, match="no ENTRY computation"):
        flops("nothing")
