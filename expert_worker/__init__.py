"""The expert worker: one device, the experts assigned to it, nothing about requests.

__main__.py     settings to process: start, signals, end
server.py       gRPC server, health, drain
servicer.py     ExpertService: calls, state, orders
maintenance.py  loading and unloading in the background
state.py        what it says of itself, counters
store.py        resident experts
backend.py      the device: one call computes at a time
"""
