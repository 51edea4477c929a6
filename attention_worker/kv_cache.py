"""The pool of KV blocks: its size and its memory.

A KV block holds what `block_size` consecutive tokens of one sequence leave behind in the layers of
one KV group (see `kv_groups.py`). Which blocks belong to which request and group is the gateway's
business (block tables arrive with the steps); this file only knows how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention_worker.kv_groups import KvPlan, plan_kv_groups
from expertmesh.errors import SettingsError
from expertmesh.host_memory import available_host_memory
from expertmesh.kv_groups import KvGroups
from expertmesh.model_config import KvLayout, ModelConfig
from expertmesh_kernels.decoder_layers import LayerPages
from expertmesh_kernels.paged_attention import Int8KvLayout, KvCache


class PagedKvCache:
    """The pool, and each layer's part of it.

    Memory is left as allocated: attention reads only positions that were written. So the
    operating system commits pages of the pool as they are used for the first time.

    Args:
        config: The model.
        num_blocks: Blocks that can be given to requests; the pool has one more, the null block.
        block_size: Tokens per block.
        dtype: Of keys and values.
        device: Where they are.
        int8: They are held as int8; see `KvCache`.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        int8: bool = False,
    ) -> None:
        plan = _plan(config, int8=int8)
        stored = _stored(dtype, int8=int8)
        self.num_blocks = num_blocks
        self.null_block = num_blocks
        """Stands in block tables where there is no block; nothing is written to it."""
        self.block_size = block_size
        self.block_bytes = _block_bytes(plan, block_size, stored)
        self.groups = KvGroups.of(block_size, plan.sliding_windows)
        self.sliding_windows = plan.sliding_windows
        """Per group: how many tokens a token sees; None for all."""
        shape = (num_blocks + 1, plan.block_width * block_size)
        self.pool = torch.empty(shape, dtype=stored, device=device)
        self.layers: tuple[KvCache, ...] = tuple(
            KvCache(self.pool, offset * block_size, layout, block_size, dtype)
            for offset, layout in zip(plan.offset_of_layer, plan.layout_of_layer, strict=True)
        )
        self.pages = LayerPages.of(self.layers, plan.group_of_layer)
        """The same, as kernels for several layers take them."""


def _plan(config: ModelConfig, *, int8: bool) -> KvPlan:
    return plan_kv_groups(config, _as_int8) if int8 else plan_kv_groups(config)


def _as_int8(layout: KvLayout) -> KvLayout:
    return Int8KvLayout(layout.num_heads, layout.key_dim, layout.value_dim)


def _stored(dtype: torch.dtype, *, int8: bool) -> torch.dtype:
    return torch.int8 if int8 else dtype


def _block_bytes(plan: KvPlan, block_size: int, stored: torch.dtype) -> int:
    """Bytes of one KV block."""
    return plan.block_width * block_size * stored.itemsize


@dataclass(frozen=True)
class KvPoolSettings:
    """What decides the size of the pool."""

    block_size: int
    """Tokens per KV block."""
    max_num_seqs: int
    """Most requests at a time."""
    max_model_len: int
    """Longest sequence in tokens."""
    max_step_tokens: int
    """Most tokens of a step."""
    cache_tokens: int | None = None
    """Tokens that the pool shall hold; None derives it from memory."""
    memory_fraction: float = 0.25
    """Part of the available memory that a derived pool may take."""
    int8: bool = False
    """Keys and values are held as int8."""


def choose_num_kv_blocks(
    config: ModelConfig, settings: KvPoolSettings, dtype: torch.dtype, available_bytes: int
) -> int:
    """Blocks of the pool: as asked for, in all KV groups; else the smaller of what memory allows
    and what `max_num_seqs` sequences of `max_model_len` tokens hold at a time.

    Args:
        config: The model.
        settings: What decides the size.
        dtype: Of keys and values.
        available_bytes: Memory that is left beside the weights.

    Raises:
        SettingsError: Not even one sequence of max_model_len fits.
    """
    plan = _plan(config, int8=settings.int8)
    groups = KvGroups.of(settings.block_size, plan.sliding_windows)
    max_len, max_step_tokens = settings.max_model_len, settings.max_step_tokens
    blocks_per_sequence = groups.sequence_blocks(max_len, max_step_tokens)
    block_bytes = _block_bytes(plan, settings.block_size, _stored(dtype, int8=settings.int8))
    if settings.cache_tokens is not None:
        num_blocks = settings.cache_tokens // settings.block_size * groups.num_groups
        source = f"kv_cache_tokens={settings.cache_tokens}"
    else:
        affordable = max(0, int(available_bytes * settings.memory_fraction)) // block_bytes
        # One prompt at a time fills a step; the others generate.
        generating = (settings.max_num_seqs - 1) * groups.sequence_blocks(max_len, 1)
        num_blocks = min(affordable, generating + blocks_per_sequence)
        source = (
            f"{settings.memory_fraction:.0%} of {available_bytes / 2**20:.0f} MiB available memory"
        )
    if num_blocks < blocks_per_sequence:
        longest = groups.longest_sequence(num_blocks, max_len, max_step_tokens)
        token_bytes = block_bytes * groups.num_groups / settings.block_size
        raise SettingsError(
            f"the KV cache has room for {longest} tokens ({source}, "
            f"{token_bytes:.0f} bytes per token), "
            f"less than max_model_len={settings.max_model_len}",
            fix="lower --max-model-len or give the KV cache more tokens",
        )
    if settings.cache_tokens is not None and num_blocks * block_bytes > available_bytes:
        raise SettingsError(
            f"a KV cache of {settings.cache_tokens} tokens needs "
            f"{num_blocks * block_bytes / 2**20:.0f} MiB, "
            f"but only {available_bytes / 2**20:.0f} MiB of memory are available",
            fix=f"ask for at most {groups.capacity(available_bytes // block_bytes)} tokens",
        )
    return num_blocks


def available_memory(device: torch.device) -> int:
    """Free bytes of the device; for the CPU within the limit of the control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_memory()
