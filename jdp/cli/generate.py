"""`jdp generate`: text from a run's model, or from an export."""

import json as as_json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jdp.base.formatting import escaped
from jdp.base.machine import choose_platform
from jdp.base.toml import brief
from jdp.cli.options import UsageError, parse, stdout_to_stderr

if TYPE_CHECKING:
    from jdp.cli.text_model import TextModel
    from jdp.data.text.tokenizers import Tokenizer

STDIN = "-"
LENGTH = 200


@dataclass(frozen=True)
class Options:
    """Continues prompts with a run's model, or with an export, and prints the text while it is drawn.

    A text ends after --length tokens, or at a token that closes a document or an answer. Keys and values are cached, so
    prompt and text must fit into the model's context. The model runs on one device and continues several prompts one
    after another. stdout has the texts with their prompts, stderr everything else. Control characters in the text are
    escaped (\\x1b) on a terminal, and unchanged in a pipe.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a run, or its name in --run-dir; or an export, or a Hugging Face model: a folder with config.json,
    model.safetensors and tokenizer.json."""
    prompt: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """Text to continue; "-" reads it from stdin. May be given several times. Default: a line break."""
    length: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Most tokens to add. Default: 200, or as many as fit into the context."""
    temperature: Annotated[float, tyro.conf.arg(metavar="T")] = 1.0
    """Divisor of the logits; 0 = always the most likely token."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K")] = None
    """Draw among the K most likely tokens. Default: among all."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = None
    """Draw among the most likely of these tokens with a total probability of P. Default: among all."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Seed of the draws: the same seed gives the same text for a prompt."""
    step: Annotated[str | None, tyro.conf.arg(metavar="N|best")] = None
    """Checkpoint of the run: a step, or "best" (train.keep_best). Default: the newest."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Tokenizer, in place of the run's or the export's: "bytes", or a folder with tokenizer.json. A run on rows of ids
    needs it."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder of the runs."""
    plugin: Annotated[str | None, tyro.conf.arg(metavar="PACKAGE")] = None
    """Plug-in of the run, if it has one."""
    json: bool = False
    """Print one JSON object at the end: {"model": …, "texts": [{"prompt": …, "text": …, "tokens": …, "ended": …}]}."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "generate", arguments)
    if not 0 <= options.seed < 2**32:
        raise UsageError(f"--seed is 0 to 2^32 - 1; given {options.seed}: choose another")
    prompts = _prompts(options.prompt or ("\n",))
    with stdout_to_stderr():
        choose_platform()
        from jdp.cli.text_model import find_model
        from jdp.models.decode import Draw

        found = find_model(options.model, options.run_dir, options.step, options.plugin, options.tokenizer)
        draw = Draw.checked(found.config.vocab_size, options.temperature, options.top_k, options.top_p)
        tokenizer = found.tokenizer
        encoded = [tokenizer.opened(tokenizer.encode(prompt)).tolist() for prompt in prompts]
        length = _length(options.length, encoded, found)

        import jax

        device = jax.devices()[0]
        model, name = found.load(device)
        print(f"jdp: {name}, {length} tokens at most, on one {device.device_kind}", file=sys.stderr)

    from jdp.models.decode import stream

    longest, texts = max(map(len, encoded)), list[dict[str, Any]]()
    key = jax.random.fold_in(jax.random.key(options.seed), 2)  # the key of a run's [sample], for equal draws
    for prompt, tokens in zip(prompts, encoded, strict=True):
        drawn = stream(model, tokens, length=length, draw=draw, rng=key, longest=longest)
        texts.append(_written(prompt, tokens, drawn, tokenizer, quiet=options.json))
    if options.json:
        print(as_json.dumps({"model": name, "texts": texts}))
    return 0


def _prompts(texts: Sequence[str]) -> list[str]:
    """Return the prompts, "-" read from stdin. Raises UsageError for a prompt that is not text."""
    if texts.count(STDIN) > 1:
        raise UsageError("--prompt - reads stdin, which can be read once; given twice: remove one")
    try:
        prompts = [sys.stdin.buffer.read().decode() if prompt == STDIN else prompt for prompt in texts]
    except UnicodeDecodeError:
        raise UsageError("--prompt - reads text in UTF-8; stdin has other bytes: convert it (iconv)") from None
    for prompt in prompts:
        if not prompt or prompt.encode(errors="replace").decode() != prompt:
            raise UsageError(f"--prompt is text in UTF-8, one character at least; given {brief(prompt)}: write some")
    return prompts


def _length(wanted: int | None, prompts: Sequence[Sequence[int]], model: "TextModel") -> int:
    """Return the number of tokens to add. Raises UsageError if prompt and text do not fit into the context."""
    context, vocabulary, longest = model.config.context, model.config.vocab_size, max(map(len, prompts))
    if not all(prompts):
        raise UsageError(f"--prompt has 1 token at least; {model.tokenizer.name} makes none of one: write other text")
    if wanted is not None and wanted < 1:
        raise UsageError(f"--length is 1 token or more; given {wanted}: raise it")
    if (largest := max(map(max, prompts))) >= vocabulary:
        raise UsageError(
            f"tokens are below the model's vocab_size = {vocabulary}; its tokenizer, {model.tokenizer.name}, makes "
            f"{largest} of a prompt: put the tokenizer that it was trained with in its place"
        )
    room = context - longest
    if room < (wanted or 1):
        fix = "shorten the prompt" if room < 1 else f"give --length {room}, or shorten the prompt"
        raise UsageError(
            f"prompt and text must fit into the model's context of {context} tokens; given a prompt of {longest} and "
            f"--length {wanted or 1}: {fix}"
        )
    return min(wanted or LENGTH, room)


def _written(
    prompt: str, before: Sequence[int], drawn: Iterator[int], tokenizer: "Tokenizer", *, quiet: bool
) -> dict[str, Any]:
    """Print a prompt and its text while it is drawn; return both."""
    text, tokens, ended, began = "", list[int](), False, 0.0

    def show(part: str) -> str:
        if not quiet:
            print(escaped(part) if sys.stdout.isatty() else part, end="", flush=True)
        return part

    def decodable() -> Iterator[int]:
        nonlocal ended, began
        for token in drawn:
            if ended := token in tokenizer.ends:
                return
            tokens.append(token)
            if len(tokens) == 2:  # both programs are compiled
                began = time.perf_counter()
            if token < tokenizer.vocab_size:  # a padded vocabulary has more
                yield token

    show(prompt)
    for part in tokenizer.decode_stream(decodable(), after=before):
        text += show(part)
    speed = f", {(len(tokens) - 2) / (time.perf_counter() - began):.3g} a second" if len(tokens) > 2 else ""
    if not quiet:
        print(flush=True)
    print(f"jdp: {len(tokens)} tokens{speed}{', ended by the model' if ended else ''}", file=sys.stderr)
    return {"prompt": prompt, "text": text, "tokens": len(tokens), "ended": ended}
