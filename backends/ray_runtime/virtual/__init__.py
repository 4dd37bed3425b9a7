"""`--device virtual`: a plan's control plane for real, its kernels slept. See docs/running.md.

settings.py   what a virtual run is told, and the plan's durations
crew.py       which worker stands for which ranks
start.py      the actors of a run
worker.py     a worker: the step loop; actor.py is the Ray actor around it
interpreter.py  what the kinds of instructions do: sleep, put, take, announce
edges.py, rows.py  the ends of the queues, and what goes through them
fabric.py     the actor in place of torch.distributed's process groups
clock.py      time that passes faster; post.py: calls to actors, counted
"""
