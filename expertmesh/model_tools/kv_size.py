"""What the KV cache takes: pure arithmetic over a model's description."""

from __future__ import annotations

from dataclasses import dataclass

from expertmesh.model_config import ModelConfig


@dataclass(frozen=True)
class KvBytes:
    """Bytes of keys and values, all layers of a kind together."""

    full: int
    """Of layers that see the whole context."""
    window: int
    """Of layers with a sliding window."""

    @property
    def total(self) -> int:
        """Both."""
        return self.full + self.window


def kv_per_token(config: ModelConfig, itemsize: int) -> KvBytes:
    """Bytes that a token takes while all layers still need it."""
    return kv_of_context(config, 1, itemsize)


def kv_of_context(config: ModelConfig, context: int, itemsize: int) -> KvBytes:
    """Bytes that the next token of a request with `context` tokens reads, itself included.

    A window layer needs no more tokens than its window.
    """
    full = window = 0
    for layer in config.layers:
        nbytes = layer.attention.kv.width * seen(layer.attention.sliding_window, context) * itemsize
        if layer.attention.sliding_window is None:
            full += nbytes
        else:
            window += nbytes
    return KvBytes(full, window)


def seen(sliding_window: int | None, context: int) -> int:
    """Keys that the last of `context` tokens sees, itself included."""
    return context if sliding_window is None else min(context, sliding_window)
