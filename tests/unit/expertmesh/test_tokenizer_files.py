"""Template and special tokens of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from expertmesh.checkpoint import Checkpoint
from tests.support.tiny_folders import LLAMA_CONFIG, llama_tensors, save_folder


def test_tokenizer_files_are_optional(tmp_path: Path) -> None:
    """Template and special tokens come from where transformers keeps them."""
    folder = save_folder(tmp_path, LLAMA_CONFIG, llama_tensors())
    checkpoint = Checkpoint.open(folder)
    assert (
        checkpoint.tokenizer_path,
        checkpoint.chat_template(),
        checkpoint.special_tokens(),
    ) == (None, None, {})
    settings = {
        "eos_token": {"content": "<e>"},
        "bos_token": "<b>",
        "chat_template": [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert checkpoint.chat_template() == "D"
    assert checkpoint.special_tokens() == {"eos_token": "<e>", "bos_token": "<b>"}
    (folder / "chat_template.jinja").write_text("J")
    assert checkpoint.chat_template() == "J"
