"""Placement search: stages to pools, pools to devices, and a layout for every stage.

`decide.search(problem)` is the entry. What a stage costs comes in as tables (`options.StageTable`), one per device
type; what the stages cost one another on a pool as two functions (`pool_time.Reshard`, `joint.Swap`).
"""
