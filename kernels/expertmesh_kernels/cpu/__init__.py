"""Numba kernels. Each takes plain arrays, and runs on one thread without the GIL."""
