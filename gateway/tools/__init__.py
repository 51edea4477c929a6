"""Tool calls: what clients offer, how models are told of it, and what models answer."""
