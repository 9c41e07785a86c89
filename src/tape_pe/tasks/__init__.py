"""Tasks: samples, tokenizers and scorers. A new task is one file and one line of `TASKS`."""

from tape_pe.tasks.addition import Addition
from tape_pe.tasks.base import Task
from tape_pe.tasks.copying import Copy, Reverse
from tape_pe.tasks.flip_flop import FlipFlop
from tape_pe.tasks.language_modelling import LanguageModelling
from tape_pe.tasks.modular_arithmetic import ModularArithmetic
from tape_pe.tasks.passkey_training import Passkey
from tape_pe.tasks.recall import AssociativeRecall
from tape_pe.tasks.scrolls import Scrolls
from tape_pe.tasks.state_tracking import StateTracking

TASKS: dict[str, type[Task]] = {
    "addition": Addition,
    "state_tracking": StateTracking,
    "flip_flop": FlipFlop,
    "associative_recall": AssociativeRecall,
    "copy": Copy,
    "reverse": Reverse,
    "modular_arithmetic": ModularArithmetic,
    "passkey": Passkey,
    "language_modelling": LanguageModelling,
    "scrolls": Scrolls,
}
"""Tasks by name. The fields of a task's dataclass are its options."""


def make_task(name: str, **options: object) -> Task:
    """Builds a task from its registered name and its options.

    Raises:
        ValueError: unknown name, unknown option, or an option's value that the task refuses.
    """
    if name not in TASKS:
        raise ValueError(f"task.name is {name!r}; it must be one of {sorted(TASKS)}")
    return TASKS[name].from_options(options)


__all__ = ["TASKS", "Addition", "Task", "make_task"]
