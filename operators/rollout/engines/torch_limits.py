"""What the torch engine can take, and the refusal of what it cannot."""

from __future__ import annotations

import math

import numpy as np

from laminar.operators.rollout.engine import EngineLimits, EngineRequest
from laminar.schemas.errors import ConfigError, InvalidRequest

__all__ = ["check_request", "engine_limits"]


def engine_limits(
    positions: int | None, *, max_running: int, max_model_len: int | None, kv_total: int | None
) -> EngineLimits:
    """Limits from the model's ``max_position_embeddings`` and the settings. Raises ConfigError."""
    if positions is None and max_model_len is None:
        raise ConfigError("engine.max_model_len: is needed, because config.json has no max_position_embeddings")
    longest = max_model_len or positions or 0
    if longest < 2 or (positions is not None and longest > positions):
        raise ConfigError(
            f"engine.max_model_len: {longest} (valid: 2 to {positions}, the model's max_position_embeddings)"
        )
    total = max_running * longest if kv_total is None else kv_total
    if total < 2:
        raise ConfigError(f"engine.kv_total: {total} is below 2")
    return EngineLimits(max_running=max_running, max_model_len=min(longest, total), kv_total=total)


def check_request(request: EngineRequest, limits: EngineLimits, vocab_size: int) -> None:
    """Raise InvalidRequest for what could never be sampled."""
    where = request.trajectory_id
    n_prompt, n_sampled, most = len(request.prompt_ids), request.sampled.n_tokens, limits.max_model_len
    if not 0 < n_prompt < most:
        raise InvalidRequest(f"{where}: {n_prompt} prompt tokens (valid: 1 to {most - 1}, max_model_len is {most})")
    if n_prompt + n_sampled > most:
        raise InvalidRequest(f"{where}: {n_prompt} prompt and {n_sampled} response tokens, max_model_len is {most}")
    s = request.sampling
    ids = np.concatenate((np.asarray(request.prompt_ids, dtype=np.int64), request.sampled.ids_T))
    checks = (
        (ids.min() >= 0 and ids.max() < vocab_size, f"token ids {ids.min()} to {ids.max()}", f"0 to {vocab_size - 1}"),
        (s.max_tokens >= 1, f"max_tokens {s.max_tokens}", "1 and more"),
        (0 <= s.temperature < math.inf, f"temperature {s.temperature}", "0 and more"),
        (0 < s.top_p <= 1, f"top_p {s.top_p}", "above 0, up to 1"),
        (s.top_k >= 0, f"top_k {s.top_k}", "0 (all) and more"),
        (0 <= s.min_p <= 1, f"min_p {s.min_p}", "0 to 1"),
        ("" not in s.stop, "an empty stop string", "strings of one character and more"),
    )
    for good, what, valid in checks:
        if not good:
            raise InvalidRequest(f"{where}: {what} (valid: {valid})")
