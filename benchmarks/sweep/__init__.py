"""What `kvgen init` reads of every decoder of transformers, beside transformers' own modules (`benchmarks/model_sweep.py`)."""
