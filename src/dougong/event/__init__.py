"""What happened: typed events, an append-only log that survives crashes, and the fold over it."""
