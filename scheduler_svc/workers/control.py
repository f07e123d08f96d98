"""What the core process and a worker process say about the worker itself, beside the messages of a request."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Setup:
    """Core to worker, the first message. `config`: the core's SchedulerConfig as JSON, so that both mean the same.

    `signature`: of all messages, by the core's code. `listen`: what to bind, with ports already drawn. `num_workers`:
    that share limits of the whole service. `auth_tokens`: as the core read them when it started, so that a worker which
    comes later accepts the same as the others.
    """

    signature: str
    worker_id: int
    num_workers: int
    listen: tuple[str, ...]
    config: str
    auth_tokens: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Listening:
    """Worker to core, once: it serves."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Core to worker, about once a second. `alive`: what the engine says of itself. `answer`: with BeatAnswer."""

    alive: bool
    answer: bool


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    pass


@dataclass(frozen=True, slots=True)
class Stop:
    """Core to worker: let calls write what they still have, for at most `grace_s`, then end."""

    grace_s: float


FromPool = Setup | Beat | Stop
ToPool = Listening | BeatAnswer
