"""Names that meshpar infers, against names given by hand: the same dims, and the same plans under known layouts.

    python benchmarks/naming.py                # all programs: purity, completeness, and plans
    python benchmarks/naming.py FlaxGPT2 --dims    # the dims of each array, by hand and inferred
    python benchmarks/naming.py --search           # planned seconds of the best layout that a search finds, with either names
    python benchmarks/naming.py --check            # each small program runs without names; results equal one device

Programs: the targets of ``examples/`` with their names removed, and models of ``transformers`` and NNX with random weights.

- **purity**: the share of dims whose inferred name means one name by hand; **completeness**: the share of dims of one name by
  hand that have one inferred name. Dims of the weights and of the batch count; equal layers count once. A dim that was not named by
  hand does not count, nor does one of size 1.
- **plans**: for each layout, the bytes sent, the peak and the planned seconds with inferred names, divided by those with names by
  hand. A plan counts as good if each is at most 1.02.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import flax
import jax
import jax.numpy as jnp
import optax
from tables import Table

import meshpar as mp
from meshpar._src.entry.cli_target import Target, concrete
from meshpar._src.flax import metadata
from meshpar._src.search import SearchOptions, search

sys.path.append(str(Path(__file__).parents[1] / "examples"))

Shape = jax.ShapeDtypeStruct


class Program(NamedTuple):
    """A step, its arguments, and names by hand: path patterns → dims; with ``by_metadata``, Flax metadata in the arguments."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    dims: Mapping[str, str]


SYNONYMS = {
    "features": "channels", "expert": "experts", "choice": "experts", "router": "experts", "expert_mlp": "mlp",
    "shared_mlp": "mlp", "kv_rank": "rank", "hidden": "mlp", "rows": "vocab", "source": "seq", "target": "seq",
    "masked": "seq", "interaction": "mlp",
}  # fmt: skip
"""Names by hand that are another word for a standard name, or a narrower one."""
LAYOUTS = {
    "data parallel": "batch: data",
    "ZeRO-1": "batch, opt.embed?: data",
    "FSDP": "batch, embed?: data",
    "Megatron": "batch: data; heads?, kv_heads?, mlp?, vocab?: model",
    "FSDP + Megatron": "batch: data; heads?, kv_heads?, mlp?, vocab?: model; embed?: data",
    "sequence": "batch: data; heads?, kv_heads?, mlp?, vocab?: model; embed?: data; seq?: model",
    "experts": "expert?, experts?: model; batch: data; embed?: data",
}
MESH, TOPOLOGY = "data=8, model=4", "v5e:4x8"
SEARCHED = 150
"""Plans of a search."""
GOOD = 1.02
"""The largest ratio to the plan with names by hand at which a plan counts as good."""


# -- programs


def step_of(loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any, dims: Mapping[str, str]) -> Program:
    """A train step with AdamW."""
    optimizer = optax.adamw(1e-3)

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

    state = jax.eval_shape(lambda p: {"params": p, "opt_state": optimizer.init(p)}, params)
    return Program(step, (state, batch), dims)


def example(module: str, target: str, **changes: Any) -> Callable[[], Program]:
    """A target of ``examples/``."""
    return lambda: Program(*getattr(importlib.import_module(module), target)(**changes))


TOKENS, DECODED, IMAGES = Shape((32, 96), jnp.int32), Shape((32, 80), jnp.int32), Shape((32, 32, 32, 3), jnp.float32)
VOCAB, EMBED, HEADS, MLP = 1024, 256, 8, 640
ENCODER = {
    "vocab_size": VOCAB, "hidden_size": EMBED, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": MLP, "max_position_embeddings": 128,
}  # fmt: skip
BART = {
    "vocab_size": VOCAB, "d_model": EMBED, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": MLP, "decoder_ffn_dim": MLP, "max_position_embeddings": 128,
    "dropout": 0.0,
}  # fmt: skip
IMAGE = {
    "hidden_size": EMBED, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": MLP, "image_size": 32,
    "patch_size": 8, "num_labels": 16,
}  # fmt: skip
BY_HAND = {  # of transformers' models
    "*/{query,key,value,q_proj,k_proj,v_proj,q_lin,k_lin,v_lin,q,k,v}/kernel": "embed heads",
    "*/{query,key,value,q_proj,k_proj,v_proj,q_lin,k_lin,v_lin}/bias": "heads",
    "*/{out_proj,o_proj,out_lin,o}/kernel": "heads embed",
    "*/attention/output/dense/kernel": "heads embed",
    "*/attention/dense/kernel": "heads embed",
    "*/{intermediate/dense,ffn,lin1,fc1,fc_in,gate_proj,up_proj,wi,wi_0,wi_1}/kernel": "embed mlp",
    "*/{intermediate/dense,ffn,lin1,fc1,fc_in}/bias": "mlp",
    "*/{output/dense,ffn_output,lin2,fc2,fc_out,down_proj,wo}/kernel": "mlp embed",
    "*/relative_attention_bias/embedding": "_ heads",
    "*/{position_embeddings,position_embedding,embed_positions,wpe,token_type_embeddings}/embedding": "_ embed",
    "*/{word_embeddings,token_embedding,embed_tokens,wte,shared}/embedding": "vocab embed",
    "*/position_embeddings": "_ _ embed",
    "*/{cls_token,mask_token}": "...",
    "*/{patch_embedding,projection}/kernel": "_ _ _ embed",
    "*/lm_head/kernel": "embed vocab",
    "*/{lm_head,generator_lm_head,predictions,vocab_projector}/bias": "vocab",
    "*/final_logits_bias": "_ vocab",
    "*/{text,visual}_projection/kernel": "embed _",
    "*/{transform,vocab_transform,predictions/dense,lm_head/dense}/kernel": "embed _",
    "*/classifier/kernel": "embed classes",
    "*/classifier/bias": "classes",
    "batch/{tokens,positions,labels,decoder,decoder_positions}": "batch seq",
    "batch/images": "batch height width _",
    "batch/classes": "batch",
    "*/{bias,scale,weight}": "embed",
    "*/{lambda1,lambda_1,lambda_2,class_embedding}": "embed",
}
GROUPED = {
    "*/{k_proj,v_proj}/kernel": "embed kv_heads",
}


OTHERS = {"mask": jnp.ones_like, "zeros": jnp.zeros_like, "none": lambda tokens: None}
"""Arguments of models that are no keys of the batch → a function of the tokens before them."""


def transformer(
    kind: str, model: str, config: dict[str, Any], inputs: Sequence[str], hand: Mapping[str, str] = {}
) -> Callable[[], Program]:  # fmt: skip
    """A Flax model of transformers; ``inputs``: its arguments, as keys of the batch or ``OTHERS``."""

    def made() -> Program:
        import transformers

        transformers.logging.set_verbosity_error()
        module = importlib.import_module(f"transformers.models.{kind}.modeling_flax_{kind}")
        name = model.removeprefix("Flax")
        family = next(
            c for c in dir(transformers) if c.endswith("Config") and name.startswith(c[:-6]) and c != "Config"
        )
        net = getattr(module, model)(getattr(transformers, family)(**config))
        sizes = {"tokens": TOKENS, "positions": TOKENS, "labels": TOKENS, "images": IMAGES, "decoder": DECODED}
        sizes |= {"decoder_positions": DECODED, "classes": Shape((32,), jnp.int32)}
        batch = {x: sizes[x] for x in inputs if x in sizes}
        seq2seq = "decoder" in batch
        target = "classes" if "images" in batch and "tokens" not in batch else "labels" if "MaskedLM" in model else None
        if target:
            batch[target] = sizes[target]

        def arguments(batch: Any) -> list[Any]:
            made: list[Any] = []
            last: Any = None
            for x in inputs:
                made.append(OTHERS[x](last) if x in OTHERS else batch[x])
                last = made[-1] if x in ("tokens", "decoder") else last
            return made

        def loss(params: Any, batch: Any) -> jax.Array:
            out = net.apply({"params": params}, *arguments(batch), return_dict=False)[0].astype(jnp.float32)
            if target is None and not seq2seq and "images" in batch:  # contrastive
                return optax.softmax_cross_entropy_with_integer_labels(out, jnp.arange(out.shape[0])).mean()
            if target:
                return optax.softmax_cross_entropy_with_integer_labels(out, batch[target]).mean()
            if seq2seq:
                return optax.softmax_cross_entropy_with_integer_labels(out, batch["decoder"]).mean()
            return optax.softmax_cross_entropy_with_integer_labels(out[:, :-1], batch["tokens"][:, 1:]).mean()

        params = jax.eval_shape(lambda key, b: net.init(key, *arguments(b)), jax.random.key(0), batch)["params"]
        return step_of(loss, params, batch, {**hand, **BY_HAND})

    return made


TEXT, MASKED = ("tokens", "mask", "positions"), ("tokens", "mask", "zeros", "positions", "none")
TO_TEXT = ("tokens", "mask", "decoder", "mask", "positions", "decoder_positions")
PROGRAMS: dict[str, Callable[[], Program]] = {
    "Llama 3 8B": example("llama", "llama3_8b", batch=64, seq=1024),
    "Mixtral 8x7B": example("mixtral", "mixtral_8x7b", batch=64, seq=1024),
    "DeepSeek 16B": example("deepseek", "deepseek_16b", batch=64, seq=1024),
    "GPT-3 175B": example("gpt3_bert_vit", "gpt3_175b", batch=64),
    "BERT": example("gpt3_bert_vit", "bert_base", batch=64),
    "ViT-22B": example("gpt3_bert_vit", "vit_22b", batch=64),
    "ResNet-50": example("resnet", "resnet50"),
    "EfficientNet-B7": example("convnets", "efficientnet_b7"),
    "AmoebaNet-D": example("convnets", "amoebanet_d"),
    "DeepLab": example("segmentation", "cityscapes"),
    "SimCLR": example("simclr", "simclr"),
    "DLRM": example("dlrm", "dlrm"),
    "FlaxGPT2": transformer(
        "gpt2",
        "FlaxGPT2LMHeadModule",
        {"vocab_size": VOCAB, "n_positions": 128, "n_embd": EMBED, "n_layer": 2, "n_head": HEADS}
        | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
        TEXT,
        {
            "*/c_attn/kernel": "_ embed",
            "*/c_attn/bias": "_",
            "*/attn/c_proj/kernel": "embed heads",
            "*/c_fc/kernel": "mlp embed",
            "*/c_fc/bias": "mlp",
            "*/mlp/c_proj/kernel": "embed mlp",
        },
    ),
    "FlaxLlama": transformer(
        "llama", "FlaxLlamaForCausalLMModule", ENCODER | {"num_key_value_heads": 4}, TEXT, GROUPED
    ),
    "FlaxGemma": transformer(
        "gemma", "FlaxGemmaForCausalLMModule", ENCODER | {"num_key_value_heads": 4, "head_dim": 48}, TEXT, GROUPED
    ),
    "FlaxMistral": transformer(
        "mistral",
        "FlaxMistralForCausalLMModule",
        ENCODER | {"num_key_value_heads": 4, "sliding_window": 32},
        TEXT,
        GROUPED,
    ),
    "FlaxGPTJ": transformer(
        "gptj",
        "FlaxGPTJForCausalLMModule",
        {"vocab_size": VOCAB, "n_positions": 128, "n_embd": EMBED, "n_layer": 2, "n_head": HEADS, "rotary_dim": 16}
        | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
        TEXT,
    ),
    "FlaxGPTNeo": transformer(
        "gpt_neo",
        "FlaxGPTNeoForCausalLMModule",
        {
            "vocab_size": VOCAB,
            "max_position_embeddings": 128,
            "hidden_size": EMBED,
            "num_layers": 2,
            "num_heads": HEADS,
            "attention_types": [[["global"], 2]],
        }
        | dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), 0.0),
        TEXT,
        {"*/c_fc/kernel": "embed mlp", "*/c_fc/bias": "mlp", "*/c_proj/kernel": "mlp embed"},
    ),
    "FlaxOPT": transformer(
        "opt",
        "FlaxOPTForCausalLMModule",
        {
            "vocab_size": VOCAB,
            "hidden_size": EMBED,
            "num_hidden_layers": 2,
            "ffn_dim": MLP,
            "max_position_embeddings": 128,
            "num_attention_heads": HEADS,
            "word_embed_proj_dim": EMBED,
        },
        TEXT,
    ),
    "FlaxXGLM": transformer(
        "xglm",
        "FlaxXGLMForCausalLMModule",
        {
            "vocab_size": VOCAB,
            "d_model": EMBED,
            "ffn_dim": MLP,
            "num_layers": 2,
            "attention_heads": HEADS,
            "max_position_embeddings": 128,
            "dropout": 0.0,
        },
        TEXT,
    ),
    "FlaxBert": transformer("bert", "FlaxBertForMaskedLMModule", ENCODER, MASKED),
    "FlaxRoberta": transformer("roberta", "FlaxRobertaForMaskedLMModule", ENCODER, MASKED),
    "FlaxElectra": transformer(
        "electra",
        "FlaxElectraForMaskedLMModule",
        ENCODER | {"embedding_size": 128},
        MASKED,
        {
            "*/embeddings_project/kernel": "_ embed",
            "*/generator_predictions/dense/kernel": "embed _",
            "*/embeddings/*": "...",
            "*/generator_predictions/*": "...",
        },
    ),
    "FlaxAlbert": transformer(
        "albert",
        "FlaxAlbertForMaskedLMModule",
        ENCODER | {"embedding_size": 128},
        MASKED[:-1],
        {
            "*/embedding_hidden_mapping_in/kernel": "_ embed",
            "*/embeddings/*": "...",
            "*/predictions/LayerNorm/*": "_",
            "*/predictions/dense/bias": "_",
        },
    ),
    "FlaxDistilBert": transformer(
        "distilbert",
        "FlaxDistilBertForMaskedLMModule",
        {
            "vocab_size": VOCAB,
            "dim": EMBED,
            "n_layers": 2,
            "n_heads": HEADS,
            "hidden_dim": MLP,
            "max_position_embeddings": 128,
        },
        ("tokens", "mask"),
    ),
    "FlaxT5": transformer(
        "t5",
        "FlaxT5ForConditionalGenerationModule",
        {
            "vocab_size": VOCAB,
            "d_model": EMBED,
            "d_kv": 32,
            "d_ff": MLP,
            "num_layers": 2,
            "num_heads": HEADS,
            "dropout_rate": 0.0,
        },
        ("tokens", "mask", "decoder", "mask"),
    ),
    "FlaxBart": transformer("bart", "FlaxBartForConditionalGenerationModule", BART, TO_TEXT),
    "FlaxMarian": transformer(
        "marian", "FlaxMarianMTModule", BART | {"pad_token_id": 0, "decoder_start_token_id": 0}, TO_TEXT
    ),
    "FlaxPegasus": transformer("pegasus", "FlaxPegasusForConditionalGenerationModule", BART, TO_TEXT),
    "FlaxViT": transformer("vit", "FlaxViTForImageClassificationModule", IMAGE, ("images",)),
    "FlaxBeit": transformer("beit", "FlaxBeitForImageClassificationModule", IMAGE | {"vocab_size": VOCAB}, ("images",)),
    "FlaxDinov2": transformer(
        "dinov2",
        "FlaxDinov2ForImageClassificationModule",
        {k: v for k, v in IMAGE.items() if k != "intermediate_size"},
        ("images",),
        {"*/classifier/kernel": "_ classes"},
    ),
    "FlaxCLIP": transformer(
        "clip",
        "FlaxCLIPModule",
        {"text_config": ENCODER, "vision_config": IMAGE, "projection_dim": 160},
        ("tokens", "images", "mask", "positions"),
    ),
}


# -- comparison


def dims_by_hand(plan: mp.Plan) -> dict[str, tuple[str | None, ...]]:
    """Path → names, of the arguments of a plan but optimizer state."""
    program = plan.program.traced
    return {v.path or "": program.dims(v) for v in program.inputs if v.kind != "opt" and v.shape}


@contextlib.contextmanager
def no_names() -> Iterator[None]:
    """While a step is traced, the names in its code are ignored: of ``mp.named``, ``mp.rename`` and of sharding constraints."""
    with (
        mock.patch.multiple(mp, named=lambda x, dims: x, rename=lambda x, **names: x),
        mock.patch.object(metadata, "_name", lambda x, *args: x),
    ):
        yield


def clip(x: Any, *bounds: Any, a_min: Any = None, a_max: Any = None, **more: Any) -> Any:
    """``jnp.clip`` with the names of arguments that transformers uses and that JAX no longer has."""
    return CLIP(x, *(bounds or (a_min, a_max)), **more)


CLIP = jnp.clip


def scores(hand: Mapping[str, Sequence[str | None]], ours: Mapping[str, Sequence[str | None]]) -> tuple[float, float]:
    """(purity, completeness) of the dims that a person named; equal layers count once."""
    rows: dict[tuple[str, int], tuple[str, str]] = {}
    for path, names in hand.items():
        for i, (a, b) in enumerate(zip(names, ours.get(path, ()), strict=False)):
            if a is not None and "(" not in a:
                a = SYNONYMS.get(a, a)
                rows[re.sub(r"\d+", "*", path), i] = a, b or "_"
    if not rows:
        return 1.0, 1.0

    def share(group: int, of: int) -> float:
        groups: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for pair in rows.values():
            groups[pair[group]][pair[of]] += 1
        return sum(max(c.values()) for c in groups.values()) / len(rows)

    return share(1, 0), share(0, 1)


def by_hand(program: Program) -> mp.Plan:
    """The plan with names by hand; of patterns that match nothing, none is used."""
    from meshpar._src.dims import PathDims
    from meshpar._src.flax import flatten_named

    patterns = PathDims(program.dims)
    state, batch = program.args
    leaves = [("state", leaf) for leaf in flatten_named(state)] + [("batch", leaf) for leaf in flatten_named(batch)]
    dims = {}
    for name, leaf in leaves:
        path = f"{name}/{leaf.path}"
        match = patterns.match(path)
        if match is not None and leaf.kind != "opt":
            dims[path] = (
                match[1] if len(match[1]) == leaf.value.ndim and ... not in match[1] else (None,) * leaf.value.ndim
            )
    return mp.plan(program.step, *program.args, mesh=MESH, topology=TOPOLOGY, layout="", dims=dims)


def compare(name: str, show: bool, table: Table, plans: list[tuple[str, ...]]) -> list[float]:
    """Add the rows of a program to the tables; (purity, completeness, share of good plans)."""
    program = PROGRAMS[name]()
    hand, ours = both(program)
    names = dims_by_hand(hand), {p: [d.name if d else None for d in n] for p, n in ours.program.traced.inferred.items()}
    if show:
        for path in dict.fromkeys(names[0]):
            texts = [" ".join(x or "_" for x in n.get(path, ())) for n in names]
            print(f"{'' if texts[0] == texts[1] else '*':2}{path:70} {texts[0]:32} {texts[1]}")
    purity, completeness = scores(*names)
    good = 0
    for layout, rules in LAYOUTS.items():
        a, b = (plan.replan(layout=mp.Layout(rules, optional=True)) for plan in (hand, ours))
        ratios = [x / y if y else 1.0 + (x > 0) for x, y in zip(figures(b), figures(a), strict=True)]
        good += max(ratios) <= GOOD
        if max(ratios) > GOOD:
            plans.append((name, layout, *(f"{r:.3f}" for r in ratios)))
    table.add_row(name, f"{purity:.2f}", f"{completeness:.2f}", f"{good} of {len(LAYOUTS)}")
    return [purity, completeness, good / len(LAYOUTS)]


def both(program: Program) -> tuple[mp.Plan, mp.Plan]:
    """The plans of an empty layout, with names by hand and with inferred names."""
    hand = by_hand(program)
    with no_names():
        args = flax.core.meta.unbox(program.args)
        return hand, mp.plan(program.step, *args, mesh=MESH, topology=TOPOLOGY, layout="", dims="auto")


def compare_searches(name: str, table: Table) -> None:
    """Search a layout with either names; add the planned seconds of the best ones to the table."""
    best = [search({"": plan}, TOPOLOGY, SearchOptions(max_plans=SEARCHED)).best for plan in both(PROGRAMS[name]())]
    a, b = (row.seconds for row in best)
    assert a is not None
    assert b is not None
    table.add_row(name, f"{1e3 * a:.2f} ms", f"{1e3 * b:.2f} ms", f"{b / a:.3f}", best[1].layout)


def check(name: str, table: Table) -> None:
    """Run a program without names under FSDP and Megatron on 4 devices, and on one; add its row to the table."""
    program = PROGRAMS[name]()
    with no_names():
        target = Target(name, program.step, flax.core.meta.unbox(program.args), None)
        try:
            args = concrete(target)
        except mp.errors.TargetError:
            table.add_row(name, "-", "too large")
            return
        layout = mp.Layout(LAYOUTS["FSDP + Megatron"], optional=True)
        report = mp.check(target.step, *args, mesh="data=2, model=2", layout=layout, dims="auto")
    table.add_row(name, str(report.rows[0].leaves), "equal" if report.ok else "WRONG")


def figures(plan: mp.Plan) -> tuple[float, float, float]:
    """Bytes sent, peak bytes, seconds."""
    return plan.bytes_sent, plan.memory.peak, plan.seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", choices=[*PROGRAMS, []])
    parser.add_argument("--search", action="store_true", help="compare searches in place of known layouts")
    parser.add_argument("--check", action="store_true", help="run each program that is small, and compare the results")
    parser.add_argument("--dims", action="store_true", help="print the dims of each array, by hand and inferred")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    jnp.clip = clip
    if args.check:
        mp.virtual_devices(4)
        checked = Table("program", "results", "compared with one device")
        for name in args.programs or PROGRAMS:
            check(name, checked)
        return
    if args.search:
        searched = Table("program", "by hand", "inferred", "ratio", "layout with inferred names")
        for name in args.programs or PROGRAMS:
            compare_searches(name, searched)
        return
    table = Table("program", "purity", "completeness", "plans within 2 %")
    worse: list[tuple[str, ...]] = []
    results = []
    for name in args.programs or PROGRAMS:
        results.append(compare(name, args.dims, table, worse))
    mean = [sum(r) / len(results) for r in zip(*results, strict=True)]
    table.add_row(f"mean of {len(results)}", *(f"{x:.3f}" for x in mean))
    print()
    later = Table("program", "layout", "bytes", "peak", "seconds", title="Plans that are worse:")
    for row in worse:
        later.add_row(*row)


if __name__ == "__main__":
    main()
