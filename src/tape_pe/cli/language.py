"""Commands for language models, pretrained ones included: `tape generate`, `perplexity`, `passkey`, `lm-eval`."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from tape_pe.cli.parts import DTYPES, Command, UsageError, comma_separated, plain_warnings, quiet_loading, refusing

# --- models --------------------------------------------------------------------------------------------------------


def _model_arguments(parser: ArgumentParser, what: str = "A model folder, adapter folder or hub name.") -> None:
    parser.add_argument("model", type=str, help=what)
    parser.add_argument("--dtype", type=str, default="float32", help=f"Precision: {', '.join(DTYPES)}.")
    parser.add_argument("--device", type=str, help="Where to run, such as cpu or cuda; default: the GPU if any.")
    parser.add_argument("--attn_implementation", type=str, help="As in transformers, such as sdpa or eager.")


def _load(namespace: Namespace) -> tuple[Any, Any]:
    """The model, in evaluation mode on its device, and its tokenizer."""
    import torch

    from tape_pe.evaluate import check_device
    from tape_pe.language.pretrained import load_causal_lm

    if namespace.dtype not in DTYPES:
        raise UsageError(f"dtype={namespace.dtype!r}: it must be one of {', '.join(DTYPES)}")
    device = refusing(check_device, namespace.device)
    quiet_loading()
    dtype = getattr(torch, namespace.dtype)
    how = {"dtype": dtype, "attn_implementation": namespace.attn_implementation}
    model, tokenizer = refusing(load_causal_lm, namespace.model, **how)
    return model.to(device).eval(), tokenizer


def _output(namespace: Namespace, task: str) -> Path:
    from tape_pe.language.pretrained import short_name

    name = re.sub(r"[^\w.-]+", "--", short_name(namespace.model))
    return Path(namespace.output or Path("runs") / task / f"{name}.jsonl")


# --- generate ------------------------------------------------------------------------------------------------------


def _generate_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    from tape_pe.language.generate import SamplingOptions

    _model_arguments(parser, "A run folder, model folder, adapter folder or hub name.")
    parser.add_argument("prompt", type=str, help="The text to go on from; for a run, a question such as '123+45='.")
    parser.add_argument("--chat", action="store_true", help="Put the prompt into the tokenizer's chat template.")
    parser.add_class_arguments(SamplingOptions)


def _generate(namespace: Namespace) -> int:
    from tape_pe.language.generate import SamplingOptions, generate_text
    from tape_pe.options import CONFIG_FILE

    values = {name: namespace[name] for name in asdict(SamplingOptions())}
    options = refusing(SamplingOptions, **values)
    if (Path(namespace.model) / CONFIG_FILE).is_file():
        changed = [name for name, default in asdict(SamplingOptions()).items() if values[name] != default]
        unused = {"dtype": "float32", "attn_implementation": None, "chat": False}
        changed += [name for name, default in unused.items() if namespace[name] != default]
        return _answer(namespace, changed)
    model, tokenizer = _load(namespace)
    refusing(generate_text, model, tokenizer, namespace.prompt, options, chat=namespace.chat, stream=True)
    return 0


def _answer(namespace: Namespace, changed: list[str]) -> int:
    """A run of this library answers questions of its task, in the task's own way."""
    from tape_pe.evaluate import load_run

    if changed:
        raise UsageError(f"{changed[0]}={namespace[changed[0]]!r}: {namespace.model} is a run, whose task decodes")
    quiet_loading()
    options, model, tokenizer, _ = refusing(load_run, Path(namespace.model), namespace.device)
    print(refusing(options.task.answer, model, tokenizer, namespace.prompt))
    return 0


# --- perplexity ----------------------------------------------------------------------------------------------------


def _perplexity_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    _model_arguments(parser)
    parser.add_argument("--data", type=str, required=True, help="A file or folder of texts, or the name of a data set.")
    parser.add_argument("--split", type=str, default="test", help="Split of a data set.")
    parser.add_argument("--text_field", type=str, default="text", help="Field of a data set that holds the text.")
    parser.add_argument("--lengths", type=comma_separated(int), required=True, help="Window lengths: 1024,2048.")
    parser.add_argument("--stride", type=int, default=256, help="Tokens scored in each window but the first.")
    parser.add_argument("--max_tokens", type=int, help="Read no more than so many tokens; default: all.")
    parser.add_argument("--batch_size", type=int, default=1, help="Windows read together.")
    parser.add_argument("--output", type=str, help="File of result lines; default: runs/perplexity/NAME.jsonl.")


def _perplexity(namespace: Namespace) -> int:
    from tape_pe.language.measure import check_counts, measure_perplexity, token_stream
    from tape_pe.language.perplexity import windows
    from tape_pe.language.pretrained import short_name
    from tape_pe.language.text import read_texts
    from tape_pe.report.measurements import perplexity_table

    refusing(check_counts, lengths=namespace.lengths, batch_size=namespace.batch_size)
    for length in namespace.lengths:
        refusing(windows, length if namespace.max_tokens is None else namespace.max_tokens, length, namespace.stride)
    where = {"split": namespace.split, "text_field": namespace.text_field}
    texts = refusing(read_texts, namespace.data, **where)
    model, tokenizer = _load(namespace)
    ids = refusing(token_stream, tokenizer, texts, namespace.max_tokens)
    with plain_warnings():
        measured = refusing(
            measure_perplexity,
            model,
            ids,
            name=short_name(namespace.model),
            lengths=namespace.lengths,
            stride=namespace.stride,
            output=(output := _output(namespace, "perplexity")),
            batch_size=namespace.batch_size,
            settings={"data": namespace.data, **where},
            progress=True,
        )
    print(f"{perplexity_table(measured)}\n\n{output}")
    return 0


# --- passkey -------------------------------------------------------------------------------------------------------


def _passkey_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    from tape_pe.tasks.passkey import PasskeyTexts

    _model_arguments(parser)
    parser.add_argument("--lengths", type=comma_separated(int), required=True, help="Tokens of prompts: 1024,2048.")
    parser.add_argument(
        "--depths", type=comma_separated(float), help="Where the key is: 0,0.5,1; default: drawn for every prompt."
    )
    parser.add_argument("--seeds", type=int, default=20, help="Prompts for each length and depth.")
    parser.add_argument("--batch_size", type=int, default=1, help="Prompts answered together.")
    parser.add_argument("--output", type=str, help="File of result lines; default: runs/passkey/NAME.jsonl.")
    parser.add_class_arguments(PasskeyTexts, "texts")


def _passkey(namespace: Namespace) -> int:
    from tape_pe.language.measure import check_passkey, measure_passkey
    from tape_pe.language.pretrained import short_name
    from tape_pe.report.measurements import passkey_table, write_passkey_page
    from tape_pe.tasks.passkey import PasskeyTexts

    texts = refusing(PasskeyTexts, **namespace.texts.as_dict())
    how = {name: namespace[name] for name in ("lengths", "depths", "seeds", "batch_size")}
    refusing(check_passkey, **how)
    model, tokenizer = _load(namespace)
    output = _output(namespace, "passkey")
    with plain_warnings():
        measured = refusing(
            measure_passkey,
            model,
            tokenizer,
            name=short_name(namespace.model),
            output=output,
            texts=texts,
            progress=True,
            **how,
        )
    page = write_passkey_page(output.with_suffix(".html"), measured)
    print(f"{passkey_table(measured)}\n\n{output}\n{page}")
    return 0


# --- lm-eval -------------------------------------------------------------------------------------------------------


def run_lm_eval(words: list[str]) -> int:
    """Hands the words over to lm-evaluation-harness, which then knows the model `tape`."""
    try:
        from tape_pe.language.harness import main
    except ImportError as error:
        raise UsageError(f"lm-eval cannot be used ({error}): pip install 'tape-pe[eval]'") from error
    main(words)
    return 0


def _lm_eval_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    pass  # the harness reads them


COMMANDS = {
    "generate": Command("Go on from a prompt: tape generate MODEL 'prompt' [options].", _generate_arguments, _generate),
    "perplexity": Command(
        "Perplexity of texts: tape perplexity MODEL --data DATA --lengths 1024,2048.",
        _perplexity_arguments,
        _perplexity,
    ),
    "passkey": Command(
        "Passkey retrieval: tape passkey MODEL --lengths 1024,2048 --depths 0,0.5,1.", _passkey_arguments, _passkey
    ),
    "lm-eval": Command(
        "lm-evaluation-harness: tape lm-eval --model_args pretrained=MODEL --tasks TASKS.",
        _lm_eval_arguments,
        lambda namespace: run_lm_eval([]),
    ),
}
