"""Deterministic simulation of faults: a whole run in one process, over the memory log, under a virtual clock.

A seed decides the scenario, who goes on when, and what goes wrong: crashes before, inside and after transactions,
commits whose outcome nobody knows, processes that sleep beyond their lease and go on, twins under one name, a broker
that is away, lost weights, damaged records. The operators are the real ones; the engine, the learner's arithmetic and
the relay are stand-ins. While it runs a witness checks each record that is committed; after it the audit must balance.

The same seed gives the same events to the last byte, so a seed that fails is a test::

    python -m laminar.pipeline.simulation --seeds 2000
    python -m laminar.pipeline.simulation --seed 71 --trace
"""

from laminar.pipeline.simulation.run import Outcome, plan, simulate

__all__ = ["Outcome", "plan", "simulate"]
