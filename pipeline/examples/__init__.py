"""Examples: small tasks with a model that can do some of them, written as plain files that any run file can point at.

``write`` makes prompts (training and held-out rows, disjoint) and ``model/``, an ordinary Hugging Face folder whose
model already solves some of the held-out rows when sampled at temperature 1 (``odds`` and ``sortl``, small models that
are warmed up here: about a quarter), so that RL has something to raise. The same name and seed give the same files.

>>> from laminar.pipeline.examples import NAMES
>>> NAMES
('odds', 'smollm2', 'sortl')
"""

from laminar.pipeline.examples.folder import ExampleFolder, write
from laminar.pipeline.examples.task import NAMES

__all__ = ["NAMES", "ExampleFolder", "write"]
