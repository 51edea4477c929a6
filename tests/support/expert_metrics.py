"""Names of an expert worker's metrics, for tests that do without torch."""

EXPERT_METRICS = frozenset(
    {
        "moe_expert_queue_wait_seconds",
        "moe_worker_batch_tokens",
        "moe_worker_calls",
        "moe_worker_damaged_experts",
        "moe_worker_errors",
        "moe_worker_expert_tokens",
        "moe_worker_inflight_streams",
        "moe_worker_kernel_seconds",
        "moe_worker_queue_depth",
        "moe_worker_resident_bytes",
        "moe_worker_resident_experts",
        "moe_worker_scrub_passes",
        "moe_worker_scrubbed_bytes",
    }
)
"""Without suffixes such as _total. A test of expert workers keeps it up to date."""
