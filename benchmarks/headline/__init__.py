"""The headline study: Pangu Ultra MoE 718B on one, two and four CloudMatrix384 supernodes."""
