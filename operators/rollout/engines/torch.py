"""A small engine over any Hugging Face causal LM folder, with continuous batching, on CPU or GPU.

Finished rows leave the batch between two steps and waiting ones enter; equal prompts that enter together (a group) are
read once. Guarantees, beside those of ``laminar.operators.rollout.engine``:

* What a request samples does not depend on what else is in the batch, on preemption or on ``steps_per_poll``, up to
  the rounding of matrix products of other shapes. Randomness is f(seed, position), so a resumed trajectory, sampled
  or greedy, continues with the tokens it would have had.
* Temperature 0 takes the likeliest token; its logprob is that of temperature 1.
* Nothing is sampled before the first ``load`` (or give ``version`` for the folder's own weights).
* The cache is a rectangle, rows times the longest row, and never larger than ``kv_total`` tokens (twice that is
  allocated, so that it is seldom copied). When it would be, the youngest rows wait and are read again later.

>>> engine = TorchEngine("examples/sortl/model", version=0)  # doctest: +SKIP
>>> engine.submit(request)                                   # doctest: +SKIP
>>> deltas = engine.poll(0.1)                                # doctest: +SKIP
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from laminar.operators.rollout.engine import Delta, EngineLimits, EngineRequest, EngineStats
from laminar.operators.rollout.engines.in_process import InProcess
from laminar.operators.rollout.engines.torch_batch import Batch, Row
from laminar.operators.rollout.engines.torch_cache import RowCache
from laminar.operators.rollout.engines.torch_limits import check_request, engine_limits
from laminar.operators.rollout.engines.torch_model import CausalModel, resolve_device
from laminar.operators.rollout.engines.torch_sampler import sample
from laminar.operators.rollout.engines.torch_weights import load_weights
from laminar.operators.weights import TensorView
from laminar.schemas.errors import ConfigError, InvalidRequest
from laminar.schemas.records import FinishReason
from laminar.schemas.tokens import EMPTY

__all__ = ["TorchEngine"]

_PREFILL_TOKENS = 16384
"""Most tokens that one forward over prompts reads, unless a single prompt is longer."""


class TorchEngine(InProcess):
    """See the module's docstring.

    ``dtype``: float32, bfloat16 or float16. ``device``: auto, cpu, cuda, cuda:N. ``max_model_len``: prompt and response
    tokens of one sequence, by default what ``config.json`` says. ``kv_total``: by default, every row may be that long.
    ``threads``: of torch in this process, on CPU. ``steps_per_poll``: most decode steps of one poll.
    ``eos_token_ids``: what ends a response besides the request's own stop tokens, by default what the folder says.
    Raises ConfigError.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_running: int = 64,
        kv_total: int | None = None,
        max_model_len: int | None = None,
        threads: int = 1,
        trust_remote_code: bool = False,
        steps_per_poll: int = 8,
        eos_token_ids: Sequence[int] | None = None,
        version: int = -1,
    ) -> None:
        for name, value in (("max_running", max_running), ("threads", threads), ("steps_per_poll", steps_per_poll)):
            if value < 1:
                raise ConfigError(f"engine.{name}: {value} is below 1")
        self._device = resolve_device(device)
        torch.set_num_threads(threads)
        self._model = CausalModel(
            Path(model_path), dtype=dtype, device=self._device, trust_remote_code=trust_remote_code
        )
        self._limits = engine_limits(
            self._model.max_positions, max_running=max_running, max_model_len=max_model_len, kv_total=kv_total
        )
        self._eos = frozenset(self._model.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._steps_per_poll = steps_per_poll
        self._version = version
        self._waiting: deque[Row] = deque()
        self._batch = Batch(max_running, steps_per_poll + 1)
        self._cache = RowCache(
            layers=self._model.n_layers,
            max_rows=max_running,
            dtype=self._model.dtype,
            device=self._device,
            prepared_mask=self._model.takes_prepared_mask,
        )
        self._ids: set[str] = set()
        self._deltas: list[Delta] = []
        self._born = 0
        self._preempted = 0
        self.vocab_size = self._model.vocab_size
        self.name = "torch-" + ".".join(torch.__version__.split(".")[:2])

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
        where = request.trajectory_id
        if where in self._ids:
            raise InvalidRequest(f"{where}: already in the engine")
        check_request(request, self._limits, self.vocab_size)
        sampling = request.sampling
        row = Row(
            request,
            limit=min(sampling.max_tokens, self._limits.max_model_len - len(request.prompt_ids)),
            stops=self._eos.union(sampling.stop_token_ids),
            born=self._born,
        )
        self._born += 1
        self._ids.add(where)
        self._waiting.append(row)

    def abort(self, trajectory_id: str) -> Delta | None:
        """Forget a request; return what was sampled and not yet polled. None: not in the engine."""
        if trajectory_id not in self._ids:
            return None
        self._ids.discard(trajectory_id)
        for row in self._waiting:
            if row.request.trajectory_id == trajectory_id:
                self._waiting.remove(row)
                return Delta(trajectory_id=trajectory_id, tokens=EMPTY)
        at = next(i for i, row in enumerate(self._batch.rows) if row.request.trajectory_id == trajectory_id)
        tokens = self._batch.flush(at, self._version)
        with torch.inference_mode():  # the cache's tensors were made in it
            self._remove([at])
        return Delta(trajectory_id=trajectory_id, tokens=tokens)

    def poll(self, timeout_s: float) -> list[Delta]:
        """Decode up to ``steps_per_poll`` steps, fewer once ``timeout_s`` is over; return the new tokens."""
        if self._version < 0:
            return []
        until = time.monotonic() + timeout_s
        with torch.inference_mode():
            self._admit()
            for _ in range(self._steps_per_poll):
                if not self._batch:
                    break
                self._step()
                # Reading prompts costs about as much as a step: wait for a quarter of the rows, or the next poll.
                if self._waiting and 4 * (self._limits.max_running - len(self._batch)) >= self._limits.max_running:
                    self._admit()
                if time.monotonic() >= until:
                    break
        for at in range(len(self._batch)):
            self._say(at, finish=None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def load(self, weights: Mapping[str, TensorView], version: int) -> None:
        """Take new weights (copied before return). Raises WeightsMismatch before anything was changed."""
        load_weights(self._model.module, weights)
        self._version = version
        self._waiting.extendleft(sorted(self._batch.rows, key=lambda row: -row.born))
        self._batch.remove(range(len(self._batch)))
        self._cache.clear()

    def stats(self) -> EngineStats:
        """Counts as of now."""
        n = len(self._batch)
        return EngineStats(
            running=n,
            waiting=len(self._waiting),
            kv_used=int(self._batch.n_tokens[:n].sum()) - n,
            kv_total=self._limits.kv_total,
            preempted=self._preempted,
        )

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of response tokens, without special tokens."""
        return self._model.decode(ids)

    def close(self) -> None:
        """Free everything."""
        self._waiting.clear()
        self._ids.clear()
        self._batch.remove(range(len(self._batch)))
        self._cache.clear()

    def _admit(self) -> None:
        """Read the prompts (and partial responses) of waiting rows while there is room, and sample one token each."""
        while self._waiting:
            taken = self._take_waiting()
            if not taken:
                return
            first = len(self._batch)
            texts: dict[bytes, int] = {}
            source = [texts.setdefault(row.ids().tobytes(), len(texts)) for row in taken]
            columns = max(row.n_tokens for row in taken)
            n_ids = np.zeros((len(texts), columns), dtype=np.int64)
            for text, at in texts.items():
                ids = np.frombuffer(text, dtype=np.int32)
                n_ids[at, columns - len(ids) :] = ids
            self._cache.reserve(len(taken), columns)
            lengths = torch.tensor([row.n_tokens for row in taken], device=self._device)
            copies = torch.tensor(source, device=self._device)
            seen = self._cache.add(lengths, copies, columns)
            distinct = torch.tensor([source.index(at) for at in range(len(texts))], device=self._device)
            seen = seen[distinct]
            positions = (seen.cumsum(dim=1) - 1).clamp(min=0)
            ids_NT = torch.from_numpy(n_ids).to(self._device)
            logits = self._model.forward(ids_NT, positions, seen, self._cache.view)
            self._cache.filled(max(self._batch.longest(), columns))
            for row in taken:
                self._batch.append(row)
            self._accept(first, logits[copies])

    def _take_waiting(self) -> list[Row]:
        """The next waiting rows that fit into the batch, the cache and one forward, in order."""
        taken: list[Row] = []
        longest, columns = self._cache.width, 0
        while self._waiting and len(self._batch) + len(taken) < self._limits.max_running:
            row = self._waiting[0]
            finish = row.finished()
            if finish is not None:
                self._waiting.popleft()
                self._ids.discard(row.request.trajectory_id)
                self._deltas.append(Delta(trajectory_id=row.request.trajectory_id, tokens=EMPTY, finish=finish))
                continue
            rows = len(self._batch) + len(taken) + 1
            longest, columns = max(longest, row.n_tokens), max(columns, row.n_tokens)
            # One step more, or the newcomer might be preempted at once.
            if rows > 1 and rows * (longest + 1) > self._limits.kv_total:
                break
            if taken and (len(taken) + 1) * columns > _PREFILL_TOKENS:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _step(self) -> None:
        """One token for every row."""
        while len(self._batch) > 1 and len(self._batch) * (self._cache.width + 1) > self._limits.kv_total:
            self._preempt()
        n = len(self._batch)
        inputs = torch.from_numpy(np.stack((self._batch.last[:n], self._batch.n_tokens[:n] - 1))).to(self._device)
        self._cache.open_column()
        logits = self._model.forward(inputs[0, :, None], inputs[1, :, None], self._cache.mask(), self._cache.view)
        self._cache.close_column()
        self._accept(0, logits)

    def _accept(self, first: int, logits: torch.Tensor) -> None:
        """Draw a token for rows ``first`` and later; say goodbye to those that end with it."""
        batch = self._batch
        draw, uniform = batch.draw(first)
        ids, logprobs = sample(logits, draw, uniform)
        ids_B, logprobs_B = ids.cpu().numpy(), logprobs.cpu().numpy()
        stopped, full, bad = batch.record(first, ids_B, logprobs_B)
        for at in range(first, len(batch)):
            row = batch.rows[at]
            if row.request.sampling.stop:
                row.tail.append(int(ids_B[at - first]))
                stopped[at - first] |= self._stop_string(row)
        gone = np.flatnonzero(stopped | full | bad)
        if not gone.size:
            return
        for i in gone.tolist():
            if bad[i]:
                self._cache.wipe(first + i)
                self._say(
                    first + i, finish=None, error=f"logprob {logprobs_B[i]} at token {int(batch.n_response[first + i])}"
                )
            else:
                self._say(first + i, finish="stop" if stopped[i] else "length")
        self._remove([first + i for i in gone.tolist()])

    def _stop_string(self, row: Row) -> bool:
        """Whether the newest token completes one of the row's stop strings."""
        longest = max(len(text.encode()) for text in row.request.sampling.stop)
        text = self._model.decode(row.tail[-longest - 4 :])
        return any(stop in text for stop in row.request.sampling.stop)

    def _say(self, at: int, *, finish: FinishReason | None, error: str | None = None) -> None:
        """A delta with what is new in a row, unless there is nothing to say."""
        tokens = self._batch.flush(at, self._version)
        name = self._batch.rows[at].request.trajectory_id
        if finish is not None or error is not None:
            self._ids.discard(name)
        elif not tokens.n_tokens:
            return
        self._deltas.append(Delta(trajectory_id=name, tokens=tokens, finish=finish, error=error))

    def _preempt(self) -> None:
        """The youngest row gives up its place in the cache and waits at the front; its tokens stay."""
        at = max(range(len(self._batch)), key=lambda i: self._batch.rows[i].born)
        self._say(at, finish=None)
        self._waiting.appendleft(self._batch.rows[at])
        self._remove([at])
        self._preempted += 1

    def _remove(self, gone: Sequence[int]) -> None:
        """Take flushed rows out of batch and cache."""
        sources, targets = self._batch.remove(gone)
        if sources:
            self._cache.move(sources, targets)
        self._cache.shrink(len(self._batch), self._batch.longest())
