"""`config.json` of each family: what is read, and how each bad value is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertmesh.errors import CheckpointError
from expertmesh.families import load_model_config
from expertmesh.model_config import GateConfig, ModelConfig, MoeFfnConfig, RopeConfig
from expertmesh.model_tools.config_json import config_json
from tests.support.tiny_folders import LLAMA_CONFIG, MIXTRAL_CONFIG

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def load(folder: Path, config: dict[str, object]) -> ModelConfig:
    """The config that a folder with this config.json has."""
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(folder)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5, 4)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeConfig(7.0, 4)),
        ({"rope_theta": None}, RopeConfig(1e4, 4)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(5000.0, 4, "linear", 2.0),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5000.0, 4, "llama3", 8.0, 1.0, 4.0, 64),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 9.0, **LLAMA3}},
            RopeConfig(9.0, 4, "llama3", 8.0, 1.0, 4.0, 64),
        ),
    ],
)
def test_rope_is_read_in_old_and_new_spelling(
    tmp_path: Path, keys: dict[str, object], expected: RopeConfig
) -> None:
    """`rope_theta` with `rope_scaling`, and `rope_parameters`, give the same description."""
    config = load(tmp_path, LLAMA_CONFIG | keys)
    assert expected == config.layers[0].attention.rope


def test_mixtral_layers_have_a_renormalised_softmax_gate(tmp_path: Path) -> None:
    """Every layer of a Mixtral has experts, and the window is optional."""
    config = load(tmp_path, MIXTRAL_CONFIG | {"sliding_window": 32})
    assert MoeFfnConfig(GateConfig(4, 2, renormalize=True), 24) == config.layers[0].ffn
    assert config.moe_layers == (0, 1)
    assert config.layers[1].attention.sliding_window == 32
    assert load(tmp_path, MIXTRAL_CONFIG).layers[0].attention.sliding_window is None


def test_head_dim_may_differ_from_hidden_size_over_heads(tmp_path: Path) -> None:
    """`head_dim` wins over the quotient, and sets scale and widths."""
    attention = load(tmp_path, LLAMA_CONFIG | {"head_dim": 64}).layers[0].attention
    assert (
        attention.head_dim,
        attention.q_size,
        attention.k_size,
        attention.scale,
    ) == (64, 256, 128, 0.125)


def test_end_tokens_of_generation_config_win(tmp_path: Path) -> None:
    """`generation_config.json` decides which tokens end a text, as in transformers."""
    assert load(tmp_path, LLAMA_CONFIG).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load(tmp_path, LLAMA_CONFIG).eos_token_ids == (3, 4)


@pytest.mark.parametrize("raw", [LLAMA_CONFIG, MIXTRAL_CONFIG])
def test_config_json_is_the_inverse_of_reading(tmp_path: Path, raw: dict[str, object]) -> None:
    """A config that is written and read again is the same."""
    rope = {"rope_type": "llama3", "rope_theta": 9.0, **LLAMA3}
    config = load(tmp_path, raw | {"rope_parameters": rope})
    assert config == load(tmp_path, config_json(config))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model_type", "bert", "a supported family ("),
        ("model_type", None, "a supported family"),
        ("architectures", ["MixtralForTokenClassification"], "['MixtralForCausalLM']"),
        ("num_hidden_layers", 10**9, "an integer in [1, 1024]"),
        ("num_hidden_layers", 0, "an integer in [1, 1024]"),
        ("num_hidden_layers", True, "an integer"),
        ("num_local_experts", -1, "an integer in [1, 16384]"),
        ("num_local_experts", 10**9, "an integer in [1, 16384]"),
        ("num_experts_per_tok", 5, "an integer in [1, 4]"),
        ("num_attention_heads", 3, "a divisor of num_attention_heads=3"),
        ("num_key_value_heads", 3, "a divisor of num_attention_heads=4"),
        ("hidden_size", 18, "a multiple of num_attention_heads=4"),
        ("hidden_size", "16", "an integer"),
        ("hidden_size", None, "an integer"),
        ("head_dim", 7, "an even size"),
        ("rms_norm_eps", 1e400, "a number in [0, 1]"),
        ("rms_norm_eps", -1.0, "a number in [0, 1]"),
        ("rope_theta", 0, "a number in [1, 1e+12]"),
        ("rope_scaling", {"type": "dynamic", "factor": 4}, "one of default, linear, llama3, yarn"),
        ("rope_scaling", {"type": "linear"}, "a number"),
        ("partial_rotary_factor", 0.5, "1 (rotation of the whole head)"),
        ("hidden_act", "gelu", "one of silu, swish, gelu_pytorch_tanh"),
        ("dtype", "int8", "one of float32, bfloat16, float16"),
        ("eos_token_id", 40, "integers in [0, 39]"),
        ("sliding_window", 0, "an integer"),
        ("tie_word_embeddings", "yes", "true or false"),
    ],
)
def test_bad_value_is_named(tmp_path: Path, key: str, value: object, expected: str) -> None:
    """The error is one line with file, key, value and what was expected."""
    text = json.dumps(MIXTRAL_CONFIG | {key: value}).replace("Infinity", "1e400")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load_model_config(tmp_path)
    assert expected in caught.value.message
    assert "config.json: " in caught.value.message
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, '"\ud800"', "1" * 5000],
)
def test_file_that_is_not_a_strict_json_object_is_refused(tmp_path: Path, text: str) -> None:
    """Truncated, doubled, endless and non-finite JSON gives one clear line."""
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        load_model_config(tmp_path)


def test_missing_folder_and_file_are_named(tmp_path: Path) -> None:
    """A path without a model says what was expected there."""
    with pytest.raises(CheckpointError, match="nowhere: not a folder") as caught:
        load_model_config(tmp_path / "nowhere")
    assert "`expertmesh model demo`" in (caught.value.fix or "")
    with pytest.raises(CheckpointError, match=r"config\.json: not a file"):
        load_model_config(tmp_path)


def test_code_in_a_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    """`auto_map` of a known family is ignored, its module is not imported."""
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    config = LLAMA_CONFIG | {"auto_map": {"AutoConfig": "evil.Config"}}
    assert load(tmp_path, config).family == "llama"
