"""vLLM's errors: which there are, and each as one line in the words of a run file.

>>> reason(RuntimeError("Worker failed with error 'disk gone', please check the stack trace above for the root cause"))
'disk gone'
"""

from __future__ import annotations

import difflib
import re
from functools import cache

__all__ = ["faults", "reason"]

_FAULTS: tuple[type[Exception], ...] = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip

_LONGEST = 600

_WORDS = {
    r"^Worker failed with error '(?P<why>.*)', please check the stack trace.*$": "{why}",
    r"^WorkerProc initialization failed.*$": "a worker process could not start (its log, above, says why)",
    r"^No available memory for the cache blocks\..*$": (
        "no available memory for the cache blocks (valid: a larger args.gpu_memory_utilization, an"
        " args.kv_cache_memory_bytes, a smaller model)"
    ),
    r"^To serve .* max seq len \((?P<longest>\d+)\), \(?(?P<needed>[\d.]+) GiB KV cache is needed, .* memory"
    r" \((?P<there>[\d.]+) GiB\)\. Based .* is (?P<fits>\d+)\..*$": (
        "one sequence of max_model_len={longest} needs {needed} GiB, larger than the available KV cache memory of"
        " {there} GiB (valid: engine.max_model_len up to {fits}, or a larger args.kv_cache_memory_bytes or"
        " args.gpu_memory_utilization)"
    ),
    r"^To serve .* max seq len \((?P<longest>\d+)\), \(?(?P<needed>[\d.]+) GiB KV cache is needed, .* memory"
    r" \((?P<there>[\d.]+) GiB\)\..*$": (
        "one sequence of max_model_len={longest} needs {needed} GiB, larger than the available KV cache memory of"
        " {there} GiB (valid: a larger args.kv_cache_memory_bytes or args.gpu_memory_utilization)"
    ),
    r"^Free memory on device (?P<device>\S+) \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup .*"
    r" \((?P<share>[\d.]+), (?P<asked>[\d.]+) GiB\)\..*$": (
        "{device} has {free} of {total} GiB free, which is less than desired GPU memory utilization:"
        " args.gpu_memory_utilization={share} is {asked} GiB"
    ),
    r"^Available memory on node (?P<node>\S+) \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on kv cache allocation is less"
    r" than requested memory for kv \((?P<asked>[\d.]+)[ /].*$": (
        "memory node {node} has {free} of {total} GiB free, which is less than requested memory for kv: {asked} GiB"
        " (valid: a smaller engine.kv_total or args.kv_cache_memory_bytes)"
    ),
    r"^(?P<what>CUDA out of memory\. Tried to allocate .*? is free)\..*$": "{what}",
}
"""A message of vLLM or torch -> what is said instead: no names of its command line, no addresses of its manual."""

_ARCHITECTURES = re.compile(r"Model architectures \[(?P<wanted>.*?)\] are not supported for now\. .*\[(?P<known>.*)\]")


@cache
def faults() -> tuple[type[Exception], ...]:
    """What vLLM, a library with errors of every kind, raises when something is wrong."""
    from vllm.exceptions import VLLMError

    return (*_FAULTS, VLLMError)


def reason(error: BaseException) -> str:
    """An error as one line."""
    details = getattr(error, "errors", None)
    if callable(details):  # pydantic's: many lines, of which the messages count
        found = [f"{'.'.join(str(part) for part in one['loc']) or 'value'}: {one['msg']}" for one in details()]
        return "; ".join(_told(one) for one in found)
    text = _told(str(error))
    if text and isinstance(error, LookupError | AttributeError | AssertionError | TypeError):  # no words for a reader
        return f"{type(error).__name__}: {text}"
    return text or type(error).__name__


def _told(text: str) -> str:
    text = " ".join(text.split())
    for pattern, words in _WORDS.items():
        match = re.match(pattern, text)
        if match:
            text = words.format_map(match.groupdict())
    match = _ARCHITECTURES.search(text)
    if match:
        text = _closest(match)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _closest(match: re.Match[str]) -> str:
    """The names of all that vLLM serves are ten thousand characters."""
    wanted, known = (re.findall(r"'([^']+)'", match[name]) for name in ("wanted", "known"))
    close = difflib.get_close_matches(wanted[0], known, n=3, cutoff=0.0)
    return (
        f"architecture {', '.join(wanted)} is not supported (closest of the {len(known)} that are: {', '.join(close)})"
    )
