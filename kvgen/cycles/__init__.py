"""Time read out of machine code: the trips of a kernel's loops, replayed for the warps that share a multiprocessor."""
