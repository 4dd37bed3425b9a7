"""Token graphs: timed marked graphs and synchronous dataflow, and what can be proved about them.

`graph` is the value; `rates` and `expand` deal with rates, `liveness` with deadlock, `bounds` with queue depth.
`period` has the throughput (`howard` computes it, `oracle` cross-checks it by linear programming, `feasible` asks for
one period), `slack` and `bottleneck` what may or should change, `buffers` capacities. `formulas`, `staleness` and
`versions` are about old weights. `game` plays the graph, `steady` measures a play, `walks` has what all need of
graphs.
"""
