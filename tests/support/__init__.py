"""What tests share: sets and caches, batches, scenes with canaries, calls held to the oracle."""
