"""How a family is written down: rules as data, and the code that expands them for a config.

A parameter of ours is one or more stored tensors, one below the other (concatenated along the
first axis), so that reading it is reading byte ranges in a row. Shapes are strings of letters:

    V vocabulary   H hidden   Q all query heads   K all key (or value) heads   I intermediate
    E experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from expertmesh.families.config_reader import ConfigReader
from expertmesh.model_config import LayerConfig, ModelConfig, MoeFfnConfig

Condition = Callable[[LayerConfig], bool]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint."""

    names: tuple[str, ...]
    """Spellings in use; exactly one has to be there."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorRule:
    """One parameter of the attention worker, made of stored tensors one below the other."""

    parameter: str
    sources: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class ExpertLayout:
    """Names of a layer's expert tensors.

    A name with {expert} is one tensor per expert; one without is stacked, [E, ...].
    """

    gate_up: tuple[str, ...]
    """One tensor [2I, H], gate rows first, or two [I, H]: gate, up."""
    down: str
    """[H, I]."""

    def sample(self, layer: int) -> str:
        """A tensor that a checkpoint of this layout has."""
        return self.gate_up[0].format(layer=layer, expert=0)


@dataclass(frozen=True)
class ExpertRules:
    """The experts of one layer, in any of the layouts."""

    layer: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    layouts: tuple[ExpertLayout, ...]


@dataclass(frozen=True)
class Source:
    """A stored tensor before expansion; names may hold {layer}."""

    names: tuple[str, ...]
    dims: str
    """Letters of the shape."""


@dataclass(frozen=True)
class ParameterTemplate:
    """A parameter before expansion; present in a layer if `when` holds."""

    parameter: str
    sources: tuple[Source, ...]
    when: Condition = lambda _layer: True


@dataclass(frozen=True)
class Family:
    """Everything that is special about one `model_type`."""

    model_type: str
    architecture: str
    """Class name that `architectures` has to hold if given."""
    parse_config: Callable[[ConfigReader], ModelConfig]
    model_parameters: tuple[ParameterTemplate, ...]
    layer_parameters: tuple[ParameterTemplate, ...]
    expert_layouts: tuple[ExpertLayout, ...] = ()
    ignored: dict[str, str] = field(default_factory=dict)
    """Suffix of a tensor's name to the reason why it is not read."""

    def attention_rules(self, config: ModelConfig) -> list[TensorRule]:
        """Every parameter outside the experts, in the order of the forward pass."""
        embed, *rest = self.model_parameters
        rules = [_expand(embed, config, config.layers[0], 0)]
        for index, layer in enumerate(config.layers):
            rules += [_expand(t, config, layer, index) for t in self._templates(layer)]
        for template in rest:
            if not (template.parameter == "lm_head" and config.tie_word_embeddings):
                rules.append(_expand(template, config, config.layers[0], 0))
        return rules

    def expert_rules(self, config: ModelConfig, layer: int) -> ExpertRules:
        """The experts of an MoE layer."""
        ffn = config.moe_ffn(layer)
        return ExpertRules(
            layer, ffn.num_experts, config.hidden_size, ffn.intermediate_size, self.expert_layouts
        )

    def ignores(self, name: str) -> bool:
        """Whether a tensor is known to be of no use."""
        return any(name.endswith(suffix) for suffix in self.ignored)

    def _templates(self, layer: LayerConfig) -> Iterator[ParameterTemplate]:
        return (template for template in self.layer_parameters if template.when(layer))


def _expand(
    template: ParameterTemplate, config: ModelConfig, layer: LayerConfig, index: int
) -> TensorRule:
    sizes = _sizes(config, layer)
    sources = tuple(
        StoredTensor(
            tuple(name.format(layer=index) for name in source.names),
            tuple(sizes[letter] for letter in source.dims),
        )
        for source in template.sources
    )
    return TensorRule(template.parameter.format(layer=index), sources)


def _sizes(config: ModelConfig, layer: LayerConfig) -> dict[str, int]:
    ffn = layer.ffn
    return {
        "V": config.vocab_size,
        "H": config.hidden_size,
        "Q": layer.attention.q_size,
        "K": layer.gqa.k_size,
        "I": ffn.intermediate_size,
        "E": ffn.num_experts if isinstance(ffn, MoeFfnConfig) else 0,
    }
