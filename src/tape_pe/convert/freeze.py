"""Which weights of a model train: TAPE's alone or with a few of the base's, and a table of what is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from tape_pe.convert.classes import check_converted
from tape_pe.convert.layers import PositionUpdate

# Names that `also_train` knows, in the order of the table.
BASE_GROUPS = ("embed", "norm")
GROUPS = ("tape", "lora", *BASE_GROUPS, "other")


@dataclass(frozen=True)
class TrainableGroup:
    """A group of trainable parameters.

    Attributes:
        name: `"tape"` (weights of `PositionUpdate` modules), `"lora"` (PEFT's), `"embed"` (input embeddings and output
            head, tied weights once), `"norm"` (of modules whose class name contains "Norm") or `"other"`.
        tensors: how many tensors.
        parameters: how many numbers.
        share: `parameters` divided by those of the whole model.
    """

    name: str
    tensors: int
    parameters: int
    share: float


@dataclass(frozen=True)
class TrainableParameters:
    """What is trained of a model; `str()` is a table for a terminal.

    Attributes:
        groups: those that have trainable parameters, in the order of `GROUPS`.
        total: parameters of the whole model, frozen ones included.
    """

    groups: tuple[TrainableGroup, ...]
    total: int

    @property
    def trained(self) -> int:
        """Trainable parameters of all groups."""
        return sum(group.parameters for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"groups": [asdict(group) for group in self.groups], "total": self.total}

    def __str__(self) -> str:
        from tape_pe.report.parts import Cell, Table
        from tape_pe.report.tables import plain_text

        tensors = sum(group.tensors for group in self.groups)
        trained = TrainableGroup("trained", tensors, self.trained, self.trained / max(self.total, 1))
        rows = [
            [Cell(row.name), Cell(f"{row.tensors:,}"), Cell(f"{row.parameters:,}"), Cell(f"{row.share:.2%}")]
            for row in (*self.groups, trained)
        ]
        rows.append([Cell("whole model"), Cell(""), Cell(f"{self.total:,}"), Cell("")])
        headers = ["Group", "Tensors", "Parameters", "Share"]
        return plain_text(Table("Trainable parameters", headers, rows, [False, True, True, True]))


def freeze_base(model: nn.Module, also_train: Collection[str] = ()) -> TrainableParameters:
    """Freezes everything but TAPE's weights and the groups that are named.

    Args:
        model: a converted model.
        also_train: groups of the base that train as well:
            `"embed"`, the input embeddings, and the output head unless its weight is theirs (tied);
            `"norm"`, the parameters of every norm module (one whose class name contains "Norm").

    Returns:
        What is trainable now.

    Raises:
        ValueError: `model` is not converted, or a group is unknown; nothing was frozen then.
    """
    if isinstance(also_train, str):
        raise ValueError(f"also_train={also_train!r}: a collection of names is needed, such as ({also_train!r},)")
    for name in also_train:
        if name not in BASE_GROUPS:
            raise ValueError(f"also_train has {name!r}: known groups are {', '.join(BASE_GROUPS)}")
    check_converted(model)
    trained = {"tape", *also_train}
    for group, parameter in grouped_parameters(model):
        parameter.requires_grad_(group in trained)
    return trainable_parameters(model)


def trainable_parameters(model: nn.Module) -> TrainableParameters:
    """Counts what is trained of any model, converted or not, with PEFT's adapters or without.

    Args:
        model: any module; parameters on the meta device count too.

    Returns:
        The groups with their counts; `print` shows a table.
    """
    counts = {name: [0, 0] for name in GROUPS}
    total = 0
    for group, parameter in grouped_parameters(model):
        total += parameter.numel()
        if parameter.requires_grad:
            counts[group][0] += 1
            counts[group][1] += parameter.numel()
    return TrainableParameters(
        tuple(TrainableGroup(name, n, size, size / total) for name, (n, size) in counts.items() if n), total
    )


def grouped_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, with the name of its group, see `TrainableGroup`."""
    tables = _embeddings(model)[:1] if has_tied_embeddings(model) else _embeddings(model)
    embeddings = {id(p) for module in tables for p in module.parameters()}
    tape = {id(p) for module in model.modules() if isinstance(module, PositionUpdate) for p in module.parameters()}
    norms = {id(p) for module in model.modules() if "Norm" in type(module).__name__ for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in tape:
            yield "tape", parameter
        elif "lora_" in name:
            yield "lora", parameter
        elif id(parameter) in embeddings:
            yield "embed", parameter
        else:
            yield "norm" if id(parameter) in norms else "other", parameter


def has_tied_embeddings(model: nn.Module) -> bool:
    """Whether the output head's weight is that of the input embeddings."""
    weights = [getattr(module, "weight", None) for module in _embeddings(model)]
    return len(weights) == 2 and weights[0] is weights[1]


def _embeddings(model: Any) -> list[nn.Module]:
    """Input embeddings and output head, as far as a model has them."""
    found: list[nn.Module] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, getter)()
        except (AttributeError, NotImplementedError):  # a model without any
            continue
        if isinstance(module, nn.Module):
            found.append(module)
    return found
