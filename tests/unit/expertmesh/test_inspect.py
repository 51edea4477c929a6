"""`model inspect`: words, page and JSON; with weights and with `config.json` alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import CheckpointError, SettingsError
from expertmesh.families import FAMILIES
from expertmesh.model_config import (
    Activation,
    DenseFfnConfig,
    GateConfig,
    GqaConfig,
    LayerConfig,
    MlaConfig,
    ModelConfig,
    MoeFfnConfig,
    NormConfig,
    RopeConfig,
    SharedExpertConfig,
)
from expertmesh.model_tools.facts_json import facts_json
from expertmesh.model_tools.facts_page import (
    count_words,
    facts_sections,
    operation_words,
    page,
    size_words,
)
from expertmesh.model_tools.inspect import inspect_model
from expertmesh.model_tools.make_tiny import make_tiny
from expertmesh.model_tools.model_facts import model_facts
from expertmesh.model_tools.model_words import (
    attention_kinds,
    attention_pattern,
    attention_words,
    ffn_pattern,
    gate_words,
    pattern,
    rope_words,
)
from tests.support.published_models import CONFIGS
from tests.support.tiny_folders import (
    LLAMA_CONFIG,
    MIXTRAL_CONFIG,
    llama_tensors,
    mixtral_tensors,
    save_folder,
)

DOCS = Path(__file__).resolve().parents[3] / "docs" / "models.md"

GQA = GqaConfig(64, 8, 64, RopeConfig(1e4, 64), 0.125)
MLA = MlaConfig(128, 1536, 512, 128, 64, 128, RopeConfig(1e4, 64, interleaved=True), 0.1)
MOE = MoeFfnConfig(GateConfig(8, 2), 96)
DENSE = DenseFfnConfig(256)


def model(*layers: LayerConfig, family: str = "qwen2_moe") -> ModelConfig:
    """A model with these layers."""
    return ModelConfig(family, 500, 64, layers, NormConfig(1e-6), 8192, False, "bfloat16")


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("", ""),
        ("a", "1 x a"),
        ("aaaa", "4 x a"),
        ("abbb", "1 x a, 3 x b"),
        ("abab", "2 x (1 x a, 1 x b)"),
        ("aaaaab" * 4 + "aa", "4 x (5 x a, 1 x b), 2 x a"),
        ("abbbb" + "abbbbb" * 7 + "a", "1 x a, 4 x b, 7 x (1 x a, 5 x b), 1 x a"),
        ("abc" * 2, "2 x (1 x a, 1 x b, 1 x c)"),
        ("aabab", "2 x a, 1 x b, 1 x a, 1 x b"),
    ],
)
def test_pattern_is_short_and_complete(letters: str, expected: str) -> None:
    """Repeats are found; written out again the pattern is the sequence."""
    assert pattern(letters) == expected
    assert written_out(expected) == letters


def test_kinds_of_layers_have_names_of_their_own() -> None:
    """Also two that differ only in what a label does not tell."""
    sliding = replace(GQA, sliding_window=128)
    other = replace(GQA, rope=RopeConfig(1e6, 64))
    config = model(*(LayerConfig(kind, DENSE) for kind in (sliding, GQA, other, MLA, sliding)))
    assert list(attention_kinds(config).values()) == ["sliding 128", "full", "full (2)", "latent"]
    assert attention_pattern(config) == (
        "1 x sliding 128, 1 x full, 1 x full (2), 1 x latent, 1 x sliding 128"
    )
    experts = model(LayerConfig(GQA, DENSE), *(LayerConfig(GQA, MOE),) * 3)
    assert ffn_pattern(experts) == "1 x dense 256, 3 x MoE"


def test_words_of_attention() -> None:
    """Everything that is special is named, and nothing else."""
    assert attention_words(GQA) == "64 query heads, 8 key/value heads of 64"
    special = replace(
        GQA,
        qkv_bias=True,
        o_bias=True,
        sliding_window=128,
        value_head_dim=32,
        qk_norm="head",
        qkv_clip=8.0,
        value_scale=0.707,
        softcap=50.0,
        sinks=True,
    )
    assert attention_words(special) == (
        "64 query heads, 8 key/value heads of 64 (values 32), window 128, "
        "norm of queries and keys over each head, q, k, v clipped at 8, values x 0.707, "
        "softcap 50, sinks, bias of qkv and o"
    )
    assert attention_words(MLA) == (
        "128 heads of 128 + 64 with rope (values 128), latent 512, query rank 1536"
    )
    assert "full query projection" in attention_words(replace(MLA, q_lora_rank=None))
    assert rope_words(MLA.rope) == "default, theta 10000, 64 dimensions, interleaved"
    assert rope_words(RopeConfig(5e5, 32, "yarn", 32.0)).endswith("32 dimensions, factor 32")


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (GateConfig(8, 2), "softmax of the logits, top 2 of 8, scores / their sum"),
        (
            GateConfig(64, 8, renormalize=False),
            "softmax of the logits, top 8 of 64, scores as they are",
        ),
        (
            GateConfig(32, 4, bias=True),
            "softmax of the logits with bias, top 4 of 32, scores / their sum",
        ),
        (
            GateConfig(
                256,
                8,
                "sigmoid",
                renormalize_eps=1e-20,
                scale=2.5,
                selection_bias=True,
                num_groups=8,
                top_groups=4,
                group_score="top2_sum",
            ),
            "sigmoid of the logits, + selection bias to choose by, "
            "top 4 of 8 groups by the sum of the 2 best of each, top 8 of 256, "
            "scores / (their sum + 1e-20), x 2.5",
        ),
    ],
)
def test_gate_is_told_step_by_step(gate: GateConfig, expected: str) -> None:
    """Scores, choice, weights."""
    assert gate_words(gate) == expected


def test_page_of_a_model_with_everything() -> None:
    """Sections in their order; figures in words."""
    shared = replace(
        MOE,
        activation=Activation("clamped_swiglu", 1.702, 7.0),
        shared=SharedExpertConfig(32, gated=True),
    )
    window = replace(GQA, sliding_window=100)
    facts = model_facts(model(LayerConfig(window, DENSE), LayerConfig(GQA, shared)), 2000)
    sections = facts_sections(facts)
    assert list(sections) == [
        "Model",
        "Attention",
        "KV cache",
        "FFN",
        "Memory for weights, bfloat16",
        "Each generated token, alone in its batch, at a context of 2000",
        "Network for each token, if gates choose evenly",
    ]
    text = re.sub(" +", " ", page(sections))
    for line in (
        "layers 2: 1 x sliding 100, 1 x full",
        "per token 4.00 KiB",
        "of sliding windows 2.00 KiB, within the window only",
        "2000 tokens 4.10 MiB",
        "MoE 8 experts of 96 neurons, clamped_swiglu (alpha 1.702, limit 7)",
        "MoE, shared 32 neurons, x sigmoid of a gate of its own",
        "4 expert workers 72.00 KiB each, 2 experts of a layer",
        "2 expert workers 1.57 rows out (201 bytes), 2 back (256 bytes)",
    ):
        assert f" {line}\n" in text + "\n"


def test_numbers_in_words() -> None:
    """Units at their borders."""
    assert [size_words(n) for n in (0, 1023, 1024, 2**20, 3 * 2**29)] == [
        *("0 bytes", "1023 bytes", "1.00 KiB", "1.00 MiB", "1.50 GiB")
    ]
    assert [count_words(n) for n in (999, 10**6, 46_702_792_704, 1026 * 10**9)] == [
        *("999", "1.00 M", "46.70 B", "1.03 T")
    ]
    assert [operation_words(n) for n in (573_000, 10**9, 143 * 10**10)] == [
        *("0.57 MFLOP", "1.00 GFLOP", "1.43 TFLOP")
    ]


def test_json_is_what_it_says() -> None:
    """Valid JSON without infinity; parts of the model add up."""
    layers = LayerConfig(MLA, DENSE), LayerConfig(MLA, MOE)
    facts = model_facts(model(*layers, family="deepseek_v2"), 10)
    found = json.loads(json.dumps(facts_json(facts), allow_nan=False))
    sizes = found["parameters"]
    assert sizes["total"] == sizes["attention_worker"] + sizes["experts"]
    assert sizes["active"] == sizes["attention_worker"] + sizes["experts"] // 4
    assert [part["kind"] for part in found["attention"]] == ["latent"]
    assert found["attention"][0]["kv_lora_rank"] == 512
    (grouped,) = facts_json(model_facts(model(LayerConfig(GQA, DENSE)), 10))["attention"]
    assert grouped["kind"] == "grouped-query"
    assert [part["kind"] for part in found["ffn"]] == ["dense", "moe"]
    assert found["ffn"][1]["activation"] == {"kind": "silu", "alpha": 1.0, "limit": None}
    assert found["memory"]["attention_worker_bytes"] == facts.attention_worker_nbytes
    assert [entry["workers"] for entry in found["token"]["network"]] == [1, 2, 4, 8]


def test_config_alone_is_enough(tmp_path: Path) -> None:
    """And the page says that nothing else was checked."""
    folder = save_folder(tmp_path / "moe", MIXTRAL_CONFIG, mixtral_tensors())
    whole = inspect_model(folder)
    checkpoint = Checkpoint.open(folder)
    assert whole.weights is not None
    assert whole.weights.fingerprint == checkpoint.fingerprint.hex()
    assert whole.weights.nbytes == 4 * whole.facts.size.total
    assert whole.weights.fingerprint in whole.page()
    checkpoint.close()
    (folder / "model.safetensors").unlink()
    alone = inspect_model(folder)
    assert alone.facts == whole.facts
    assert alone.json()["weights"] is None
    assert "nothing but config.json was checked" in alone.page()


def test_weights_are_checked_if_there_are_any(tmp_path: Path) -> None:
    """As strictly as serving does; also if a shard is all there is, or the index."""
    tensors = llama_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    folder = save_folder(tmp_path / "wrong", LLAMA_CONFIG, tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        inspect_model(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="safetensors"):
        inspect_model(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone"}}')
    with pytest.raises(CheckpointError, match="gone"):
        inspect_model(folder)


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize(
    ("name", "quantization", "codec", "share"),
    [
        ("DeepSeek-V3", FP8, "fp8 in blocks of 128 x 128", 0.997),
        ("gpt-oss-20b", MXFP4, "mxfp4", 0.914),
        ("OLMoE-1B-7B-0924", None, "bfloat16", 1.0),
    ],
)
def test_formats_of_weights_are_told(
    name: str, quantization: object, codec: str, share: float, tmp_path: Path
) -> None:
    """What is quantised, of how many weights; gates, norms and embeddings never are."""
    config = CONFIGS[name] | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect_model(tmp_path)
    total = found.facts.size.total
    assert sum(found.formats.values()) == total
    assert found.formats[codec] / total == pytest.approx(share, abs=1e-3)
    assert found.json()["formats"] == found.formats
    assert f"  {codec} " in found.page()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_can_be_looked_at(model_type: str, tmp_path: Path) -> None:
    """With weights; they take what their number and types say."""
    make_tiny(model_type, tmp_path / "tiny")
    found = inspect_model(tmp_path / "tiny")
    assert found.weights is not None
    assert found.weights.nbytes == 4 * found.facts.size.total
    assert found.formats == {"float32": found.facts.size.total}
    assert model_type in found.page()


def test_unknown_format_is_refused_without_weights(tmp_path: Path) -> None:
    """As it would be with them."""
    config = LLAMA_CONFIG | {"quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quantization_config\.quant_method: expected"):
        inspect_model(tmp_path)


def test_context_is_what_the_model_takes(tmp_path: Path) -> None:
    """By default 4096 or all; others are refused with the limit."""
    folder = save_folder(tmp_path / "dense", LLAMA_CONFIG, {})
    (folder / "model.safetensors").unlink()
    assert inspect_model(folder).facts.context == 128
    assert inspect_model(folder, 128).facts.context == 128
    for wrong in (0, -1, 129):
        with pytest.raises(SettingsError, match=f"context is {wrong}, expected 1 to 128"):
            inspect_model(folder, wrong)


def written_out(text: str) -> str:
    """The inverse of `pattern` for words of one letter."""
    text = re.sub(r"(\d+) x (\w)\b", lambda m: m[2] * int(m[1]), text)
    text = re.sub(r"(\d+) x \(([^)]*)\)", lambda m: m[2] * int(m[1]), text)
    return text.replace(", ", "")


def test_every_key_is_documented(tmp_path: Path) -> None:
    """docs/models.md has all keys of the JSON but the fields of a layer's parts."""
    folder = save_folder(tmp_path / "moe", MIXTRAL_CONFIG, mixtral_tensors())
    documented = set(re.findall(r"`(\w+)(?:\[\])?`", DOCS.read_text()))
    fields = {field for part in (GQA, MLA, DENSE, MOE) for field in vars(part)}
    assert keys(inspect_model(folder).json()) - fields - documented == set()


def keys(value: object) -> set[str]:
    """All keys of nested objects, but not those of parts that have a class of their own."""
    if isinstance(value, list):
        return {key for item in value for key in keys(item)}
    if not isinstance(value, dict):
        return set()
    parts = ("rope", "gate", "activation", "shared", "formats")
    inner = (keys(item) for key, item in value.items() if key not in parts)
    return set(value).union(*inner)
