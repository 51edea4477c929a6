"""The command `expertmesh`."""
