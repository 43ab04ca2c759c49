"""``python -m meshpar``."""

import sys

from ._src.entry.cli import main

sys.exit(main())
