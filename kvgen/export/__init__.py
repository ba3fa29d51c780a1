"""A set for engines in C++: its kernels as single files, one header with the structs they take, and how both are built."""
