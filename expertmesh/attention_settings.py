"""Settings of attention workers, which their gateway fills in."""

from __future__ import annotations

from dataclasses import dataclass, field

from expertmesh.settings import (
    Dtype,
    EngineSettings,
    ExpertDtype,
    LogSettings,
    WireDtype,
)
from expertmesh.settings_base import Settings
from expertmesh.tls_settings import MeshTls


@dataclass(frozen=True)
class AttentionWorkerSettings(Settings):
    """Everything that an attention worker needs; its gateway fills this in."""

    model: str = "demo"
    """Checkpoint folder in Hugging Face layout."""
    socket_path: str = ""
    """Unix socket to serve on, in a folder that only the gateway can enter."""
    dtype: Dtype = "auto"
    """Type of weights and activations; auto is the checkpoint's own."""
    expert_dtype: ExpertDtype = "auto"
    """Weights of routed experts, if they are here; see `ModelOptions`."""
    device: str = "cpu"
    """Device of weights and KV cache, as torch names it."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; by default what the model was trained for."""
    colocated: bool = False
    """Experts are loaded into this process; no expert worker is called."""
    wire_dtype: WireDtype = "auto"
    """How hidden states travel to expert workers; see `MeshSettings`."""
    overlap: bool = True
    """A step may be two micro-batches in turn; see `MeshSettings`."""
    allow_degraded: bool = False
    """Experts that nobody holds are left out; see `MeshSettings`."""
    threads: int | None = None
    """Threads of the kernels; by default one for each core that the process may use."""
    cores: str = ""
    """Cores that the process stays on, such as 0-3,8; empty: the system decides."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    """Limits, shared with the scheduler."""
    tls: MeshTls = field(default_factory=MeshTls)
    """How expert workers are spoken to."""
    log: LogSettings = field(default_factory=LogSettings)
