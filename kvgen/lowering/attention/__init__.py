"""Decode in numbers: how a step's tokens are split, masks and scores, and one module a kind of kernel."""
