"""What a model's authors recommend for requests that leave sampling open."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from expertmesh.errors import CheckpointError, RequestError
from expertmesh.json_file import read_json_object
from gateway.generation_options import GenerationOptions, convert

FILE = "generation_config.json"

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for parameters that a request does not have; None is the API's own default.

    Args:
        options: Only the parameters of sampling are set.
    """

    options: GenerationOptions = field(default_factory=GenerationOptions)

    @classmethod
    def from_checkpoint(cls, model_dir: Path, vocab_size: int) -> SamplingDefaults:
        """The defaults in `generation_config.json`; those of the API if a folder has none.

        Raises:
            CheckpointError: A value is out of the range that requests have.
        """
        path = model_dir / FILE
        if not path.is_file():
            return cls()
        raw = read_json_object(path)
        found = {name: raw[name] for name in _NAMES if raw.get(name) is not None}
        try:
            options = convert(found, GenerationOptions)
        except RequestError as error:
            raise CheckpointError(
                f"{path}: {error.message}", fix="correct the value or remove it"
            ) from error
        if options.top_k is not None:
            options.top_k = min(options.top_k, vocab_size)
        return cls(options)

    def fill(self, options: GenerationOptions) -> None:
        """Sets what a request leaves open."""
        for name in _NAMES:
            if getattr(options, name) is None:
                setattr(options, name, getattr(self.options, name))
