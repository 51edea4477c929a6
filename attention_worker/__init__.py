"""The attention worker: one device, all weights but the experts', KV pages, gates and sampling.

server.py        AttentionService on a Unix socket; the thread of the Run stream runs the steps
model_runner.py  a step as a transaction: deltas, batch, forward pass, sampling, commit
model.py         the forward pass, top to bottom; its parts are in layers/
request_slots.py what is known of each request; model_states/ what its layers remember
experts.py       where routed rows go: experts in this process or expert workers
"""
