"""What `kvgen init` reads of every decoder that transformers has, beside transformers' own modules (`benchmarks/model_sweep.py`)."""
