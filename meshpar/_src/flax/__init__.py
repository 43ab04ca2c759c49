"""Linen and NNX: names in, modules as arguments."""

from .metadata import Leaf, capture_names, flatten_named, key_text, pure_states, variables, with_states
