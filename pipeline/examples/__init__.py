"""Examples: small tasks with a warmed-up model, written as plain files that any run file can point at.

``write`` makes prompts (training and held-out rows, disjoint) and ``model/``, an ordinary Hugging Face folder whose
model already solves about a quarter of the held-out rows when sampled at temperature 1, so that RL has something to
raise. The same name and seed give the same files.

>>> from laminar.pipeline.examples import NAMES
>>> NAMES
('odds', 'sortl')
"""

from laminar.pipeline.examples.folder import ExampleFolder, write
from laminar.pipeline.examples.task import NAMES

__all__ = ["NAMES", "ExampleFolder", "write"]
