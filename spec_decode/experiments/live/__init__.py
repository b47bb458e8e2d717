"""`dovetail ab live`: arms that live traffic was split between, compared by what the sink `experiments` recorded.

Metrics, intervals and verdicts are those of the offline experiments. Two things differ. Nothing is paired: each arm had
requests of its own, so a ratio compares two independent samples. And what is independent of each other are the units
that were drawn (requests, users, slices of time), so these are what the bootstrap draws.
"""
