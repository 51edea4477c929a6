"""The table of families in both READMEs, from what parity tests measured: `make family-table`.

python -m tests.support.family_table RESULTS README.md README.zh-CN.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from expertmesh.families import FAMILIES
from tests.support.parity_results import LAYOUTS, Layout, ParityResult, read_results

BEGIN = "<!-- families: made by `make family-table` -->"
END = "<!-- end of families -->"

HEADER = (
    *("family", "`model_type`", "for example", "attention", "FFN and gate"),
    *("largest difference, colocated", "with 2 expert workers", "equal tokens"),
)

Results = Mapping[tuple[str, Layout], ParityResult]


@dataclass(frozen=True)
class FamilyRow:
    """What the table says of a family beside figures."""

    name: str
    model_type: str
    examples: str
    attention: str
    ffn: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The first columns."""
        return self.name, f"`{self.model_type}`", self.examples, self.attention, self.ffn


ROWS = (
    FamilyRow(
        *("Llama", "llama", "Llama 2, 3.x, SmolLM2, TinyLlama, Yi"),
        "grouped-query; rope default, linear, llama3, yarn",
        "dense",
    ),
    FamilyRow("Mistral", "mistral", "Mistral 7B, Nemo", "grouped-query, window", "dense"),
    FamilyRow(
        *("Qwen2", "qwen2", "Qwen2, Qwen2.5"),
        "grouped-query with biases, window on some layers",
        "dense",
    ),
    FamilyRow("Qwen3", "qwen3", "Qwen3 0.6B to 32B", "grouped-query, norm of each head", "dense"),
    FamilyRow(
        *("Gemma 2", "gemma2", "Gemma 2 2B, 9B, 27B"),
        "windows on every other layer, softcaps",
        "dense, GELU, norms of outputs",
    ),
    FamilyRow(
        *("Gemma 3", "gemma3_text", "Gemma 3 270M, 1B"),
        "5 windows to 1 full with a rope each, norm of each head",
        "dense, GELU, norms of outputs",
    ),
    FamilyRow(
        *("Mixtral", "mixtral", "Mixtral 8x7B, 8x22B"),
        "grouped-query, window",
        "top-k softmax, renormalised",
    ),
    FamilyRow(
        *("Qwen2-MoE", "qwen2_moe", "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B"),
        "grouped-query with biases, window on some layers",
        "top-k softmax, gated shared expert; dense layers",
    ),
    FamilyRow(
        *("Qwen3-MoE", "qwen3_moe", "Qwen3-30B-A3B, 235B-A22B"),
        "grouped-query, norm of each head",
        "top-k softmax, renormalised or not; dense layers",
    ),
    FamilyRow(
        *("OLMoE", "olmoe", "OLMoE-1B-7B"),
        "grouped-query, norm over all heads, clip",
        "top-k softmax, renormalised or not",
    ),
    FamilyRow(
        *("DeepSeek-V2", "deepseek_v2", "DeepSeek-V2, V2-Lite"),
        "latent, yarn",
        "softmax, best groups, scaled; shared experts",
    ),
    FamilyRow(
        *("DeepSeek-V3", "deepseek_v3", "DeepSeek-V3, R1"),
        "latent, yarn",
        "sigmoid, selection bias, best groups, scaled; shared expert",
    ),
    FamilyRow("Kimi-K2", "kimi_k2", "Kimi-K2", "latent, yarn", "as DeepSeek-V3, one group"),
    FamilyRow(
        *("gpt-oss", "gpt_oss", "gpt-oss-20b, 120b"),
        "window on every other layer, sinks, biases, yarn",
        "softmax over the top-k, biases, clamped SwiGLU",
    ),
    FamilyRow(
        *("MiMo-V2-Flash", "mimo_v2_flash", "MiMo-V2-Flash"),
        "5 windows with sinks to 1 full, small values, rope on a third",
        "sigmoid, selection bias",
    ),
)


def table(rows: Iterable[FamilyRow], results: Results) -> str:
    """The table.

    Raises:
        ValueError: a family was not measured.
    """
    lines = [HEADER, ("---",) * len(HEADER)]
    lines += [(*row.cells, *_figures(row.model_type, results)) for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _figures(model_type: str, results: Results) -> tuple[str, str, str]:
    """Differences in both layouts, and tokens."""
    if (model_type, "colocated") not in results:
        raise ValueError(f"{model_type}: not measured; run tests/parity with PARITY_RESULTS")
    found = [results.get((model_type, layout)) for layout in LAYOUTS]
    measured = [result for result in found if result is not None]
    equal = sum(result.tokens_equal for result in measured)
    compared = sum(result.tokens_compared for result in measured)
    colocated, remote = (_difference(result) for result in found)
    return colocated, remote, f"{equal} of {compared}"


def _difference(result: ParityResult | None) -> str:
    if result is None:
        return "no experts"
    mantissa, _, exponent = f"{result.max_logit_difference:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if float(mantissa) else "0"


def replaced(text: str, block: str) -> str:
    """The text with another block between the markers.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"expected {BEGIN} and {END}, once each")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def cells_in(text: str) -> list[tuple[str, ...]]:
    """Cells of the lines of the table between the markers, without its header."""
    block = text.partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in block.splitlines() if line.startswith("| ")]
    return [tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in lines[2:]]


def known_rows() -> list[FamilyRow]:
    """Rows of the families that can be loaded."""
    return [row for row in ROWS if row.model_type in FAMILIES]


def main(results: str, *readmes: str) -> None:
    """Rewrites the table, which is the same in all languages."""
    block = table(known_rows(), read_results(Path(results)))
    for path in map(Path, readmes):
        path.write_text(replaced(path.read_text(), block))


if __name__ == "__main__":
    main(*sys.argv[1:])
