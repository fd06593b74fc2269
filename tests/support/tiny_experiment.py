"""Experiments that are as small as they can be, in a file beside their data: a GPT on text, an MLP on points."""

import json

import jax
import numpy as np
import pytest

from jdp.core.sharding.mesh import make_mesh
from jdp.experiment.file import load
from jdp.run import loop

SMALL = """
name = "small"
[model]
name = "gpt-nano"
[data]
length = 32
[train]
steps = 50
batch_size = 16
"""
"""A file with no more than it needs; nothing trains it."""
MODEL_AND_DATA = """
[model]
name = "gpt-nano"
layers = 1
width = 16
heads = 2
kv_heads = 1
context = 8

[data]
source = "text.txt"
heldout_fraction = 0.1

"""


def tables(**given):
    """Return tables of an experiment file: `tables(train={"steps": 4})`."""
    return "".join(f"[{name}]\n{entries(table)}\n" for name, table in given.items())


def entries(table):
    """Return the lines of a table, an experiment's too: a table in it is on one line."""
    return "\n".join(f"{key} = {toml(value)}" for key, value in table.items())


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def write_tiny(folder, tables, *, top=""):
    """Write FOLDER/tiny.toml, with `tables` after the model and the data and `top` above them; return its path."""
    words = np.random.default_rng(0).choice(["data", "parallel", "device", "mesh"], 1000)
    (folder / "text.txt").write_text(" ".join(words))
    (folder / "tiny.toml").write_text(f'name = "tiny"\n{top}{MODEL_AND_DATA}{tables}')
    return folder / "tiny.toml"


def points_text(tables, *, hidden=8, top=""):
    """Return the text of an MLP on points, with `tables` after the model and the data and `top` above them."""
    model = f'[model]\nname = "mlp"\nfeatures_in = 6\nhidden = [{hidden}]\nfeatures_out = 3\n'
    return f'name = "points"\n{top}{model}[data]\nsource = "points.npz"\nheldout_fraction = 0.2\n{tables}'


def write_points(folder, text):
    """Write FOLDER/points.toml and its 120 points of three classes; return its path. A step takes milliseconds."""
    rng, labels = np.random.default_rng(0), np.arange(120) % 3
    features = rng.normal(size=(120, 6)).astype(np.float32) + labels[:, None].astype(np.float32)
    np.savez(folder / "points.npz", features=features, labels=labels)
    (folder / "points.toml").write_text(text)
    return folder / "points.toml"


def train_here(file, root, settings, *, devices):
    """Train an experiment in this process, on the first of its devices, and return the summary."""
    first = jax.devices()[:devices]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("jdp.experiment.assembly.make_mesh", lambda devices, **axes: make_mesh(devices=first, **axes))
        return loop.run(load(file, settings), root=root)
