"""Generated kernels held to the oracles on the machine at hand, a GPU or the CPU machine: ragged batches and hostile data,
times beside the read bandwidth of the same run, and a report to file."""
