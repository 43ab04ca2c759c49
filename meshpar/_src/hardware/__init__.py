"""Chips, slices and how long a collective takes on them; nothing here knows programs or plans."""
