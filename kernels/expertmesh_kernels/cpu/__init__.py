"""Numba kernels. Each takes plain arrays, allocates little, and runs on one thread without the GIL."""
