"""The implementation. Its modules may change in any release; the names of ``meshpar`` and its other modules do not."""
