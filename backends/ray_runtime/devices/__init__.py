"""NPUs, CUDA devices and CPUs behind one interface: `device.py` says which, one file per kind says how.

    device = open_device("npu")                       # the first that the process sees, made current
    states = Swap(device, optimizer_tensors)
    done = states.offload(aside=True)                 # copies beside the computation that goes on
    ...
    states.onload(aside=True).wait()                  # what is started from now on finds the values
    options = device.group_options(buffer_bytes=64 << 20)
    dist.init_process_group(device.collective_backend, timeout=..., pg_options=options)

Nothing here decides anything: which rank holds which device, and what is swapped when, is the plan's.
"""
