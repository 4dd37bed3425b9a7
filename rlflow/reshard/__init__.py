"""Resharding: from one layout of a model's weights to another, with the fewest bytes.

Catalogue (what tensors there are) -> Sharding (what every rank holds) -> atoms (the common refinement of two shardings)
-> plan (who sends what to whom) -> buckets, or an order in place. All of it is exact integer arithmetic on boxes of the
canonical index space; numpy and scipy are imported only inside the functions that need them.
"""
