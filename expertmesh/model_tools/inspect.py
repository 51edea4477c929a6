"""What is in a model folder. With weights, they are checked as strictly as serving does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import SettingsError
from expertmesh.families import load_model_config
from expertmesh.families.config_reader import Json
from expertmesh.formats import read_quantization
from expertmesh.model_config import ModelConfig
from expertmesh.model_tools.facts_json import facts_json
from expertmesh.model_tools.facts_page import count_words, facts_sections, page, size_words
from expertmesh.model_tools.model_facts import DEFAULT_CONTEXT, ModelFacts, model_facts
from expertmesh.model_tools.stored_formats import stored_formats
from expertmesh.shards import INDEX_FILE
from expertmesh.tokenizer_files import read_chat_template

_NOT_CHECKED = "no weights in the folder: nothing but config.json was checked"


@dataclass(frozen=True)
class StoredWeights:
    """What the safetensors files hold."""

    nbytes: int
    """Of all tensors that are used."""
    fingerprint: str


@dataclass(frozen=True)
class Inspection:
    """A folder and its model."""

    facts: ModelFacts
    formats: dict[str, int]
    """How weights are stored, to how many are."""
    weights: StoredWeights | None
    """None: there is nothing but the description."""
    has_tokenizer: bool
    has_chat_template: bool

    def page(self) -> str:
        """All of it to read."""
        return page({**facts_sections(self.facts), "Checkpoint": self._folder()})

    def json(self) -> Json:
        """All of it for programs; keys as in docs/models.md."""
        weights = self.weights
        stored = weights and {"bytes": weights.nbytes, "fingerprint": weights.fingerprint}
        return {
            **facts_json(self.facts),
            "formats": self.formats,
            "weights": stored,
            "tokenizer": self.has_tokenizer,
            "chat_template": self.has_chat_template,
        }

    def _folder(self) -> dict[str, str]:
        lines = {name: f"{count_words(n)} weights" for name, n in self.formats.items()}
        if self.weights is None:
            lines["files"] = _NOT_CHECKED
        else:
            lines["files"] = f"{size_words(self.weights.nbytes)}, complete"
            lines["fingerprint"] = self.weights.fingerprint
        lines["tokenizer"] = "yes" if self.has_tokenizer else "none (prompts as token ids)"
        lines["chat template"] = "yes" if self.has_chat_template else "none"
        return lines


def inspect_model(model_dir: Path, context: int | None = None) -> Inspection:
    """Looks at a folder; `config.json` is enough.

    Args:
        model_dir: The folder.
        context: Tokens of the request for which costs are told; by default 4096, or the most that
            the model takes.

    Raises:
        CheckpointError: the folder cannot be served; or, without weights, no folder with this
            `config.json` could be.
        SettingsError: the model takes no such context.
    """
    weights = None
    if _has_weights(model_dir):
        config, weights = _open(model_dir)
    else:
        config = load_model_config(model_dir)
    return Inspection(
        facts=model_facts(config, _checked(context, config)),
        formats=stored_formats(config, read_quantization(model_dir / "config.json")),
        weights=weights,
        has_tokenizer=(model_dir / "tokenizer.json").is_file(),
        has_chat_template=read_chat_template(model_dir) is not None,
    )


def _has_weights(model_dir: Path) -> bool:
    return (model_dir / INDEX_FILE).exists() or any(model_dir.glob("*.safetensors"))


def _open(model_dir: Path) -> tuple[ModelConfig, StoredWeights]:
    checkpoint = Checkpoint.open(model_dir)
    try:
        config = checkpoint.config
        experts = checkpoint.expert_nbytes() * config.num_experts * len(config.moe_layers)
        nbytes = checkpoint.attention_nbytes() + experts
        return config, StoredWeights(nbytes, checkpoint.fingerprint.hex())
    finally:
        checkpoint.close()


def _checked(context: int | None, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    if context is None:
        return min(DEFAULT_CONTEXT, longest)
    if not 1 <= context <= longest:
        raise SettingsError(
            f"context is {context}, expected 1 to {longest}, which is the most that the model takes"
        )
    return context
