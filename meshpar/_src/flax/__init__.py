"""Linen and NNX: names in, modules as arguments."""

from .metadata import Leaf, capture_names, dims_of, flatten_named, key_text, pure_states, variables, with_states
