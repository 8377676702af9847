"""Weights between trainer and rollouts, outside the log: slots in shared memory, and HTTP between machines.

Import from the modules: ``publisher`` (trainer), ``source`` (rollout), ``operator`` and ``config`` (the process),
``folder`` (what a supervisor removes). Nothing here imports torch.
"""
