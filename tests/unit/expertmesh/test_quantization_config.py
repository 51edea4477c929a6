"""What `quantization_config` says is understood or refused by its key, never guessed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.quantizers.quantizers_utils import should_convert_module

from expertmesh.errors import CheckpointError
from expertmesh.families.config_reader import ConfigReader
from expertmesh.formats import NotQuantized, Quantization, parse_quantization
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.modules import NameParts, Targets, check_pattern, module_of
from expertmesh.formats.mxfp4 import Mxfp4
from expertmesh.formats.packed import PackedIntegers
from expertmesh.formats.scaled import ScaledBytes
from expertmesh.formats.scaling import Scaling

with warnings.catch_warnings():  # of its imports
    warnings.simplefilter("ignore")
    from compressed_tensors.utils.match import is_match, match_targets

Json = dict[str, object]

DEEPSEEK: Json = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
QWEN: Json = {
    **{key: value for key, value in DEEPSEEK.items() if key != "fmt"},
    "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate", "model.layers.0.self_attn"],
}
GPT_OSS: Json = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
INT4: Json = {
    "num_bits": 4, "type": "int", "symmetric": True, "group_size": 32, "strategy": "group",
    "block_structure": None, "dynamic": False, "actorder": None, "observer": "minmax",
    "observer_kwargs": {},
}  # fmt: skip
INT8: Json = {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}
FLOAT8: Json = {**INT8, "type": "float"}
DYNAMIC: Json = {**INT8, "strategy": "token", "dynamic": True, "observer": None}


def group(**changes: object) -> Json:
    """A config group as Kimi K2 has it, with changes."""
    usual: Json = {
        "targets": ["Linear"],
        "weights": INT4,
        "input_activations": None,
        "output_activations": None,
    }
    return usual | changes


def compressed(*groups: Json, **changes: object) -> Json:
    """A config as Kimi K2 has it, with changes."""
    usual: Json = {
        "config_groups": {f"group_{i}": g for i, g in enumerate(groups or (group(),))},
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    return usual | changes


def parse(quantization: object, key: str = "quantization_config") -> Quantization:
    """The config with this under a key."""
    return parse_quantization(ConfigReader(Path("m/config.json"), {key: quantization}))


EXPERT = "model.layers.3.mlp.experts.17.up_proj.weight"
ATTENTION = "model.layers.0.self_attn.o_proj.weight"
OTHER_ATTENTION = "model.layers.10.self_attn.o_proj.weight"


def test_no_quantization_is_plain() -> None:
    """A config without the key, and one with null."""
    for raw in ({}, {"quantization_config": None}):
        found = parse_quantization(ConfigReader(Path("config.json"), raw))
        assert isinstance(found, NotQuantized)
        assert found.codec_of(EXPERT) is None


def test_fp8_is_every_matrix_but_the_listed_ones() -> None:
    """As DeepSeek (no list: all but the output) and Qwen (a list) write it."""
    deepseek, qwen = parse(DEEPSEEK), parse(QWEN)
    for name in (EXPERT, ATTENTION, "model.layers.1.mlp.experts.gate_up_proj"):
        assert deepseek.codec_of(name) == Fp8Blocks(128, 128)
    assert deepseek.codec_of("lm_head.weight") is None
    assert qwen.codec_of("lm_head.weight") is None
    assert qwen.codec_of(ATTENTION) is None
    assert qwen.codec_of(OTHER_ATTENTION) == Fp8Blocks(128, 128)
    assert qwen.skip_list == "modules_to_not_convert"
    ignored = {k: v for k, v in QWEN.items() if k != "modules_to_not_convert"}
    ignored["ignored_layers"] = ["self_attn.o_proj"]
    assert parse(ignored).codec_of(ATTENTION) is None
    assert parse(ignored).skip_list == "ignored_layers"


def test_fp8_scale_format_allows_bytes() -> None:
    """`ue8m0` says what bytes mean; without it bytes are no scales."""
    assert parse({**DEEPSEEK, "scale_fmt": "ue8m0"}).codec_of(EXPERT) == Fp8Blocks(
        128, 128, byte_scales=True
    )
    codes = [Fp8Blocks(8, 8, flag).parts((8, 8))[1].dtype_codes for flag in (False, True)]
    assert ["U8" in c for c in codes] == [False, True]


def test_mxfp4_is_the_experts() -> None:
    """Experts only; the list may take some out."""
    stacked = "model.layers.5.mlp.experts.gate_up_proj"
    assert parse(GPT_OSS).codec_of(stacked) == Mxfp4()
    assert parse(GPT_OSS).codec_of(ATTENTION) is None
    without = {**GPT_OSS, "modules_to_not_convert": ["model.layers.5.mlp.experts"]}
    assert parse(without).codec_of(stacked) is None


def test_compressed_tensors_as_kimi_has_it() -> None:
    """4 bits, groups of 32; attention and dense layers are ignored by patterns."""
    found = parse(compressed())
    assert found.codec_of(EXPERT) == PackedIntegers(4, Scaling("group", (1, 32)))
    for name in (ATTENTION, "lm_head.weight", "model.layers.0.mlp.down_proj.weight"):
        assert found.codec_of(name) is None
    assert parse(compressed(), "compression_config").codec_of(EXPERT) is not None


def test_groups_have_their_own_formats() -> None:
    """The most exact target wins: a name, then patterns, then the class."""
    groups = (
        group(targets=["Linear"]),
        group(targets=["re:.*self_attn.*"], weights=INT8, format="int-quantized"),
        group(targets=["model.layers.0.self_attn.o_proj"], weights=None),
        group(targets=["re:.*k_proj$"], weights={**INT4, "symmetric": False, "group_size": 128}),
    )
    found = parse(compressed(*groups, ignore=[]))
    assert found.codec_of(EXPERT) == PackedIntegers(4, Scaling("group", (1, 32)))
    assert found.codec_of(OTHER_ATTENTION) == ScaledBytes("int8", Scaling("channel"))
    assert found.codec_of(ATTENTION) is None
    asymmetric = PackedIntegers(4, Scaling("group", (1, 128), symmetric=False))
    assert found.codec_of("model.layers.0.self_attn.k_proj.weight") == asymmetric


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 8},
        {"num_bits": 8, "strategy": None, "group_size": None},
        {"num_bits": 8, "strategy": "tensor"},
    ],
)
def test_strategy_left_out_is_one_scale(weights: Json) -> None:
    """The default of compressed-tensors."""
    found = parse(compressed(group(weights=weights), format="int-quantized"))
    assert found.codec_of(EXPERT) == ScaledBytes("int8", Scaling("tensor"))


def test_fp8_of_compressed_tensors() -> None:
    """One scale per row, or per block."""
    found = parse(compressed(group(weights=FLOAT8), format="float-quantized"))
    assert found.codec_of(EXPERT) == ScaledBytes("fp8", Scaling("channel"))
    blocks = {**FLOAT8, "strategy": "block", "block_structure": [128, 64]}
    found = parse(compressed(group(weights=blocks), format="naive-quantized"))
    assert found.codec_of(EXPERT) == ScaledBytes("fp8", Scaling("block", (128, 64)))


def test_activations_quantised_on_the_fly_are_left_alone() -> None:
    """w8a8 with dynamic scales has the same weights as w8a16."""
    found = parse(
        compressed(group(weights=INT8, input_activations=DYNAMIC), format="int-quantized")
    )
    assert found.codec_of(EXPERT) == ScaledBytes("int8", Scaling("channel"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "quantization_config.quant_method: expected one of compressed-tensors, fp8, mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "quant_method: expected one of"),
        ({"quant_method": 7}, "quant_method: expected a string, found 7"),
        ({**DEEPSEEK, "activation_scheme": "static"}, "activation_scheme: expected 'dynamic'"),
        ({**DEEPSEEK, "fmt": "e5m2"}, "fmt: expected one of e4m3, float8_e4m3fn, found 'e5m2'"),
        ({**DEEPSEEK, "weight_block_size": None}, "weight_block_size: expected two positive"),
        ({**DEEPSEEK, "weight_block_size": [128]}, "weight_block_size: expected two positive"),
        ({**DEEPSEEK, "weight_block_size": [128, 0]}, "weight_block_size: expected integers in"),
        ({**DEEPSEEK, "weight_block_size": "128"}, "weight_block_size: expected integers in"),
        ({**DEEPSEEK, "scale_fmt": "e5m2"}, "scale_fmt: expected one of float, ue8m0"),
        ({**DEEPSEEK, "expert_dtype": "fp4"}, "expert_dtype: expected 'fp8', found 'fp4'"),
        ({**DEEPSEEK, "modules_to_convert": ["x"]}, "modules_to_convert: expected only the keys"),
        ({**DEEPSEEK, "modules_to_not_convert": "x"}, "modules_to_not_convert: expected a list"),
        ({**DEEPSEEK, "modules_to_not_convert": [""]}, "modules_to_not_convert: expected a list"),
        ({**DEEPSEEK, "modules_to_not_convert": ["("]}, "expected regular expressions"),
        ({**QWEN, "ignored_layers": ["x"]}, "ignored_layers: expected nothing beside"),
        ({**GPT_OSS, "block": 16}, "block: expected only the keys"),
        (compressed(format="marlin-24"), "format: expected one of pack-quantized, int-quant"),
        (compressed(format="dense"), "format: expected one of"),
        (compressed(quantization_status="initialized"), "quantization_status: expected one of"),
        (compressed(kv_cache_scheme=DYNAMIC), "kv_cache_scheme: expected only the keys"),
        (compressed(transform_config={"a": 1}), "transform_config: expected only the keys"),
        (
            compressed(sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config.format: expected 'dense', found 'sparse-24-bitmask'",
        ),
        (compressed(config_groups={}), "config_groups: expected at least one group"),
        (compressed(config_groups={"W4A16": ["Linear"]}), "W4A16: expected an object"),
        (compressed(ignore="lm_head"), "ignore: expected a list"),
        (compressed(ignore=["re:("]), "ignore: expected regular expressions"),
        (compressed(ignore=["re:(a+)+$"]), "and none of a group, not 're:(a+)+$'"),
        (compressed(group(targets=[])), "config_groups.group_0.targets: expected at least one"),
        (compressed(group(targets=["Attention"])), "targets: expected 'Linear', names or 're:'"),
        (compressed(group(output_activations=DYNAMIC)), "output_activations: expected only"),
        (
            compressed(group(input_activations={**DYNAMIC, "dynamic": False})),
            "config_groups.group_0.input_activations.dynamic: expected true, found False",
        ),
        (
            compressed(group(input_activations={**DYNAMIC, "dynamic": "local"})),
            "input_activations.dynamic: expected true, found 'local'",
        ),
        (
            compressed(group(weights={**INT4, "type": "float"})),
            "group_0.format: expected one of float-quantized, naive-quantized, as the type is fl",
        ),
        (
            compressed(group(weights={**INT4, "type": "complex"})),
            "type: expected one of int, float",
        ),
        (
            compressed(group(weights={**INT8, "type": "float"})),
            "group_0.format: expected one of float-quantized, naive-quantized, as the type is fl",
        ),
        (
            compressed(group(weights={**FLOAT8, "symmetric": False}), format="float-quantized"),
            "symmetric: expected true, as the type is float",
        ),
        (
            compressed(group(weights={**FLOAT8, "num_bits": 4}), format="float-quantized"),
            "num_bits: expected 8, as the format is float-quantized",
        ),
        (
            compressed(group(weights={**FLOAT8, "strategy": "block"}), format="float-quantized"),
            "block_structure: expected two integers if the strategy is block",
        ),
        (compressed(group(weights={**INT4, "num_bits": 3})), "num_bits: expected 4 or 8, found 3"),
        (compressed(group(weights={**INT4, "dynamic": True})), "weights.dynamic: expected false"),
        (compressed(group(weights={**INT4, "strategy": "block"})), "strategy: expected one of"),
        (compressed(group(weights={**INT4, "group_size": -1})), "group_size: expected a positive"),
        (compressed(group(weights={**INT8, "group_size": 32})), "group_size: expected null or -1"),
        (compressed(group(weights={**INT4, "actorder": "group"})), "actorder: expected null"),
        (compressed(group(weights={**INT4, "actorder": True})), "actorder: expected null"),
        (compressed(group(weights={**INT4, "block_structure": [8, 8]})), "block_structure: exp"),
        (compressed(format="int-quantized"), "num_bits: expected 8, as the format is int-quant"),
        (compressed(format="mixed-precision"), "config_groups.group_0.format: expected one of"),
        (
            compressed(group(weights={**INT8, "strategy": "tensor", "symmetric": False})),
            "strategy: expected 'channel' or 'group', as zero points are packed",
        ),
    ],
)
def test_what_is_not_supported_is_named(config: Json, expected: str) -> None:
    """One line with file, key and value."""
    with pytest.raises(CheckpointError) as caught:
        parse(config)
    assert expected in caught.value.message
    assert caught.value.message.startswith("m/config.json: quantization_config.")
    assert "\n" not in str(caught.value)


ODD: list[object] = [
    None, True, False, 0, 1, -1, 3, 1 << 70, 0.5, "", "x", "re:", "re:[", "int", [], [0], [None],
    [[]],
    ["Linear"], ["a" * 5000], {}, {"x": 1}, {"weights": {}}, {"": None},
]  # fmt: skip


def _variants(value: object) -> Iterator[object]:
    """The value with each of its parts replaced by each odd one."""
    yield from ODD
    if isinstance(value, dict):
        for key in value:
            for other in _variants(value[key]):
                yield value | {key: other}
            yield {name: kept for name, kept in value.items() if name != key}
            yield value | {key + "x": value[key]}


@pytest.mark.parametrize(
    "config",
    [
        DEEPSEEK,
        QWEN,
        GPT_OSS,
        compressed(),
        compressed(group(weights=INT8), format="int-quantized"),
    ],
    ids=["deepseek", "qwen", "gpt-oss", "int4", "int8"],
)
def test_odd_values_are_understood_or_refused(config: Json) -> None:
    """Whatever stands at whatever place: a result, or one line that names the file."""
    refusals = [text for variant in _variants(config) if (text := _refusal(variant))]
    assert len(refusals) > 50
    for text in refusals:
        assert text.startswith("m/config.json: quantization_config")
        assert "\n" not in text
        assert len(text) < 600


def _refusal(config: object) -> str:
    """What is said against a config; nothing if it is understood."""
    try:
        parse(config).codec_of(EXPERT)
    except CheckpointError as error:
        return str(error)
    return ""


def test_two_configs_have_to_agree() -> None:
    """Both keys are in use; different values would be a choice."""
    raw = {"quantization_config": compressed(), "compression_config": compressed()}
    assert parse_quantization(ConfigReader(Path("c"), raw)).codec_of(EXPERT) is not None
    raw["compression_config"] = DEEPSEEK
    with pytest.raises(CheckpointError, match="compression_config: expected the same as"):
        parse_quantization(ConfigReader(Path("c"), raw))


MODULES = [
    "lm_head", "model.embed_tokens", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.gate",
    "model.layers.11.self_attn.q_proj", "model.layers.1.mlp.gate_proj", "model.layers.1",
    "model.layers.1.mlp.experts.0.w1", "model.layers.1.mlp.experts", "a.b",
]  # fmt: skip


@pytest.mark.parametrize(
    "entry",
    ["lm_head", "layers.1", "model.layers.1", "model.layers.1.", "model.layers.*.mlp", "gate",
     "proj", "model.layers.1|a", r"model\.layers\.\d+\.self_attn", "mlp.gate", ".*gate", "a.b"],
)  # fmt: skip
@pytest.mark.parametrize("module", MODULES)
def test_name_parts_are_those_of_transformers(entry: str, module: str) -> None:
    """A list with one entry skips the modules that transformers skips."""
    entries = ("nothing", entry)
    assert should_convert_module(module, list(entries)) != NameParts(entries).match(module)


@pytest.mark.parametrize(
    "entries",
    [("lm_head",), ("Linear",), ("re:.*self_attn.*", "Linear"), ("re:model", "model.layers.1"),
     ("re:.*gate$",), ("re:b", "re:.*b", "a.b"), ("model.layers",), ("re:.*proj", "re:.*layers")],
)  # fmt: skip
@pytest.mark.parametrize("module", MODULES)
def test_targets_are_those_of_compressed_tensors(entries: tuple[str, ...], module: str) -> None:
    """Whether a module is meant, and by which entry."""
    layer = torch.nn.Linear(1, 1)
    found = Targets(entries).match(module)
    assert is_match(module, layer, entries) == (found is not None)
    assert ([*match_targets(module, layer, entries), None])[0] == found


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|aa)*b", "(?:a*)*", "(.*){9}", ".*" * 9, "a" * 1001]
)
def test_patterns_that_may_take_forever_are_refused(pattern: str) -> None:
    """Repeats of groups take exponential time."""
    assert check_pattern(pattern) is not None


def test_usual_patterns_are_fast() -> None:
    """Brackets, escapes and alternatives are no repeats; a name costs microseconds."""
    for pattern in (r"[(+*]+", r"\(\)*x", ".*mlp\\.(gate|up)_proj.*", "model.layers.*.self_attn"):
        assert check_pattern(pattern) is None
    entries = tuple(f"model.layers.{i}.mlp.gate" for i in range(1000))
    parts = NameParts((*entries, "lm_head", "model.layers.*.self_attn"))
    parts.match("x")
    started = time.process_time()
    for i in range(10_000):
        parts.match(f"model.layers.3.mlp.experts.{i}.up_proj")
    assert time.process_time() - started < 2


def test_modules_of_tensors() -> None:
    """`.weight` is not part of a module's name; stacked experts belong to theirs."""
    assert module_of("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj"
    assert module_of("model.layers.0.mlp.experts.down_proj") == "model.layers.0.mlp.experts"
    assert module_of("a.experts.3.w1.weight") == "a.experts.3.w1"
