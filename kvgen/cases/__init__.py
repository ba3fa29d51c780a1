"""Cases of each operation: arguments of its call over a batch, the fewest bytes that it moves, its comparison with the oracle."""
