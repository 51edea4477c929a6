"""What is seen of the mesh while it serves: use of experts, calls, latencies, over some seconds."""
