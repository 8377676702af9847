"""Which GPUs each process of ``laminar run`` sees.

Operators say how many each of their processes needs (``gpus``), and no GPU is given to two. In a run file where any
operator says so, a process whose operator says nothing sees none, so that nothing lands on a GPU that it was not given;
where none does, every process sees what this one sees.

>>> placed(config, ["0", "1", "2", "3"])                                                    # doctest: +SKIP
{('trainer', 0): ('0',), ('rollout', 0): ('1', '2'), ('reward', 0): ()}
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from laminar.pipeline.config.models import RunConfig
from laminar.schemas.errors import ConfigError

__all__ = ["VARIABLE", "environment_of", "gpus_here", "placed"]

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")
_DEVICE = re.compile(r"nvidia[0-9]+")


def gpus_here(environ: Mapping[str, str] = os.environ, devices: Path = _DEVICES) -> list[str]:
    """The GPUs of this machine, as CUDA names them: in ``CUDA_VISIBLE_DEVICES``, else all that have a device file."""
    given = environ.get(VARIABLE)
    if given is None:
        return [str(i) for i in range(sum(1 for file in devices.glob("nvidia*") if _DEVICE.fullmatch(file.name)))]
    found: list[str] = []
    for name in (word.strip() for word in given.split(",")):
        if not name or name.startswith("-"):
            break  # CUDA reads no further either
        found.append(name)
    return found


def placed(config: RunConfig, here: Sequence[str]) -> dict[tuple[str, int], tuple[str, ...]]:
    """The GPUs of every process, by (operator name, index), given out in the order of the file.

    {} where no operator says how many. Raises ConfigError when there are fewer than are needed.
    """
    if all(operator.gpus is None for operator in config.operators.values()):
        return {}
    wanted = {instance: config.operators[instance[0]].gpus or 0 for instance in config.instances()}
    if sum(wanted.values()) > len(here):
        parts = [f"{name} {o.replicas} x {o.gpus}" for name, o in config.operators.items() if o.gpus and o.replicas]
        raise ConfigError(
            f"operators: {sum(wanted.values())} GPUs are needed here ({', '.join(parts)}) and {len(here)} are there"
            f" (lower gpus or replicas, or name those that are meant in {VARIABLE})"
        )
    left = iter(here)
    return {instance: tuple(next(left) for _ in range(n)) for instance, n in wanted.items()}


def environment_of(gpus: tuple[str, ...] | None) -> dict[str, str]:
    """What a process is told about its GPUs; None: nothing."""
    return {} if gpus is None else {VARIABLE: ",".join(gpus)}
