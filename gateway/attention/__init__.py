"""Attention workers as child processes, and the streams to them."""
