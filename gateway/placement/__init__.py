"""Which expert worker should hold which expert: plans, orders, and who may give them."""
