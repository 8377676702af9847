"""Memory for time: a model whose layers are computed again in the backward pass.

Of a layer only its input is kept, instead of everything inside it. The gradients are the same.

>>> recompute(model)                                                                       # doctest: +SKIP
"""

from __future__ import annotations

from functools import partial
from typing import Any

from laminar.schemas.errors import ConfigError

__all__ = ["recompute"]


def recompute(model: Any) -> None:
    """Make it so, in place. Raises ConfigError where the model cannot.

    transformers does it only for layers in training mode. The layers alone are set to it: what is in them, dropout
    above all, stays in evaluation mode.
    """
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ConfigError(f"trainer.recompute: {type(model).__name__} cannot (set it to false)")
    for layer in layers:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = layer.training = True
