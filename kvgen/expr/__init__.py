"""Typed expressions: the only Python that writes C or Python arithmetic; and the tracer of score functions."""
