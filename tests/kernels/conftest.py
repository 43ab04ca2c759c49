"""Set up before jax is imported; and let the tests of this folder import its helpers."""

import os
import sys

# The TPU interpreter simulates devices with threads: enough of them, whatever the machine has.
os.environ.setdefault("NPROC", "32")
sys.path.insert(0, os.path.dirname(__file__))
