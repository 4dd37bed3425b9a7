"""Where the metrics of a run go besides metrics.jsonl, which stays the record of the run: TensorBoard, Prometheus, ...

`names` says which there are and what they need, `fan_out` hands rows to them, `to_*` are the sinks, one file each.
"""
