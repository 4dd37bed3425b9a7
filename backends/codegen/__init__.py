"""Launch files for a plan: what starts its run on a Ray cluster, on Kubernetes or under Slurm."""
