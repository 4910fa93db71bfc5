"""Real processes on this machine; several nodes are played as groups of processes on one host."""
