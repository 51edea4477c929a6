"""Looks for what would keep a mesh from working, before or while it runs: `expertmesh doctor`.

finding.py    what a check says
report.py     all of it, for people and for programs
machine.py    Python, packages, cores, memory, descriptors, GPUs
storage.py    the data folder: models, compiled kernels
model.py      the checkpoint, without downloading or loading anything
network.py    ports of the gateway, a server that runs already
workers.py    expert workers: found, reached, and of the same model and protocol

A check never raises for what it is to find out; each finding that is not fine says what to do.
"""
