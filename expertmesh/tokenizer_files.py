"""The files beside the weights that tell how text becomes a prompt."""

from __future__ import annotations

from pathlib import Path

from expertmesh.errors import CheckpointError
from expertmesh.json_file import read_json_object

MAX_TEMPLATE_BYTES = 1 << 20
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"


def read_chat_template(model_dir: Path) -> str | None:
    """Source of the chat template: `chat_template.jinja`, else from `tokenizer_config.json`.

    Of several named templates the one named `default` is taken.

    Raises:
        CheckpointError: the template is too large, not UTF-8 or of another form.
    """
    path = model_dir / TEMPLATE_FILE
    if path.is_file():
        return _read_template(path)
    path = model_dir / CONFIG_FILE
    if not path.is_file():
        return None
    template = read_json_object(path).get("chat_template")
    if isinstance(template, list):
        template = _named_default(path, template)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: chat_template: expected a string or a list of named ones")
    return template


def read_special_tokens(model_dir: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and others of `tokenizer_config.json`, as text."""
    path = model_dir / CONFIG_FILE
    if not path.is_file():
        return {}
    found = {}
    for key, value in read_json_object(path).items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found


def _read_template(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{path}: {size} bytes, expected at most {MAX_TEMPLATE_BYTES}")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8: {error}") from error


def _named_default(path: Path, templates: list[object]) -> object:
    for entry in templates:
        if isinstance(entry, dict) and entry.get("name") == "default":
            return entry.get("template")
    raise CheckpointError(f"{path}: chat_template: expected one named 'default'")
