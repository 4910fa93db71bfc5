"""The simulated backend: a cluster and its jobs in simulated time, writing ordinary events."""
