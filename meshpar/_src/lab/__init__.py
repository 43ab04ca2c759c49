"""An interactive page on which rules and meshes are edited and the plan updates."""

from .lab import Lab
