"""Models from packages, unedited: the same state as the unsharded run, from path patterns alone."""

import jax
import numpy as np
import pytest

import meshpar as mp

third_party = pytest.importorskip("third_party")


@pytest.mark.slow
def test_same_state():
    case = third_party.CASES["resnet"]()
    state = jax.jit(case.create)(jax.random.key(0))
    dims = {f"state/{pattern}": names for pattern, names in case.weights.items()} | case.data
    how = {"layout": "batch: data; features, classes: model", "mesh": "data=2, model=2, idle=2", "lowerings": ["jit"]}
    assert mp.check(case.step, state, case.batch, dims=dims, **how).ok


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TensorFlow and JAX classes are deprecated")
def test_generation_of_tokens():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 1, "n_head": 4}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=255)
    model = transformers.FlaxGPT2LMHeadModel(config, seed=0)

    def generate(params, ids):
        options = {"max_length": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": 255}
        return model.generate(ids, params=params, **options).sequences

    ids = np.random.default_rng(0).integers(1, 250, (8, 6))
    dims = {"*/c_fc/kernel": "mlp embed", "*/mlp/c_proj/kernel": "embed mlp"}
    dims |= {"*/wte/embedding": "vocab embed", "ids": "batch seq"}
    step = mp.jit(generate, mesh="data=4, model=2", layout="batch: data; mlp, vocab: model", dims=dims)
    np.testing.assert_array_equal(step(model.params, ids), generate(model.params, ids))
