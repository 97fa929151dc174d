"""Worker processes that decode and process items, so that misses use all cores.

In: an item's payload and the spec that rebuilds its decoder. Out: its tensors and its text, bit for
bit as this process would make them. `pool` is the server's side, `nursery` the process that has
the model loaded and forks workers, `keeper` what replaces it when it ends, `worker` what a worker
does. May import the engine's processes, channel and shared memory, and everything below it.
"""
