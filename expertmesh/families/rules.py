"""How a family is written down: rules as data, and the code that expands them for a config.

A parameter of ours is one or more weights of the files, one below the other (concatenated along
the first axis). Shapes are strings of symbols:

    V vocabulary       H hidden          I intermediate     S intermediate of the shared expert
    E experts          N query heads     D size of a query or key head
    Q all queries      K all keys        W all values       O all outputs of the heads
    A rank of q        L latent          M latent and key part with rope
    B keys without rope and values, from the latent         1 one
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from expertmesh.families.config_reader import ConfigReader, Json
from expertmesh.model_config import GqaConfig, LayerConfig, ModelConfig, MoeFfnConfig

Condition = Callable[[LayerConfig], bool]


@dataclass(frozen=True)
class WeightRule:
    """A weight of the checkpoint."""

    names: tuple[str, ...]
    """Spellings in use; exactly one has to be there."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ParameterRule:
    """One of our parameters, made of weights one below the other."""

    parameter: str
    shape: tuple[int, ...]
    sources: tuple[WeightRule, ...]

    @property
    def role(self) -> str:
        """Its name without the layer."""
        return re.sub(r"^layers\.\d+\.", "", self.parameter)


@dataclass(frozen=True)
class ExpertLayout:
    """Names of a layer's expert weights.

    A name with {expert} is one weight per expert; one without is stacked, [E, ...].
    """

    gate_up: tuple[str, ...]
    """One weight [2I, H], gate rows first, or two [I, H]: gate, up."""
    down: str
    """[H, I]."""
    gate_up_bias: str = ""
    """[2I], only if experts have biases."""
    down_bias: str = ""
    """[H]."""
    transposed: bool = False
    """Matrices are stored [H, 2I] and [I, H]."""
    interleaved: bool = False
    """Gate and up take turns, in the order gate, up, gate, up, ..."""

    @property
    def stacked(self) -> bool:
        """Whether all experts share their tensors."""
        return "{expert}" not in self.down


@dataclass(frozen=True)
class ExpertRules:
    """The experts of one layer, in any of the layouts."""

    layer: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    bias: bool
    layouts: tuple[ExpertLayout, ...]

    def parameters(self, layout: ExpertLayout, expert: int) -> list[ParameterRule]:
        """`experts.gate_up`, `experts.down` and the biases of an expert, stored in this layout.

        Shapes are those of one expert, shapes of sources as stored.
        """
        hidden, wide = self.hidden_size, self.intermediate_size
        found = [
            self._rule(layout, "gate_up", layout.gate_up, expert, (2 * wide, hidden)),
            self._rule(layout, "down", (layout.down,), expert, (hidden, wide)),
        ]
        if self.bias:
            found += [
                self._rule(layout, "gate_up_bias", (layout.gate_up_bias,), expert, (2 * wide,)),
                self._rule(layout, "down_bias", (layout.down_bias,), expert, (hidden,)),
            ]
        return found

    def _rule(
        self,
        layout: ExpertLayout,
        name: str,
        templates: tuple[str, ...],
        expert: int,
        shape: tuple[int, ...],
    ) -> ParameterRule:
        part = (shape[0] // len(templates), *shape[1:])
        stored = part[::-1] if layout.transposed else part
        if layout.stacked:
            stored = (self.num_experts, *stored)
        sources = tuple(
            WeightRule((template.format(layer=self.layer, expert=expert),), stored)
            for template in templates
        )
        return ParameterRule(f"experts.{name}", shape, sources)


@dataclass(frozen=True)
class Source:
    """A weight before expansion; names may hold {layer}."""

    names: tuple[str, ...]
    dims: str
    """Symbols of the shape."""


def always(_layer: LayerConfig) -> bool:
    """The condition that holds in every layer."""
    return True


@dataclass(frozen=True)
class ParameterTemplate:
    """A parameter before expansion; present in a layer if `when` holds."""

    parameter: str
    sources: tuple[Source, ...]
    when: Condition = always


@dataclass(frozen=True)
class Ignored:
    """Tensors that may lie in the files and are not read."""

    prefix: str
    """How their names begin; {num_layers} stands for the number of layers."""
    suffix: str
    """How their names end."""
    reason: str
    only_with: str = ""
    """A tensor, named like the prefix, without which this does not apply."""

    def applies(self, name: str, config: ModelConfig, all_names: Mapping[str, object]) -> bool:
        """Whether a tensor is one of these."""
        prefix = self.prefix.format(num_layers=config.num_layers)
        witness = self.only_with.format(num_layers=config.num_layers)
        fits = name.startswith(prefix) and name.endswith(self.suffix)
        return fits and (not witness or witness in all_names)


@dataclass(frozen=True)
class Family:
    """Everything that is special about one `model_type`."""

    model_type: str
    architecture: str
    """Class name that `architectures` has to hold if given."""
    parse_config: Callable[[ConfigReader], ModelConfig]
    model_parameters: tuple[ParameterTemplate, ...]
    layer_parameters: tuple[ParameterTemplate, ...]
    defaults: Mapping[str, object]
    """What transformers takes for keys that `config.json` leaves out."""
    tiny: Json
    """`config.json` of a small model with layers of every kind."""
    expert_layouts: tuple[ExpertLayout, ...] = ()
    """Tried in this order; the first is how files on the hub are."""
    ignored: tuple[Ignored, ...] = field(default=())

    def attention_rules(self, config: ModelConfig) -> list[ParameterRule]:
        """Every parameter outside the experts, in the order of the forward pass."""
        embed, *rest = self.model_rules(config)
        layers = (self.layer_rules(config, index) for index in range(config.num_layers))
        return [embed, *chain.from_iterable(layers), *rest]

    def model_rules(self, config: ModelConfig) -> list[ParameterRule]:
        """Parameters outside the layers, the embedding first."""
        tied = {"lm_head"} if config.tie_word_embeddings else set()
        templates = (t for t in self.model_parameters if t.parameter not in tied)
        return [_expand(template, config, 0) for template in templates]

    def layer_rules(self, config: ModelConfig, index: int) -> list[ParameterRule]:
        """Parameters of a layer outside its experts."""
        layer = config.layers[index]
        templates = (t for t in self.layer_parameters if t.when(layer))
        return [_expand(template, config, index) for template in templates]

    def expert_rules(self, config: ModelConfig, layer: int) -> ExpertRules:
        """The experts of an MoE layer."""
        ffn = config.moe_ffn(layer)
        return ExpertRules(
            layer,
            ffn.num_experts,
            config.hidden_size,
            ffn.intermediate_size,
            ffn.bias,
            self.expert_layouts,
        )

    def ignores(self, name: str, config: ModelConfig, all_names: Mapping[str, object]) -> bool:
        """Whether a tensor is known to be of no use.

        Args:
            name: The tensor.
            config: Of the model.
            all_names: Every tensor of the files.
        """
        return any(ignored.applies(name, config, all_names) for ignored in self.ignored)


def _expand(template: ParameterTemplate, config: ModelConfig, index: int) -> ParameterRule:
    sizes = _sizes(config, config.layers[index])
    sources = tuple(
        WeightRule(
            tuple(name.format(layer=index) for name in source.names),
            tuple(sizes[symbol] for symbol in source.dims),
        )
        for source in template.sources
    )
    shape = (sum(source.shape[0] for source in sources), *sources[0].shape[1:])
    return ParameterRule(template.parameter.format(layer=index), shape, sources)


def _sizes(config: ModelConfig, layer: LayerConfig) -> dict[str, int]:
    return {
        "1": 1,
        "V": config.vocab_size,
        "H": config.hidden_size,
        **_attention_sizes(layer),
        **_ffn_sizes(layer),
    }


def _attention_sizes(layer: LayerConfig) -> dict[str, int]:
    attention = layer.attention
    sizes = {"N": attention.num_heads, "Q": attention.q_size, "O": attention.out_size}
    if isinstance(attention, GqaConfig):
        return sizes | {"D": attention.head_dim, "K": attention.k_size, "W": attention.v_size}
    latent = attention.kv_lora_rank
    return sizes | {
        "A": attention.q_lora_rank or 0,
        "L": latent,
        "M": latent + attention.rope_head_dim,
        "B": attention.kv_b_size,
    }


def _ffn_sizes(layer: LayerConfig) -> dict[str, int]:
    ffn = layer.ffn
    sizes = {"I": ffn.intermediate_size}
    if isinstance(ffn, MoeFfnConfig):
        sizes["E"] = ffn.num_experts
        sizes["S"] = ffn.shared.intermediate_size if ffn.shared is not None else 0
    return sizes
