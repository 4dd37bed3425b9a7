"""Liveness of device memory over a period, and what to swap to the host when."""
