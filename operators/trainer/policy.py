"""The policy model in training: forward, loss, backward, optimizer, one micro-batch at a time.

Parameters and optimizer are float32; with ``dtype: bfloat16`` the forward and backward pass run under autocast. The
model stays in evaluation mode: dropout would make its logprobs disagree with the sampler's.

>>> policy = Policy(load_model(run.model), config, total_steps=50, publish_dtype="bfloat16")     # doctest: +SKIP
>>> policy.begin(batch, step=1)
>>> while policy.advance(): ...
>>> policy.finish()["grad_norm"]
"""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from laminar.operators.checkpoint_name import refuse_missing
from laminar.operators.operator import ModelConfig
from laminar.operators.trainer.config import TrainerConfig
from laminar.operators.trainer.loss import LossSums, clip_loss, token_logprobs
from laminar.operators.trainer.optimizer import adamw, learning_rate
from laminar.operators.trainer.packing import Rows, micro_batches, rows
from laminar.operators.trainer.probes import Probing
from laminar.operators.trainer.publish import identity_of, named_tensors, tied_names
from laminar.operators.trainer.recomputing import recompute
from laminar.operators.trainer.selection import Batch
from laminar.operators.weights import NamedTensor
from laminar.schemas.errors import CheckpointError, ConfigError
from laminar.schemas.records import Probe

__all__ = ["Policy", "device_of", "load_model"]

_FILE = "learner.pt"

logger = logging.getLogger(__name__)


class Policy:
    """See the module's docstring and ``learner.Learner``."""

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        *,
        total_steps: int,
        publish_dtype: str = "float32",
    ) -> None:
        self._config = config
        self._device = device_of(config.device)
        self._model = model.to(device=self._device, dtype=torch.float32).eval()
        if config.recompute:
            recompute(self._model)
        self._optimizer = adamw(self._model, config.optimizer)
        self._total_steps = total_steps
        self._publish_dtype: torch.dtype = getattr(torch, publish_dtype)
        self._tied = tied_names(self._model)
        self._probing = Probing(self._model)
        self._step = 0
        self._denominator = 1.0
        self._left: list[Rows] = []
        self._sums = LossSums()
        self._forward_s = 0.0
        self._n_micro = 0

    @property
    def identity(self) -> str:
        """See Learner.identity."""
        return identity_of(self._model)

    @property
    def tied(self) -> Mapping[str, str]:
        """See Learner.tied."""
        return self._tied

    def tensors(self) -> Iterator[NamedTensor]:
        """See Learner.tensors. One tensor at a time is cast and copied to the host."""
        return named_tensors(self._model, self._publish_dtype, self._tied)

    def probes(self) -> tuple[Probe, ...]:
        """See Learner.probes: one forward pass as those of training are, under the weights in float32."""
        return self._probing.ask(self._model, device=self._device, autocast=self._config.dtype == "bfloat16")

    def begin(self, batch: Batch, step: int) -> None:
        """See Learner.begin."""
        self.abandon()
        self._step = step
        self._denominator = float(batch.denominator)
        lengths = [s.trajectory.prompt.n_prompt_tokens + s.trajectory.response.n_tokens for s in batch.samples]
        cut = micro_batches(lengths, self._config.micro_batch_tokens)
        self._left = [rows([batch.samples[i] for i in part]) for part in reversed(cut)]
        self._n_micro = len(cut)

    def advance(self) -> bool:
        """See Learner.advance."""
        if not self._left:
            return False
        began = time.perf_counter()
        loss, sums = self._loss(self._left.pop())
        loss.backward()  # type: ignore[no-untyped-call]
        self._sums += sums
        self._forward_s += time.perf_counter() - began
        return bool(self._left)

    def finish(self) -> dict[str, float]:
        """See Learner.finish. Without samples, or with a gradient that is not finite, the weights stay as they are."""
        lr = learning_rate(self._step, self._total_steps, self._config.optimizer)
        grad_norm = 0.0
        if self._n_micro:
            grad_norm = float(
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.optimizer.clip_norm)
            )
        finite = math.isfinite(grad_norm)
        if self._n_micro and finite:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        if not finite:
            logger.warning("step %d: the gradient norm is %s; the update is skipped", self._step, grad_norm)
        metrics = {
            **self._sums.metrics(),
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped_update": float(not (self._n_micro and finite)),
            "micro_batches": float(self._n_micro),
            "forward_s": self._forward_s,
        }
        self.abandon()
        return metrics

    def abandon(self) -> None:
        """See Learner.abandon."""
        self._left = []
        self._sums = LossSums()
        self._forward_s = 0.0
        self._n_micro = 0
        self._optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path) -> None:
        """See Learner.save."""
        cuda = torch.cuda.get_rng_state_all() if self._device.type == "cuda" else []
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }
        torch.save(state, folder / _FILE)

    def load(self, folder: Path) -> None:
        """See Learner.load."""
        path = folder / _FILE
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"]["cpu"])
            if self._device.type == "cuda" and state["rng"]["cuda"]:
                torch.cuda.set_rng_state_all(state["rng"]["cuda"])
        except (OSError, RuntimeError, LookupError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path}: damaged or of another model: {str(error).splitlines()[0]}") from error

    def _loss(self, batch: Rows) -> tuple[torch.Tensor, LossSums]:
        on = self._device
        logits_at_BT = torch.from_numpy(batch.logits_at_BT).to(on)
        mask_BT = torch.from_numpy(batch.mask_BT).to(on)
        # Only the positions from the first response token on need logits.
        length = batch.input_ids_BL.shape[1]
        first = int(batch.logits_at_BT[:, 0].min())
        with torch.autocast(on.type, dtype=torch.bfloat16, enabled=self._config.dtype == "bfloat16"):
            logits_BKV = self._model(
                input_ids=torch.from_numpy(batch.input_ids_BL).to(on),
                use_cache=False,
                logits_to_keep=length - first,
            ).logits
        at_BT = (logits_at_BT - first).clamp_min(0)
        logits_BTV = logits_BKV.gather(1, at_BT[..., None].expand(-1, -1, logits_BKV.shape[-1]))
        logprobs_BT, entropy_BT = token_logprobs(
            logits_BTV, torch.from_numpy(batch.targets_BT).to(on), torch.from_numpy(batch.temperature_B).to(on)
        )
        algorithm = self._config.algorithm
        return clip_loss(
            logprobs_BT,
            sampler_BT=torch.from_numpy(batch.sampler_BT).to(on),
            advantages_B=torch.from_numpy(batch.advantages_B).to(on),
            mask_BT=mask_BT,
            entropy_BT=entropy_BT,
            denominator=self._denominator,
            low=algorithm.clip_low,
            high=algorithm.clip_high,
            correct=algorithm.behaviour_logprobs == "sampler",
        )


def device_of(name: str) -> torch.device:
    """The device of the config's ``device``. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"trainer.device: unknown '{name}' (valid: auto, cpu, cuda, cuda:N)") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"trainer.device: '{name}' is not here ({torch.cuda.device_count()} CUDA devices are)")
    return device


def load_model(config: ModelConfig) -> Any:
    """The Hugging Face causal LM in the folder, in float32. Raises ConfigError in one line."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not (config.path / "config.json").is_file():
        raise ConfigError(f"model.path: {config.path} is no model folder (a folder with config.json is needed)")
    bars: Any = transformers_logging  # its functions have no annotations
    bars.disable_progress_bar()  # they would stand in the process's log
    loading: Any = AutoModelForCausalLM
    try:
        model, found = loading.from_pretrained(
            config.path,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model.path: {config.path}: {str(error).splitlines()[0]}") from error
    refuse_missing(config.path, found)
    return model
