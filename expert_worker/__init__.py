"""The expert worker: one device, the experts assigned to it, nothing about requests.

__main__.py           flags, signals, end of the process
worker.py             from settings to a healthy server
compile.py            compiles its kernels, in a process that ends
selection.py          the words of the setting `experts`
server.py             gRPC server, health
probes.py             health for an orchestrator, on a port of its own
servicer.py           ExpertService: calls, state, orders
maintenance.py        loading and unloading in the background
drain.py              how it leaves while others serve
hand_over.py          a program that makes it leave and waits
direct_server.py      direct connections
compiled_calls.py     their calls, answered by compiled code
published_experts.py  where that finds weights
state.py              what it says of itself, counters
call_counters.py      numbers of calls
metrics.py            Prometheus
store.py              resident experts
memory.py             gives freed memory back
backend.py            the device: one call computes at a time
device_queue.py       calls that wait for it, merged and by age
device_turn.py        whose turn it is
"""
