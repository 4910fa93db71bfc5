"""How well a job went: the fold over its events, the scorecard made of it, the sample ledger, and the report."""
