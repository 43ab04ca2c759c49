"""A page on which layouts are tried: rules and meshes are edited, figures of the plan follow."""

from .lab import Lab

__all__ = ["Lab"]
