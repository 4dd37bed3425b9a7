"""The cost model: seconds and bytes of every stage, from formulas and published facts.

Values in, values out: nothing here measures, guesses a fact or draws a random number. Layers, each over the one before:

| file | what |
|---|---|
| `dimensions.py` | the sizes of a model, read once from its `Architecture` |
| `knobs.py`, `calibration.toml` | at most eight fitted numbers a hardware family, and the published constants |
| `machine.py`, `links.py` | what one device and one link can do, from the facts of a cluster |
| `flops.py`, `roofline.py`, `collectives.py`, `groups.py` | formulas of one operation |
| `lengths.py`, `microbatch.py` | lengths, and how sequences fill micro-batches and ranks |
| `occupancy.py`, `occupancy_queue.py` | how requests fill the slots and the cache of an engine |
| `pipelines.py`, `pipeline_orders.py` | schedules: closed forms, and lists that are worked off |
| `shards.py`, `activations.py`, `memory.py`, `kv_cache.py` | bytes on one device |
| `decode.py`, `passes.py`, `sync.py` | seconds of one decode step, one forward pass, one move of weights |
| `stages.py`, `training.py`, `generation.py`, `roles.py` | seconds and bytes of one stage; start at `roles.py` |

Times are seconds, sizes bytes, rates FLOP/s and bytes/s. An unknown fact is an `UnknownFactError` with its name.
"""
