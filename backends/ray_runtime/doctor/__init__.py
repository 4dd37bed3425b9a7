"""`rlflow doctor`: what may be wrong with a machine or a Ray cluster, found before a run.

Imports neither ray nor torch until a cluster is looked at, so that it works where they are missing or broken.
"""
