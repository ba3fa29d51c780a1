"""Forms of kernels: what drawn specs render, and which test executes each."""
