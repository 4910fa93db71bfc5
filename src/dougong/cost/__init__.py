"""Formulas with their sources: FLOP of a model, failure rates and what failures cost. No state, no I/O."""
