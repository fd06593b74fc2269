"""`jdp new`: copy a shipped experiment to start from."""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jdp.base.toml import brief
from jdp.base.words import nearest
from jdp.cli.options import UsageError, parse
from jdp.experiment.file import absent_paths, copied, shipped
from jdp.experiment.schema.fields import run_name

_GPUS = 8
"""GPUs of a host in the command that is shown."""


@dataclass(frozen=True)
class Options:
    """Writes NAME.toml, a copy of an experiment that jdp ships, under its own name.

    It never replaces a file. At the end it prints the next two commands.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Name of the run and of the file in the working directory."""
    from_: Annotated[str, tyro.conf.arg(name="from", metavar="SHIPPED")] = "quickstart"
    """Shipped experiment to start from: continue_pretraining, digits_resnet, finetune_hf_llama,
    finetune_lora, gpt2_124m, gpt_1b, hsdp, imagenet_resnet50, imagenet_vit, llama_8b_zero3, quickstart,
    quickstart_muon, sft_chat, tensor_parallel."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "new", arguments)
    names = shipped()
    try:
        run_name(options.name)
    except ValueError as error:
        raise UsageError(f"NAME {error}; given {brief(options.name)}: write a name such as mine") from None
    if options.name.endswith(".toml"):
        raise UsageError(f"NAME is without .toml; given {options.name}: write {options.name.removesuffix('.toml')}")
    if options.from_ not in names:
        given = f"{brief(options.from_)}{nearest(options.from_, names)}"
        raise UsageError(f"--from must be an experiment that jdp ships, one of {', '.join(names)}; given {given}")

    text = copied(options.from_, options.name)
    file = Path(f"{options.name}.toml")
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise UsageError(f"jdp new replaces no file; given {file}, which exists: choose another NAME") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written here: {error.strerror}; go to a folder of yours") from None
    table = tomllib.loads(text)
    sizes = table.get("mesh", {}).values()
    count = math.prod(sizes) if sizes and min(sizes) > 0 else _GPUS
    target = "" if "devices" in table else f" --target h100:{math.ceil(count / _GPUS)}x{min(count, _GPUS)}"
    absent = ", ".join(absent_paths(table))
    needs = f"; its comments tell how to get {absent}, which it needs" if absent else ""
    print(f"wrote {file}{needs}. Next:\n  jdp plan {file}{target}\n  jdp train {file}")
    return 0
