"""Where the weights of a dense Llama model come from."""

from __future__ import annotations

from typing import Protocol

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import CheckpointError
from expertmesh.formats import NotQuantized
from expertmesh.host_tensor import Array, to_float32
from expertmesh.model_config import DenseFfnConfig, ModelConfig
from expertmesh.model_tools.numbers import from_float32


class DenseSource(Protocol):
    """A dense Llama model, read tensor by tensor."""

    config: ModelConfig

    def tensor(self, name: str) -> Array:
        """A tensor by its Hugging Face name, in the storage form of `config.dtype`."""
        ...


class FolderSource:
    """A model folder in Llama format.

    Raises:
        CheckpointError: the model is not dense, is quantised, or has biases, which Mixtral has no
            place for.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        path = checkpoint.model_dir / "config.json"
        layer = self.config.layers[0]
        if self.config.family != "llama" or not isinstance(layer.ffn, DenseFfnConfig):
            raise CheckpointError(
                f"{path}: model_type: expected 'llama', found {self.config.family!r}",
                fix="only dense Llama models can be upcycled",
            )
        if not isinstance(checkpoint.quantization, NotQuantized):
            raise CheckpointError(
                f"{path}: {checkpoint.quantization.key}: expected nothing, found quantised weights",
                fix="only plain models can be upcycled",
            )
        if layer.gqa.qkv_bias or layer.ffn.bias:
            raise CheckpointError(
                f"{path}: attention_bias and mlp_bias: expected false, found true",
                fix="models with biases cannot become Mixtral models",
            )

    def tensor(self, name: str) -> Array:
        """A tensor by its Hugging Face name."""
        stored = self._checkpoint.stored_tensor(name)
        dtype = self.config.dtype
        if stored.dtype == dtype:
            return stored.data
        return from_float32(to_float32(stored.data, stored.dtype), dtype)
