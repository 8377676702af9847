"""Whether an engine's logprobs are the trainer's: questions with known answers, through the engine's own protocol.

A version's manifest carries what the trainer's forward pass gives after some prefixes (``schemas.weight.Probe``). For
each prefix the engine samples one token twice:

* greedy: its logprob, of temperature 1, must be the trainer's for that token, and the token about the likeliest;
* at temperature 0.6 from the likeliest half of the listed tokens: its logprob must be the trainer's numbers,
  renormalised over that half at that temperature. Raw logprobs, or a temperature that is not applied, show here
  whatever temperature the run samples with (cases E3, E4).

A prefix is the beginning of a longer one and the same for each version, so a stale prefix cache shows too. A token that
the trainer does not list is less likely than all that it lists: it differs by at least the distance from the last one.

What engines with the same weights differ by is rounding. Measured on 16 answers of SmolLM2-135M, in nats, mean and
largest: float32 0.000004 and 0.00003 with the torch engine, the largest 0.00005 with vLLM; weights in bfloat16 0.09 and
0.31, with vLLM 0.10 and 0.49, whether the trainer's forward pass is float32 or bfloat16. The bounds leave room above
that; the mean is the sharper one. In float32 it tells one optimizer step at a learning rate of 1e-6 from none.

>>> findings = ask(engine, questions(manifest, limits=engine.limits), deadline, held=others)   # doctest: +SKIP
>>> judge(findings, tolerance_of(manifest)) is None                                              # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from laminar.operators.rollout.engine import Delta, Engine, EngineLimits, EngineRequest
from laminar.schemas.errors import InvalidRequest
from laminar.schemas.records import Probe, Sampling, VersionManifest
from laminar.streams.deadline import Deadline

__all__ = ["RESERVED", "Finding", "Question", "ask", "judge", "questions", "tolerance_of"]

RESERVED = "self-check/"
"""What the ids of probes begin with: no trajectory's does."""

TEMPERATURE = 0.6
"""Of the sampled questions: not 1, so that it matters where it is applied."""

TOLERANCES = {"float32": 3e-4, "bfloat16": 1.5}
"""Nats that one answer may differ by, by the coarsest dtype that took part."""

MEAN = 0.2
"""The mean difference may be so much of the largest that is allowed."""

_DTYPES = {"F32": "float32", "F64": "float32", "BF16": "bfloat16", "F16": "bfloat16"}
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One token to sample, and what the trainer knows of it."""

    request: EngineRequest
    ids: Sequence[int]
    logprobs: Sequence[float]
    """What the engine must say of these, the likeliest first."""
    greedy: bool
    where: str
    """For messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One answer."""

    where: str
    nats: float
    """By how much it differs; inf when there is none."""
    said: str
    """The two numbers, for messages."""


def questions(manifest: VersionManifest, *, limits: EngineLimits) -> list[Question]:
    """Two for each prefix that fits into the engine's limits."""
    longest = min(limits.max_model_len, limits.kv_total) - 1
    made: list[Question] = []
    for index, probe in enumerate(manifest.probes):
        tokens, lengths = probe.tokens_L.tolist(), probe.lengths_P.tolist()
        for row, length in enumerate(lengths):
            if length > longest:
                continue
            prompt = tuple(tokens[:length])
            made += [_question(manifest.version, probe, index, row, prompt, greedy=greedy) for greedy in (True, False)]
    return made


def _question(version: int, probe: Probe, index: int, row: int, prompt: tuple[int, ...], *, greedy: bool) -> Question:
    how = "greedy" if greedy else "sampled"
    name = f"{RESERVED}{version}/{index}/{len(prompt)}/{how}"
    logprobs = probe.logprobs_PK[row].astype(np.float64)
    sampling = Sampling(max_tokens=1, temperature=0.0)
    if not greedy:
        top_k = max(1, probe.top_k // 2)  # the rest has numbers too: a rank may change places with its neighbour
        sampling = Sampling(max_tokens=1, temperature=TEMPERATURE, top_k=top_k)
        logprobs = logprobs / TEMPERATURE
        logprobs = logprobs - np.logaddexp.reduce(logprobs[:top_k])
    return Question(
        request=EngineRequest(
            trajectory_id=name, prompt_ids=prompt, sampling=sampling, seed=(version * 1000 + len(prompt)) % 2**31
        ),
        ids=probe.ids_PK[row].tolist(),
        logprobs=logprobs.tolist(),
        greedy=greedy,
        where=f"probe {index} after {len(prompt)} tokens, {how}",
    )


def ask(engine: Engine, asked: Sequence[Question], deadline: Deadline, *, held: list[Delta]) -> list[Finding]:
    """Put all questions at once and wait for the answers. Deltas of trajectories that come meanwhile go to ``held``.

    Raises what the engine raises. A question that is not answered in time is a finding.
    """
    open_ = {question.request.trajectory_id: question for question in asked}
    findings: list[Finding] = []
    try:
        for question in asked:
            try:
                engine.submit(question.request)
            except InvalidRequest as error:
                del open_[question.request.trajectory_id]
                findings.append(_missing(question, f"the engine refuses it: {error}"))
        while open_ and not deadline.passed:
            for delta in engine.poll(min(_POLL_S, deadline.remaining())):
                question_ = open_.get(delta.trajectory_id)
                if question_ is None:
                    if not delta.trajectory_id.startswith(RESERVED):
                        held.append(delta)
                elif delta.tokens.n_tokens or delta.finish is not None or delta.error is not None:
                    del open_[delta.trajectory_id]
                    findings.append(_finding(question_, delta))
    finally:
        for name in open_:
            engine.abort(name)
    findings += [_missing(question, f"no answer within {deadline.seconds:g} s") for question in open_.values()]
    return findings


def judge(findings: Iterable[Finding], tolerance: float) -> str | None:
    """What is wrong, with both numbers and the bound; None: nothing."""
    found = list(findings)
    worst = max(found, key=lambda finding: finding.nats)
    if not worst.nats <= tolerance:
        return f"{worst.where}: {worst.said} (bound {tolerance:g})"
    mean = sum(finding.nats for finding in found) / len(found)
    if not mean <= MEAN * tolerance:
        return (
            f"{len(found)} logprobs differ from the trainer's by {mean:.3g} nats in the mean (bound"
            f" {MEAN * tolerance:g}); the most is {worst.where}: {worst.said}"
        )
    return None


def tolerance_of(manifest: VersionManifest) -> float:
    """Nats, by the coarsest dtype among the weights that are sampled from and the trainer's forward passes."""
    dtypes = {_DTYPES.get(entry.dtype, "float32") for entry in manifest.tensors}
    dtypes |= {probe.dtype for probe in manifest.probes}
    return TOLERANCES["float32" if dtypes <= {"float32"} else "bfloat16"]


def _finding(question: Question, delta: Delta) -> Finding:
    if delta.error is not None or not delta.tokens.n_tokens:
        return _missing(question, delta.error or f"no token, finish {delta.finish}")
    token, logprob = int(delta.tokens.ids_T[0]), float(delta.tokens.logprobs_T[0])
    last = question.logprobs[-1]
    if token in question.ids:
        expected = question.logprobs[question.ids.index(token)]
        nats = abs(logprob - expected)
        said = f"the engine gives token {token} {logprob:.6g}, the trainer {expected:.6g}"
        if question.greedy:
            # Both may be off by the bound, so the likeliest two may change places.
            short = (question.logprobs[0] - expected) / 2
            if short > nats:
                nats, likeliest = short, question.ids[0]
                said = (
                    f"the engine takes token {token} for the likeliest, to which the trainer gives {expected:.6g};"
                    f" that is token {likeliest} with {question.logprobs[0]:.6g}"
                )
    else:
        nats = max(0.0, logprob - last, (question.logprobs[0] - last) / 2 if question.greedy else 0.0)
        said = f"the engine gives token {token} {logprob:.6g}, the trainer less than {last:.6g}"
    return Finding(where=question.where, nats=nats if math.isfinite(logprob) else math.inf, said=said)


def _missing(question: Question, why: str) -> Finding:
    return Finding(where=question.where, nats=math.inf, said=why)
