"""vLLM's core in this process, one step of its scheduler at a time; its workers too, or in processes of their own.

Guarantees, beside those of ``laminar.operators.rollout.engine``:

* A token's logprob is of the distribution that it was drawn from (vLLM's ``processed_logprobs``); at temperature 0 that
  of temperature 1 without truncation. The same as in the torch engine.
* ``load`` happens between two steps: the running requests give their cache back, the prefix cache is emptied, and what
  was sampled is read again under the new weights. So a token's version is exactly that of the weights that made it.
* What is wrong with new weights is said before the first byte is written. An error after that, or in a step, takes the
  engine out of service: every later call raises Unavailable, and the operator's process starts anew. The same holds
  when a worker dies, or one of several (``tensor_parallel_size``) fails: never do they hold different versions.
* What ends a response (end tokens of the folder, stop tokens, stop strings, also one that began before a resume) is the
  same as in the torch engine.

A sampled request draws with seed f(request.seed, tokens so far): the same request gives the same tokens, but one that
is resumed does not go on with those that it would have had; a greedy one does.

>>> engine = VllmEngine("examples/sortl/model", args={"enforce_eager": True})  # doctest: +SKIP
>>> engine.load(tensors, version=3)                                            # doctest: +SKIP
>>> engine.submit(request)                                                     # doctest: +SKIP
>>> deltas = engine.poll(0.1)                                                  # doctest: +SKIP
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from laminar.operators.rollout.engine import Delta, EngineLimits, EngineRequest, EngineStats
from laminar.operators.rollout.engines.in_process import InProcess
from laminar.operators.rollout.engines.text import decoder_of
from laminar.operators.rollout.engines.torch_limits import check_request
from laminar.operators.rollout.engines.vllm_core import Core
from laminar.operators.rollout.engines.vllm_fault import faults, reason
from laminar.operators.rollout.engines.vllm_names import environment
from laminar.operators.rollout.engines.vllm_row import Row, seed_of
from laminar.operators.rollout.engines.vllm_start import end_tokens, start
from laminar.operators.rollout.engines.vllm_weights import located, matched, table_of
from laminar.operators.rollout.engines.vllm_worker import Piece, reload
from laminar.operators.weights import TensorView
from laminar.schemas.errors import ConfigError, InvalidRequest, Unavailable
from laminar.schemas.tokens import EMPTY

__all__ = ["VllmEngine"]

_LEAST_S = 0.015
"""Of a poll: what each of them costs, here and in the operator, is much beside a single step of a small model."""

logger = logging.getLogger(__name__)


class VllmEngine(InProcess):
    """See the module's docstring.

    ``args``: vLLM's engine arguments under its own names. ``env``: environment variables beside those that it needs.
    ``kv_total``: tokens of KV cache, by default what vLLM finds room for. ``eos_token_ids``: what ends a response
    besides the request's own stop tokens, by default what the folder says. ``gather_s``: how long tokens may wait for
    more of the same request, unless it has ended. Raises ConfigError.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "float32",
        max_running: int = 64,
        kv_total: int | None = None,
        max_model_len: int | None = None,
        threads: int = 1,
        trust_remote_code: bool = False,
        steps_per_poll: int = 8,
        gather_s: float = 0.1,
        eos_token_ids: Sequence[int] | None = None,
        args: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        folder = Path(model_path)
        self._vllm = start(
            folder,
            dtype=dtype,
            max_running=max_running,
            kv_total=kv_total,
            max_model_len=max_model_len,
            threads=threads,
            trust_remote_code=trust_remote_code,
            args=args or {},
            env=environment(env or {}),
        )
        import vllm
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError

        self._core = Core(self._vllm)
        self._refusals = (ValueError, VLLMClientError)
        self._params = SamplingParams
        config = self._vllm.vllm_config
        self._block = int(config.cache_config.block_size)
        total = (int(config.cache_config.num_gpu_blocks) - 1) * self._block
        self._limits = EngineLimits(
            max_running=max_running, max_model_len=int(config.model_config.max_model_len), kv_total=total
        )
        self._table = table_of(folder, dtype)
        text = config.model_config.hf_text_config
        self._tied = bool(getattr(text, "tie_word_embeddings", False))
        self.vocab_size = int(config.model_config.get_vocab_size())
        tokenizer = self._vllm.get_tokenizer()
        self._text = decoder_of(tokenizer)
        found = end_tokens(folder, config.model_config.hf_config, text, tokenizer)
        self._eos = frozenset(found if eos_token_ids is None else eos_token_ids)
        self._steps_per_poll = steps_per_poll
        self._gather_s = gather_s
        self._version = -1
        self._rows: dict[str, Row] = {}
        """By trajectory, in the order of submission."""
        self._by_name: dict[str, Row] = {}
        self._born = 0
        self._preempted = 0
        self._reload: Callable[[Any, Sequence[Piece]], int] = reload
        """Run in each worker."""
        self._broken: str | None = None
        self._closed = False
        self.name = "vllm-" + ".".join(vllm.__version__.split(".")[:2])
        self._try_out(folder)

    @property
    def version(self) -> int:
        """Policy version loaded; -1 before the first load."""
        return self._version

    @property
    def limits(self) -> EngineLimits:
        """Fixed after start."""
        return self._limits

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequest when it can never be served (naming the limit)."""
        self._must_live()
        where = request.trajectory_id
        if where in self._rows:
            raise InvalidRequest(f"{where}: already in the engine")
        check_request(request, self._limits, self.vocab_size)
        sampling = request.sampling
        row = Row(
            request,
            name=f"{where}#{self._born}",
            limit=min(sampling.max_tokens, self._limits.max_model_len - len(request.prompt_ids)),
            stops=self._eos.union(sampling.stop_token_ids),
            decode=self._text,
        )
        self._born += 1
        if not row.ended:
            ids = [*request.prompt_ids, *request.sampled.ids_T.tolist()]
            try:
                row.scheduled = self._core.add(row.name, ids, self._sampling(row))
            except self._refusals as error:
                raise InvalidRequest(f"{where}: {reason(error)}") from error
        self._rows[where] = self._by_name[row.name] = row

    def abort(self, trajectory_id: str) -> Delta | None:
        """Forget a request; return what was sampled and not yet polled. None: not in the engine."""
        row = self._rows.get(trajectory_id)
        if row is None:
            return None
        if not row.ended and self._broken is None:
            self._core.abort([row.name])
        self._forget(row)
        return row.take() or Delta(trajectory_id=trajectory_id, tokens=EMPTY)

    def poll(self, timeout_s: float) -> list[Delta]:
        """Decode up to ``steps_per_poll`` steps, fewer once ``timeout_s`` (or 15 ms) is over; return new tokens.

        All of the requests that have ended or whose tokens have waited for ``gather_s``; of one at least.
        """
        self._must_live()
        if self._version < 0:
            return []
        until = time.monotonic() + max(timeout_s, _LEAST_S)
        for _ in range(self._steps_per_poll):
            if not self._core.busy:
                break
            self._step()
            if time.monotonic() >= until:
                break
        return self._tell(time.monotonic())

    def load(self, weights: Mapping[str, TensorView], version: int) -> None:
        """Take new weights (copied before return). Raises WeightsMismatch before anything was changed.

        Raises Unavailable when it fails after that: the engine serves nothing any more.
        """
        self._must_live()
        views = matched(self._table, weights, tied=self._tied)
        with located(views) as pieces:
            try:
                self._drop_caches()
                taken = self._core.reload(pieces, self._reload)
            except faults() as error:
                raise self._dead(f"while it loaded version {version}: {self._reason(error)}") from error
        if taken != [len(pieces)] * self._core.n_workers:
            raise self._dead(f"version {version}: its workers took {taken} of {len(pieces)} tensors")
        self._version = version
        self._core.resume(version)

    def stats(self) -> EngineStats:
        """Counts as of now."""
        if self._broken is not None:
            return EngineStats(running=0, waiting=0, kv_used=0, kv_total=self._limits.kv_total)
        self._count_preempted(self._rows.values())
        scheduler = self._core.scheduler
        running = len(scheduler.running)
        cached = sum(int(request.num_computed_tokens) for request in scheduler.running)
        blocks = round(scheduler.get_kv_cache_usage() * self._limits.kv_total)
        return EngineStats(
            running=running,
            waiting=len(self._rows) - running,
            kv_used=min(cached, blocks),  # what a group shares counts once
            kv_total=self._limits.kv_total,
            preempted=self._preempted,
        )

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of response tokens, without special tokens."""
        return self._text(ids)

    def close(self) -> None:
        """Free everything."""
        self._rows.clear()
        self._by_name.clear()
        if not self._closed:
            self._closed = True
            self._core.close(broken=self._broken is not None)
            self._broken = self._broken or "because it was closed"

    def _sampling(self, row: Row) -> Any:
        """vLLM's parameters for what is left of a request."""
        sampling = row.request.sampling
        return self._params(
            max_tokens=row.limit - row.n_response,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed_of(row.request.seed, row.n_response),
            stop_token_ids=sorted(row.stops),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            skip_clone=True,  # it belongs to this request alone
        )

    def _step(self) -> None:
        """One step of the scheduler."""
        try:
            outputs = self._core.step()
        except faults() as error:
            raise self._dead(f"in a step: {self._reason(error)}") from error
        self._take(outputs)

    def _take(self, outputs: Sequence[Any]) -> None:
        """Book what the version that is loaded has sampled."""
        done: list[str] = []
        by_name, version = self._by_name, self._version
        for output in outputs:  # of every row in every step
            row = by_name.get(output.request_id)
            if row is None or row.ended:
                continue
            ids = output.new_token_ids
            if ids:
                logprobs = output.new_logprobs.logprobs  # at ``logprobs=0`` the only column is the sampled token's
                for i, token in enumerate(ids):
                    if not row.ended:
                        row.add(token, logprobs.item(i, 0), version)
            if output.finish_reason is not None and not row.ended:
                row.fail(f"vLLM ended it: {output.finish_reason}")
            elif row.ended and output.finish_reason is None:
                done.append(row.name)
        if done:
            self._core.abort(done)

    def _tell(self, now: float) -> list[Delta]:
        due = now - self._gather_s
        telling = [row for row in self._rows.values() if row.ended or row.told_at <= due]
        if not any(row.untold for row in telling):
            telling = [row for row in self._rows.values() if row.untold]
            telling = [min(telling, key=lambda row: row.told_at)] if telling else []
        deltas = []
        for row in telling:
            delta = row.take()
            if delta is not None:
                row.told_at = now
                deltas.append(delta)
            if row.ended:
                self._forget(row)
        return deltas

    def _drop_caches(self) -> None:
        """Nothing that the old weights computed is used again; requests wait with what they sampled."""
        self._count_preempted(self._rows.values())
        for outputs in self._core.pause():
            self._take(outputs)
        for row in self._rows.values():  # none of them for want of room
            row.preemptions = row.scheduled.num_preemptions if row.scheduled is not None else 0

    def _count_preempted(self, rows: Iterable[Row]) -> None:
        """Take note of requests that lost their cache for want of room."""
        for row in rows:
            n = row.scheduled.num_preemptions if row.scheduled is not None else 0
            if n != row.preemptions:
                self._preempted += n - row.preemptions
                row.preemptions = n

    def _forget(self, row: Row) -> None:
        self._count_preempted([row])
        self._rows.pop(row.request.trajectory_id, None)
        self._by_name.pop(row.name, None)

    def _must_live(self) -> None:
        if self._broken is not None:
            raise Unavailable(f"engine {self.name}: out of service {self._broken}")
        if self._core.lost:
            raise self._dead(self._core.lost)

    def _reason(self, error: Exception) -> str:
        return self._core.lost or reason(error)

    def _dead(self, why: str) -> Unavailable:
        self._broken = why
        logger.error("engine %s: out of service %s", self.name, why)
        return Unavailable(f"engine {self.name}: out of service {why}")

    def _try_out(self, folder: Path) -> None:
        """Two tokens of the folder's own weights: what its kernels cannot do shows now, and they are warm after it."""
        params = self._params(max_tokens=2, temperature=1.0, seed=0, ignore_eos=True, detokenize=False, logprobs=0)
        n = min(2, self._limits.max_model_len - 1)
        try:
            self._core.add("try", [0] * n, params)
            while self._core.busy:
                self._core.step()
        except faults() as error:
            if self._core.n_workers > 1:
                self.close()
            config = self._vllm.vllm_config.model_config
            raise ConfigError(
                f"engine: vLLM cannot serve {folder} ({', '.join(config.architectures)}, head size"
                f" {config.get_head_size()}): {reason(error)}{self._head_sizes(config.get_head_size())}"
            ) from error

    def _head_sizes(self, wanted: int) -> str:
        """What its attention has kernels for, where that is not the model's."""
        layers = self._vllm.vllm_config.compilation_config.static_forward_context.values()
        backends = [layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend")]
        sizes = sorted({size for backend in backends for size in backend.get_supported_head_sizes()})
        return f" (valid head sizes: {', '.join(map(str, sizes))})" if sizes and wanted not in sizes else ""
