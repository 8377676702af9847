"""Every operator kind there is: the one place where an operator is registered.

A kind is a package with ``config.py`` (light: settings only) and ``operator.py`` (heavy: ``build``). Nothing of
either is imported before it is asked for, so that a relay starts without torch.

>>> config_class("repack").__name__
'RepackConfig'
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import cast

from laminar.operators.operator import Context, Operator, OperatorConfig
from laminar.schemas.errors import ConfigError

__all__ = ["KINDS", "build", "config_class"]

KINDS: Mapping[str, str] = {
    "prompts": "laminar.operators.prompts",
    "relay": "laminar.operators.relay",
    "repack": "laminar.operators.repack",
    "reward": "laminar.operators.reward",
    "rollout": "laminar.operators.rollout",
    "trainer": "laminar.operators.trainer",
}
"""Kind -> package. The settings are ``{package}.config:{Kind}Config``, the code is ``{package}.operator:build``."""


def config_class(kind: str) -> type[OperatorConfig]:
    """The settings class of a kind. Raises ConfigError with the valid kinds."""
    package = KINDS.get(kind)
    if package is None:
        raise ConfigError(f"unknown operator kind '{kind}' (valid: {', '.join(sorted(KINDS))})")
    found = getattr(import_module(f"{package}.config"), f"{kind.capitalize()}Config")
    return cast("type[OperatorConfig]", found)


def build(config: OperatorConfig, context: Context) -> Operator:
    """The operator of these settings, ready for its first step. Raises ConfigError, Fatal or Retryable."""
    kind = getattr(config, "kind", "")
    package = KINDS.get(kind)
    if package is None:
        raise ConfigError(f"unknown operator kind '{kind}' (valid: {', '.join(sorted(KINDS))})")
    return cast("Operator", import_module(f"{package}.operator").build(config, context))
