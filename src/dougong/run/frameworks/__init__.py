"""Training frameworks that own their loop, and scripts written to other runtimes' interfaces."""
