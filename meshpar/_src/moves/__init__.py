"""Moves of trees between layouts and meshes: planned, costed, and run in rounds that bound the memory."""
