"""What the user wants: caches, operations and sets of them, validated; no CUDA words here."""
