"""Execution on a GPU: driver, page-locked arenas, device memory, and two batches in flight.

    cuda       the only caller of the CUDA driver
    arenas     page-locking of the two arenas, and its fall-backs
    copies     which bytes of a batch are copied where
    workspace  device memory and launches of one session in one slot
    budgets    limit of an allocator that several programs share
    pipeline   two slots: copies and runs of a batch are enqueued, and its end is signalled

A worker without models on a device imports none of this.
"""
