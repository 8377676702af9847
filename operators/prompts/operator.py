"""The prompts operator: admits groups of a dataset at the pace of training, and never one too many.

Its whole state is folded from the log, so a restart goes on with the next row: the order of an epoch is a function of
the run's seed, and the number of training groups on the topic says how far it came. Guarantees:

* Each (dataset, epoch, row) is admitted once, whatever crashes: one transaction a batch, and after a commit whose
  outcome is unknown the topic is read again before anything else is sent.
* Admission keeps the bounds of ``pacing.allowance``.
* Rollouts have taken the whole evaluation round 0 before the first training group is admitted, so that it is answered
  by the weights that the run began with; the last round comes after the last step, for its version.

A group goes to the partition with the fewest prompts that no rollout has taken yet, so a slow rollout is not fed more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from laminar.operators.operator import Context
from laminar.operators.prompts.config import PromptsConfig, SamplingConfig
from laminar.operators.prompts.dataset import Dataset, Row
from laminar.operators.prompts.ledger import GroupLedger
from laminar.operators.prompts.pacing import allowance
from laminar.operators.prompts.tokenizing import PromptTokenizer
from laminar.schemas import records as r
from laminar.schemas.errors import ConfigError, Retryable, TopicMismatch
from laminar.schemas.tokens import ids_buffer
from laminar.streams.dead_letter import RETRY_OF
from laminar.streams.log import OutRecord, Reader, TopicPartition
from laminar.streams.reading import decoded
from laminar.streams.topics import outgoing

__all__ = ["Prompts", "build"]

_PROMPTS = "prompts"
_ORDER = ("weights.versions", _PROMPTS, "training.steps", "dead.letters")
_LAG_PERIOD_S = 0.5
_POLL = 1024

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Backlog:
    """Prompts per partition that no rollout has taken yet."""

    counts: list[int]
    next_look: float = 0.0


class Prompts:
    """See the module's docstring."""

    def __init__(self, config: PromptsConfig, context: Context, encode: PromptTokenizer) -> None:
        self._config = config
        self._context = context
        self._encode = encode
        run = context.run
        self._max_outstanding = config.max_outstanding_groups or 3 * run.groups_per_step
        if self._max_outstanding < run.groups_per_step:
            raise ConfigError(
                f"operators.{context.name}.max_outstanding_groups: {self._max_outstanding} is less than"
                f" groups_per_step={run.groups_per_step}, so no step could ever be made (valid: at least that)"
            )
        self._train = Dataset.read(config.train)
        self._eval = Dataset.read(config.eval) if config.eval is not None else None
        self._check_lengths()
        self._producer = context.log.producer(context.transactional_id)
        self._reader: Reader | None = None
        self._orders: dict[int, list[int]] = {}
        self._backlog = _Backlog([])
        self._next_poll = 0.0
        logger.info(
            "%d training rows (%s), %d held-out rows; at most %d groups (%d trajectories) in flight, max_staleness %s",
            len(self._train.rows),
            self._train.fingerprint,
            len(self._eval.rows) if self._eval else 0,
            self._max_outstanding,
            self._max_outstanding * run.group_size,
            run.max_staleness,
        )
        self._restart()

    def _check_lengths(self) -> None:
        known = [
            (limit, whose)
            for limit, whose in (
                (self._encode.max_model_len, "the model takes"),
                (self._context.run.max_model_len, "engine.max_model_len is"),
            )
            if limit is not None
        ]
        if not known or self._config.too_long != "refuse":
            return
        limit, whose = min(known)
        for data in (self._train, self._eval):
            for row in data.rows if data else ():
                n = len(self._encode(row).ids)
                if n >= limit:
                    raise ConfigError(
                        f"{row.where}: the prompt has {n} tokens, {whose} {limit} with at least one for the"
                        f" response (operators.{self._context.name}.too_long: dead_letter admits such rows)"
                    )

    # -- folding

    def _restart(self) -> None:
        """Forget everything and read it from the log again."""
        self._ledger = GroupLedger(self._context.run.run_id)
        self._sent: set[str] = set()
        self._phase = 0
        if self._reader is not None:
            self._reader.close()
        self._reader = self._context.log.reader()
        self._enter_phase()

    def _enter_phase(self) -> None:
        assert self._reader is not None
        topics = self._context.log.topics()
        name = _ORDER[self._phase]
        partitions = [TopicPartition(name, i) for i in range(topics[name].partitions)]
        bounds = {p: self._reader.bounds(p) for p in partitions}
        positions = dict(self._reader.position())
        positions.update({p: b.start for p, b in bounds.items()})
        self._targets = {p: b.end for p, b in bounds.items()}
        if name == _PROMPTS:
            self._backlog = _Backlog([0] * len(partitions))
        self._reader.assign(positions)

    def _fold(self) -> bool:
        assert self._reader is not None
        polled = self._reader.poll(_POLL, 0.0)
        for record, event in decoded(polled, self._context.codec):
            if isinstance(event, r.Prompt):
                if event.prompt_id in self._sent:
                    self._sent.discard(event.prompt_id)
                    continue  # applied when it was written: what became of it may be read before it is
                if any(name == RETRY_OF for name, _ in record.headers):
                    continue  # admitted once, where the original stands
            self._ledger.apply(event)
        if self._phase < len(_ORDER):
            position = self._reader.position()
            if all(position[p] >= end for p, end in self._targets.items()):
                self._phase += 1
                if self._phase < len(_ORDER):
                    self._enter_phase()
                else:
                    self._check_log()
            return True
        return bool(polled)

    def _check_log(self) -> None:
        other = self._ledger.train_fingerprints - {self._train.fingerprint}
        if other:
            raise TopicMismatch(
                f"topic prompts holds groups of dataset {', '.join(sorted(other))}, but {self._train.path} is"
                f" {self._train.fingerprint}: the data changed, or the log belongs to another run (use another run_dir)"
            )
        logger.info("the log holds %d training groups, %d optimizer steps", self._ledger.admitted, self._ledger.steps)

    # -- admitting

    def step(self, now: float) -> bool:
        """See Operator.step."""
        if self._phase == len(_ORDER) and now < self._next_poll:
            return False
        self._next_poll = now + self._config.poll_period_s
        worked = self._fold()
        if self._phase < len(_ORDER) or self._sent:
            return worked
        try:
            return self._admit(now) or worked
        except Retryable as error:
            logger.warning("outcome of an admission unknown, reading the log again: %s", error)
            # A new producer of the id settles the outcome; only then does the log say what it was.
            self._producer.close()
            self._producer = self._context.log.producer(self._context.transactional_id)
            self._restart()
            return True

    def _admit(self, now: float) -> bool:
        wanted = self._wanted(now)
        if not wanted:
            return self._announce_end(now)
        self._look_at_backlog(now)
        out: list[OutRecord] = []
        for prompt in wanted:
            partition = min(range(len(self._backlog.counts)), key=lambda i: (self._backlog.counts[i], i))
            self._backlog.counts[partition] += 1
            out.append(outgoing(self._context.codec, prompt, partition=partition))
        with self._producer.transaction() as tx:
            for record in out:
                tx.send(record)
        self._sent.update(p.prompt_id for p in wanted)
        for prompt in wanted:
            self._ledger.apply(prompt)
        self._next_poll = now
        return True

    def _wanted(self, now: float) -> list[r.Prompt]:
        run, ledger = self._context.run, self._ledger
        if self._eval is not None:
            if ledger.admitted == 0 and 0 not in ledger.evaluated:
                first = self._missing_of_round(0)
                if first:
                    return self._eval_prompts(0, first[: self._config.batch], 0, now)
                self._look_at_backlog(now)
                if sum(self._backlog.counts):
                    return []
            if self._training_is_over():
                last = self._missing_of_round(run.final_round)[: self._config.batch]
                return self._eval_prompts(run.final_round, last, ledger.version, now)
        if ledger.steps >= run.steps or (run.max_staleness is not None and ledger.version < 0):
            return []
        room = allowance(
            ledger.load,
            max_outstanding=self._max_outstanding,
            groups_per_step=run.groups_per_step,
            total_steps=run.steps,
            max_staleness=run.max_staleness,
        )
        end = ledger.admitted + min(room, self._config.batch)
        if (total := self._total_groups()) is not None:
            end = min(end, total)
        min_version = ledger.version if run.max_staleness is not None else 0
        return [self._train_prompt(n, min_version, now) for n in range(ledger.admitted, end)]

    def _total_groups(self) -> int | None:
        return None if self._config.epochs is None else self._config.epochs * len(self._train.rows)

    def _training_is_over(self) -> bool:
        """No optimizer step will follow, and the last one's version is there to be sampled from."""
        ledger = self._ledger
        ended = ledger.steps >= self._context.run.steps or (
            ledger.exhausted_at is not None
            and ledger.exhausted_at == self._total_groups() == ledger.admitted
            and ledger.load.outstanding == 0
        )
        return ended and ledger.step_of(ledger.version) >= ledger.steps

    def _missing_of_round(self, number: int) -> list[int]:
        if self._eval is None or number in self._ledger.evaluated:
            return []
        there = self._ledger.eval_rounds.get(number, set())
        return [i for i in range(len(self._eval.rows)) if i not in there]

    def _announce_end(self, now: float) -> bool:
        total = self._total_groups()
        if total is None or self._ledger.admitted < total or self._ledger.exhausted_at == total:
            return False
        end = r.DataExhausted(run_id=self._context.run.run_id, groups=total, at_ms=int(now * 1000))
        with self._producer.transaction() as tx:
            tx.send(outgoing(self._context.codec, end))
        self._ledger.apply(end)
        logger.info("data exhausted: all %d groups of %s epochs are admitted", total, self._config.epochs)
        return True

    def _look_at_backlog(self, now: float) -> None:
        if now < self._backlog.next_look:
            return
        self._backlog.next_look = now + _LAG_PERIOD_S
        lag = self._context.log.lag(f"{self._context.run.run_id}.{self._config.rollout}", _PROMPTS)
        self._backlog.counts = [lag.get(TopicPartition(_PROMPTS, i), 0) for i in range(len(self._backlog.counts))]

    # -- prompts

    def _train_prompt(self, number: int, min_version: int, now: float) -> r.Prompt:
        epoch, position = divmod(number, len(self._train.rows))
        if epoch not in self._orders:
            # First what the log has of this epoch: a resumed run may have another seed, but repeats no row.
            there = dict.fromkeys(self._ledger.rows.get(epoch, ()))
            order = self._train.order(epoch, seed=self._context.run.seed, shuffle=self._config.shuffle)
            self._orders = {epoch: [*there, *(i for i in order if i not in there)]}
        index = self._orders[epoch][position]
        return self._prompt(
            self._train, epoch, index, self._config.sampling, min_version=min_version, now=now, purpose="train"
        )

    def _eval_prompts(self, number: int, indices: list[int], min_version: int, now: float) -> list[r.Prompt]:
        assert self._eval is not None
        sampling = self._config.eval_sampling or self._config.sampling
        return [
            self._prompt(self._eval, number, i, sampling, min_version=min_version, now=now, purpose="eval")
            for i in indices
        ]

    def _prompt(
        self,
        data: Dataset,
        epoch: int,
        index: int,
        sampling: SamplingConfig,
        *,
        min_version: int,
        now: float,
        purpose: r.Purpose,
    ) -> r.Prompt:
        row: Row = data.rows[index]
        encoded = self._encode(row)
        fingerprint = data.fingerprint if purpose == "train" else f"eval-{data.fingerprint}"
        prompt_id = f"{fingerprint}/{epoch}/{index}"
        return r.Prompt(
            prompt_id=prompt_id,
            dataset=fingerprint,
            epoch=epoch,
            index=index,
            purpose=purpose,
            task=row.task,
            group_size=self._context.run.group_size if purpose == "train" else 1,
            prompt_tokens=ids_buffer(encoded.ids),
            n_prompt_tokens=len(encoded.ids),
            prompt_text=encoded.text,
            messages=encoded.messages,
            template=encoded.template,
            reference=row.reference,
            sampling=r.Sampling(**sampling.model_dump()),
            seed=(self._context.run.seed * 1_000_003 + epoch * 10_007 + index) & 0x7FFFFFFF,
            min_version=min_version,
            round_size=len(data.rows) if purpose == "eval" else 0,
            created_ms=int(now * 1000),
        )

    # -- stopping

    def drain(self, now: float) -> bool:
        """Nothing is in hand between steps."""
        del now
        return True

    def close(self) -> None:
        """See Operator.close."""
        if self._reader is not None:
            self._reader.close()
        self._producer.close()


def build(config: PromptsConfig, context: Context) -> Prompts:
    """The operator of a run file's ``kind: prompts``."""
    return Prompts(config, context, PromptTokenizer.load(context.run.model))
