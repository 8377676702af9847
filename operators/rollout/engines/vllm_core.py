"""vLLM's engine core, stepped in this process, and its workers, wherever they live.

With one worker the model is in this process too. With more (tensor or pipeline parallel) vLLM starts a process for each
and speaks to them through shared memory: one that dies is noticed here, and none of them outlives this process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from laminar.operators.rollout.engines.vllm_fault import faults
from laminar.operators.rollout.engines.vllm_worker import Piece, leave, settle

__all__ = ["Core"]

_RELOAD_S = 600.0
"""Within which workers in other processes have taken new weights."""
_SETTLE_S = 60.0
_LEAVE_S = 5.0

logger = logging.getLogger(__name__)


class Core:
    """See the module's docstring. ``llm``: vLLM's ``LLMEngine``, in process. Its errors are vLLM's own."""

    _living = 0
    """Of those whose model is in this process. vLLM's shutdown ends what they share of torch.distributed."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._client = llm.engine_core
        self._engine = self._client.engine_core
        self._tasks = llm.get_supported_tasks()
        self.n_workers = int(llm.vllm_config.parallel_config.world_size)
        Core._living += self.n_workers == 1
        here = threading.current_thread() is threading.main_thread()
        self._client.collective_rpc(settle, _SETTLE_S, (os.getpid(), here))

    @property
    def scheduler(self) -> Any:
        """vLLM's own, to read from."""
        return self._engine.scheduler

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._engine.scheduler.has_requests() or self._engine.batch_queue)

    @property
    def lost(self) -> str:
        """Why it can do nothing any more; empty while it can."""
        return "because a worker process died" if getattr(self._engine.model_executor, "is_failed", False) else ""

    def add(self, name: str, ids: list[int], params: Any) -> Any:
        """Straight to the core: what vLLM makes of its outputs for people (text, metrics) would be made for nothing.

        Returns the scheduler's record of it, to read from.
        """
        request = self._llm.input_processor.process_inputs(
            name, {"prompt_token_ids": ids}, params, supported_tasks=self._tasks
        )
        self._client.add_request(request)
        return self._engine.scheduler.requests[name]

    def abort(self, names: list[str]) -> None:
        """Forget requests."""
        self._client.abort_requests(names)

    def step(self) -> Sequence[Any]:
        """One step of the scheduler; what came out of it, or of an earlier one that was still on its way."""
        outputs: Sequence[Any] = self._client.get_output().outputs
        return outputs

    def pause(self, *, clear_cache: bool = True) -> list[Sequence[Any]]:
        """Begin nothing new; what the steps on their way give. ``clear_cache``: running requests give their cache back.

        What they give was made by the weights that the workers have now: it must be booked before those change.
        """
        self._engine.scheduler.set_pause_state(_paused())
        outputs = []
        while self._engine.batch_queue:
            outputs.append(self.step())
        self._engine.pause_scheduler("keep", clear_cache=clear_cache)
        return outputs

    def reload(self, pieces: Sequence[Piece], how: Callable[[Any, Sequence[Piece]], int]) -> list[int]:
        """New weights by ``how``, run in each worker, while paused; the number of tensors that each of them took."""
        taken: list[int] = self._client.collective_rpc(how, _RELOAD_S, (pieces,))
        return taken

    def resume(self, version: int) -> None:
        """Go on under the new weights."""
        self._engine.resume_scheduler()
        self._client.set_weight_version(str(version))

    def close(self, *, broken: bool = False) -> None:
        """End the workers. ``broken``: without asking them."""
        executor = self._engine.model_executor
        workers = [worker.proc for worker in getattr(executor, "workers", None) or ()]
        if broken:
            for process in workers:
                process.kill()
        elif workers and not self.lost:
            with suppress(*faults()):
                executor.collective_rpc(leave, non_block=True)
        Core._living -= self.n_workers == 1
        try:
            if workers or Core._living:  # more than that would take away what another engine in this process needs
                self._client._finalizer.detach()
                executor.shutdown()
            else:
                self._client.shutdown()
        except faults() as error:
            logger.warning("vLLM's core did not close: %s", error)
        for process in workers:
            if process.is_alive():
                process.kill()
            process.join(_LEAVE_S)


def _paused() -> Any:
    from vllm.v1.core.sched.interface import PauseState

    return PauseState.PAUSED_ALL
