"""Tests that need PyTorch: `make test-torch`, in an environment of their own."""
