"""Attention over a window and compressed entries: a layer stated in NumPy, and what kvgen's operations make of the same rows."""
