"""Named real shapes, shared by tests and benchmarks.

Sources: the models' published configurations (Mixtral 8x7B; DeepSeek-V3, its technical report;
DeepSeek-V2-Lite; Qwen3-235B-A22B; Llama 3 8B and 70B), and the square 64-group case that is usual in public
grouped-matmul measurements.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MoeShape:
    """One mixture-of-experts layer.

    Attributes:
      embed: width of a token's vector.
      mlp: hidden width of one expert (each has a gate, an up and a down matrix).
      experts: routed experts.
      k: experts of a token.
      score: the router's score function, as in `route`.
      groups, top_groups: groups of experts and how many of them a token may use (1, 1: no limit).
      bias: whether a bias that balances the load is added for the choice.
      renormalize: whether a token's weights are made to sum to one.
      scale: factor on the weights.
    """

    embed: int
    mlp: int
    experts: int
    k: int
    score: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    bias: bool = False
    renormalize: bool = True
    scale: float = 1.0


MODELS = {
    "mixtral-8x7b": MoeShape(embed=4096, mlp=14336, experts=8, k=2),
    "deepseek-v3": MoeShape(
        embed=7168, mlp=2048, experts=256, k=8, score="sigmoid", groups=8, top_groups=4, bias=True, scale=2.5
    ),
    "deepseek-v2-lite": MoeShape(embed=2048, mlp=1408, experts=64, k=6, renormalize=False),
    "qwen3-235b": MoeShape(embed=4096, mlp=1536, experts=128, k=8),
}


@dataclasses.dataclass(frozen=True)
class MatmulShape:
    """`lhs[m, k] @ rhs[groups, k, n]`: m rows in all."""

    m: int
    k: int
    n: int
    groups: int

    @property
    def flops(self) -> int:
        """Floating-point operations that the result needs: 2·m·k·n."""
        return 2 * self.m * self.k * self.n


MATMULS = {
    "g64": MatmulShape(m=8192, k=2048, n=2048, groups=64),
    # 8192 tokens, two experts each; the up matrix represents the gate as well
    "mixtral-8x7b-up": MatmulShape(m=16384, k=4096, n=14336, groups=8),
    "mixtral-8x7b-down": MatmulShape(m=16384, k=14336, n=4096, groups=8),
    # one of 8 devices: 32 of the 256 experts, and 8192 rows for them
    "deepseek-v3-up": MatmulShape(m=8192, k=7168, n=2048, groups=32),
    "deepseek-v3-down": MatmulShape(m=8192, k=2048, n=7168, groups=32),
}


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Attention of one layer over one sequence, in all of the devices together."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int


ATTENTION = {"llama3-8b-128k": AttentionShape(tokens=128 * 1024, heads=32, kv_heads=8, head_dim=128)}


@dataclasses.dataclass(frozen=True)
class FusedShape:
    """A matmul fused with its gather or scatter: `[rows·A, k] @ [k, n]` on each of A devices.

    Attributes:
      rows: of one device's block.
      k, n: contracted and resulting columns on one device.
      gathers: rows are all-gathered before the matmul; else its result is reduce-scattered over them.
    """

    rows: int
    k: int
    n: int
    gathers: bool


# 8192 tokens; sequence and hidden width are sharded over 8 devices (Megatron with sequence parallelism)
FUSED = {
    "llama3-8b-up": FusedShape(rows=1024, k=4096, n=2 * 14336 // 8, gathers=True),
    "llama3-8b-down": FusedShape(rows=1024, k=14336 // 8, n=4096, gathers=False),
    "llama3-70b-up": FusedShape(rows=1024, k=8192, n=2 * 28672 // 8, gathers=True),
    "llama3-70b-down": FusedShape(rows=1024, k=28672 // 8, n=8192, gathers=False),
}
