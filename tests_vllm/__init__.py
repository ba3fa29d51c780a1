"""Tests with vLLM's engine: `make test-vllm`, in an environment of their own."""
