"""Named arrays, as in Mesh-TensorFlow: every function addresses dims by name.

>>> from meshpar import nd
>>> hidden = nd.relu(nd.einsum(images, w1, out="batch hidden"))
"""

from ._src.nd import *  # noqa: F403
from ._src.nd import __all__ as __all__
