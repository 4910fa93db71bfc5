"""The discrete-event engine that simulations run on, and their random numbers."""
