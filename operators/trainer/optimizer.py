"""AdamW and the learning rate of each step.

>>> from laminar.operators.trainer.config import OptimizerConfig
>>> [learning_rate(step, 100, OptimizerConfig(lr=1.0, warmup_steps=2)) for step in (1, 2, 3)]
[0.5, 1.0, 1.0]
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from laminar.operators.trainer.config import OptimizerConfig

if TYPE_CHECKING:
    import torch

__all__ = ["adamw", "learning_rate"]


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Of optimizer step ``step`` (1 for the first) in a run of ``total_steps``."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_steps - config.warmup_steps)
    part = min(1.0, (step - config.warmup_steps) / span)
    low = config.min_lr_ratio
    return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * part)))


def adamw(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all parameters; weight decay on those with two dimensions or more.

    On a GPU it is fused: the other kind makes a copy of a moment while it works, 4 bytes a parameter.
    """
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        foreach=not fused,
        fused=fused,
    )
