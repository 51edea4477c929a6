"""Model families: one declarative module each; everything else is shared.

A new family is a module with a `Family` and a line in `FAMILIES`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from expertmesh.errors import CheckpointError
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.deepseek_v2 import DEEPSEEK_V2
from expertmesh.families.deepseek_v3 import DEEPSEEK_V3
from expertmesh.families.gemma2 import GEMMA2
from expertmesh.families.gemma3_text import GEMMA3_TEXT
from expertmesh.families.gpt_oss import GPT_OSS
from expertmesh.families.kimi_k2 import KIMI_K2
from expertmesh.families.llama import LLAMA
from expertmesh.families.mimo_v2_flash import MIMO_V2_FLASH
from expertmesh.families.mistral import MISTRAL
from expertmesh.families.mixtral import MIXTRAL
from expertmesh.families.olmoe import OLMOE
from expertmesh.families.qwen2 import QWEN2
from expertmesh.families.qwen2_moe import QWEN2_MOE
from expertmesh.families.qwen3 import QWEN3
from expertmesh.families.qwen3_moe import QWEN3_MOE
from expertmesh.families.rules import ExpertLayout, ExpertRules, Family, ParameterRule, WeightRule
from expertmesh.json_file import read_json_object
from expertmesh.model_config import DtypeName, ModelConfig

__all__ = [
    "FAMILIES",
    "ExpertLayout",
    "ExpertRules",
    "Family",
    "ParameterRule",
    "WeightRule",
    "load_model_config",
]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA2,
        GEMMA3_TEXT,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        KIMI_K2,
        GPT_OSS,
        MIMO_V2_FLASH,
    )
}
"""model_type to family."""

MAX_CONFIG_BYTES = 1 << 20


def load_model_config(model_dir: Path, stored: DtypeName | None = None) -> ModelConfig:
    """Reads `config.json`, and the end tokens of `generation_config.json` if it has them.

    Code named by the checkpoint (`auto_map`) is never loaded.

    Args:
        model_dir: The folder.
        stored: Type of the weights, if known; that of the model where `config.json` names none.

    Raises:
        CheckpointError: the folder, a key or a value is not what a supported family has.
    """
    if not model_dir.is_dir():
        raise CheckpointError(
            f"{model_dir}: not a folder",
            fix="give a folder with config.json; `expertmesh model demo` prints that of the demo",
        )
    path = model_dir / "config.json"
    reader = ConfigReader(path, read_json_object(path, MAX_CONFIG_BYTES))
    family = _family(reader)
    defaults = {**family.defaults, "torch_dtype": stored} if stored else family.defaults
    reader = replace(reader, defaults=defaults)
    config = family.parse_config(reader)
    eos_token_ids = _generation_eos(model_dir, config.vocab_size)
    return replace(config, eos_token_ids=eos_token_ids) if eos_token_ids else config


def _family(reader: ConfigReader) -> Family:
    family = FAMILIES.get(reader.text("model_type"))
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        reader.fail("model_type", f"a supported family ({supported})")
    architectures = reader.raw.get("architectures")
    if architectures and architectures != [family.architecture]:
        reader.fail("architectures", f"['{family.architecture}']")
    return family


def _generation_eos(model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    path = model_dir / "generation_config.json"
    if not path.exists():
        return ()
    reader = ConfigReader(path, read_json_object(path, MAX_CONFIG_BYTES))
    return reader.integers("eos_token_id", 0, vocab_size - 1)
