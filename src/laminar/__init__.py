"""Laminar: asynchronous RL post-training of language models as a dataflow over a durable log.

The four packages below this one depend on each other in one direction only::

    schemas <- streams <- operators <- pipeline

Nothing is imported here, so that ``import laminar`` costs nothing.
"""

__version__ = "0.1.0"
