"""The command `tape finetune`."""

from __future__ import annotations

import sys
from dataclasses import fields

from jsonargparse import ArgumentParser, Namespace

from tape_pe.cli.parts import Command, plain_warnings, quiet_loading, refusing


def _words(text: str | list[str]) -> list[str]:
    """`embed,norm`, or nothing."""
    return text if isinstance(text, list) else [word for word in text.split(",") if word]


def _finetune_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    from tape_pe.convert import TapeConfig
    from tape_pe.finetuning.options import FinetuneOptions

    parser.add_argument("model", type=str, help="A model folder, or the name of a model on the hub.")
    parser.add_argument("--resume", action="store_true", help="Go on from the output folder's last checkpoint.")
    parser.add_argument(
        "--also_train", type=_words, default="embed,norm", help="What else is trained: embed, norm, both or ''."
    )
    parser.add_class_arguments(FinetuneOptions, skip={"model", "also_train", "tape"})
    parser.add_class_arguments(TapeConfig, "tape", skip={"rope"})


def _finetune(namespace: Namespace) -> int:
    from accelerate import PartialState

    from tape_pe.convert import TapeConfig
    from tape_pe.finetuning.finetune import finetune
    from tape_pe.finetuning.options import FinetuneOptions, check_finetune
    from tape_pe.train import TrainingInterruptedError

    values = {f.name: namespace[f.name] for f in fields(FinetuneOptions) if f.name != "tape"}
    defaults = {f.name: f.default for f in fields(TapeConfig)}
    chosen = {name: value for name, value in namespace.tape.as_dict().items() if value != defaults[name]}
    options = refusing(FinetuneOptions, **{**values, "also_train": _words(values["also_train"]), "tape": chosen})
    refusing(check_finetune, options, resume=namespace.resume)
    quiet_loading()
    try:
        with plain_warnings():
            result = refusing(finetune, options, resume=namespace.resume)
    except TrainingInterruptedError as interruption:
        print(f"\nInterrupted: {interruption}\nGo on with the same command and --resume", file=sys.stderr)
        return 130
    if (state := PartialState()).num_processes > 1:
        state.destroy_process_group()  # one that is left to the interpreter's end can abort there
    metrics = result["metrics"]
    if metrics["held_out_loss"] is not None:
        print(f"held-out loss: {metrics['held_out_loss_before']:.4f} before, {metrics['held_out_loss']:.4f} after")
    print(f"train loss: {metrics['train_loss']:.4f} after {result['steps']} steps, {result['tokens']:,} tokens")
    print(f"Fine-tuned in {result['train_seconds']:.1f} s: {options.folder}")
    return 0


COMMANDS = {
    "finetune": Command(
        "Extend a pretrained model: tape finetune MODEL --method tape --length L --data DATA.",
        _finetune_arguments,
        _finetune,
    )
}
