"""Structured output: what a client asks for, and the grammar that makes the model obey."""
