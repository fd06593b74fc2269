"""An experiment that is as small as one can be, in a file beside its text."""

import numpy as np

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


def write_tiny(folder, tables, *, top=""):
    """Write FOLDER/tiny.toml, with `tables` after the model and the data and `top` above them; return its path."""
    words = np.random.default_rng(0).choice(["data", "parallel", "device", "mesh"], 1000)
    (folder / "text.txt").write_text(" ".join(words))
    (folder / "tiny.toml").write_text(f'name = "tiny"\n{top}{MODEL_AND_DATA}{tables}')
    return folder / "tiny.toml"
