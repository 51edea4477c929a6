"""From requests to tokens: scheduling, KV blocks, steps, outputs."""
