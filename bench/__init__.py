"""Benchmarks: each command is `python -m bench.NAME`, and its last line is one JSON object.

Commands
    load_sweep    the policies against the load, on the bundled model
    load_step     fetched share while the load goes up and down, simulated at 100K context
    served_step   the same with the bundled model's own selections
    simulate      what policies fetch for recorded or calibrated selections, without a model
    concurrency   how many requests run at once in the same memory, at the same time per token
    engine        what the engine costs beside the device's own steps
    decode_gpu    one decode GPU of a deployment: policies and drafts, models at real shapes
    speculation   drafts and draft lengths against the load, on the bundled model
    mesh          tokens per second on one device and on several
    formats       bits per byte with each format of history
    dense_model   perplexity of a dense model by how many positions its layers may attend to
    candidates    a selection out of candidate blocks, by their keys and by all keys
    kernels       every operation against its floor
    tune          variants of the kernels that have a choice, each checked before it is timed
    tune_select   variants of the plan and of top-K, compared with the references and timed
    link          reads and writes of host memory by record size and span
    tpu_aot       the TPU kernels and a whole step, compiled ahead of time
    traces        the cache curve of the trace model beside the published one
    plots         pictures from committed results, or from runs of `dhisparse serve`
What they share
    record.py     what every result says about the machine
    roofline.py   measured floors, and the bound of a call
    work.py       what a case is
    caches.py     reference caches: LRU, FIFO, random, Belady
    script.py     what requests select, step by step
    simulator.py  the real bookkeeping without a model and records
    crowd.py      requests that come and go in the simulator
    replay.py     a recording as it happened, or with another draft
    plan_steps.py  operands of the plan on traces
    pools.py      large host pools whose records can be checked
    scores.py     scores to select from, easy ones and hard ones
    variants.py   tunings that `tune` compares
    trials.py     a check and a time, of which `tune_select` makes many
    plan_variants.py  tunings of the plan that `tune_select` compares
    shard_*.py    one GPU's share of a model: weights, layers, experts, state, memory, cells, report
                  (shard_protocol: what differs between GLM-5.x and DeepSeek-V4.1)
    pinned.py     what pinned memory the host arrays of a GPU need
    replayed.py   selections and acceptance that a share of a model is made to follow
    stages.py     GPU time by stage, from a profile
    decode_plots.py  pictures of what decode_gpu wrote
    tpu_*.py      what `tpu_aot` compiles, and what its results say
    ops/          production sizes, a module per operation
results/          committed results
"""
