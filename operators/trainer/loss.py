"""The policy loss and its diagnostics, as pure functions of logprobs.

Shapes: B rows, T response positions (padded), ``mask_BT`` 1 where the policy sampled a token that is trained on.
Sums, not means, leave this module: the caller divides by the token count of the whole step, taken before any
masking, so that the result does not depend on how the step was cut into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

__all__ = ["LossSums", "clip_loss", "token_logprobs"]

_MAX_LOG_RATIO = 20.0
"""exp() of more than this only overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over the masked tokens of some rows; add them up over a step's micro-batches."""

    loss: float = 0.0
    """Already divided by the step's token count."""
    tokens: float = 0.0
    ratio: float = 0.0
    """Of w = exp(current - behaviour)."""
    ratio_squared: float = 0.0
    k3: float = 0.0
    entropy: float = 0.0
    """Nats."""
    clipped: float = 0.0
    """Tokens whose gradient the clip removed."""

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def metrics(self) -> dict[str, float]:
        """Means over the tokens: loss, k3, ess, entropy, clip_fraction.

        ``k3`` is mean(w - 1 - log w), an estimate of KL(behaviour || current) (Schulman, "Approximating KL", 2020).
        ``ess`` is the effective sample size (sum w)^2 / (n * sum w^2), 1 when on-policy.
        """
        n = max(1.0, self.tokens)
        ess = self.ratio**2 / (n * self.ratio_squared) if self.ratio_squared > 0 else 1.0
        return {
            "loss": self.loss,
            "k3": self.k3 / n,
            "ess": ess,
            "entropy": self.entropy / n,
            "clip_fraction": self.clipped / n,
        }


_SUMS = tuple(f.name for f in fields(LossSums))


def token_logprobs(
    logits_BTV: torch.Tensor, ids_BT: torch.Tensor, temperature_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of each id at its row's temperature, and the entropy (no gradient): both (B, T), float32, nats."""
    scaled_BTV = logits_BTV.float() / temperature_B[:, None, None]
    logp_BTV = torch.log_softmax(scaled_BTV, dim=-1)
    picked_BT = logp_BTV.gather(-1, ids_BT[..., None]).squeeze(-1)
    with torch.no_grad():
        # A vocabulary may hold masked entries at -inf; 0 * -inf must count as 0.
        entropy_BT = -(logp_BTV.exp() * logp_BTV.clamp_min(-1e4)).sum(-1)
    return picked_BT, entropy_BT


def clip_loss(
    logprobs_BT: torch.Tensor,
    *,
    sampler_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    denominator: float,
    low: float,
    high: float,
    correct: bool = True,
) -> tuple[torch.Tensor, LossSums]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with clip-higher (DAPO, arXiv 2503.14476, eq. 10).

    loss = -sum over tokens of min(w A, clip(w, 1 - low, 1 + high) A) / denominator, with w = exp(logprobs - behaviour).
    The behaviour logprob is the sampler's; with ``correct`` false it is ``logprobs_BT`` itself without gradient, so
    w = 1. The diagnostics always compare with the sampler's. The loss is attached to the graph even where the mask is
    0 everywhere (its gradient is then 0).
    """
    keep_BT = mask_BT.bool()
    zero = torch.zeros((), dtype=logprobs_BT.dtype, device=logprobs_BT.device)
    current_BT = torch.where(keep_BT, logprobs_BT, zero)
    log_ratio_BT = torch.where(keep_BT, logprobs_BT.detach() - sampler_BT, zero).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    behaviour_BT = torch.where(keep_BT, sampler_BT, zero) if correct else current_BT.detach()
    w_BT = (current_BT - behaviour_BT).clamp(max=_MAX_LOG_RATIO).exp()
    advantages_B1 = advantages_B[:, None]
    plain_BT = w_BT * advantages_B1
    clipped_BT = w_BT.clamp(1 - low, 1 + high) * advantages_B1
    objective_BT = torch.where(keep_BT, torch.minimum(plain_BT, clipped_BT), zero)
    loss = -objective_BT.sum() / denominator
    with torch.no_grad():
        n = keep_BT.sum()
        ratio_BT = torch.where(keep_BT, log_ratio_BT.exp(), zero)
        k3_BT = torch.where(keep_BT, torch.expm1(log_ratio_BT) - log_ratio_BT, zero)
        sums = torch.stack(
            [
                loss.detach(),
                n.to(loss.dtype),
                ratio_BT.sum(),
                ratio_BT.square().sum(),
                k3_BT.sum(),
                torch.where(keep_BT, entropy_BT, zero).sum(),
                (keep_BT & (clipped_BT < plain_BT)).sum().to(loss.dtype),
            ]
        ).tolist()
    return loss, LossSums(**dict(zip(_SUMS, sums, strict=True)))
