"""Generation as a stream of samples: for plans with an admission rule, a trigger or bursts.

A plan that trains on whole batches in order has none of it. Otherwise the ranks that sample go on all the time
(`sampler`), an actor per generate stage (`edge_actor`) decides with the protocol's controller which prompts they get
and which finished groups a step trains on, and from there on a step's samples are a batch like any other.
"""
