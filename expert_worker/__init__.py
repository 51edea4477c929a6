"""The expert worker: one device, the experts assigned to it, nothing about requests.

__main__.py     flags, signals, end of the process
worker.py       from settings to a healthy server
selection.py    the words of the setting `experts`
server.py       gRPC server, health, drain
servicer.py     ExpertService: calls, state, orders
maintenance.py  loading and unloading in the background
state.py        what it says of itself, counters
metrics.py      Prometheus
store.py        resident experts
memory.py       gives freed memory back
backend.py      the device: one call computes at a time
"""
