"""Weights to and from safetensors files: the public face of `jdp.checkpoint.safetensors`.

A tree of parameters, by default under its own paths, or under names of another layout:

>>> import pathlib, tempfile
>>> import jax, numpy as np
>>> folder = tempfile.TemporaryDirectory()
>>> file = pathlib.Path(folder.name, "linear.safetensors")
>>> params = {"linear": {"kernel": jax.device_put(np.eye(2))}}
>>> export_safetensors(file, params, names={"weight": "linear/kernel"})
>>> import_safetensors(file, params, names={"weight": "linear/kernel"})["linear"]["kernel"].tolist()
[[1.0, 0.0], [0.0, 1.0]]

A GPT as `transformers` reads it, with its low-rank updates added:

>>> from flax import nnx
>>> from jdp.models import GPT, GPTConfig
>>> config = GPTConfig(vocab_size=8, context=4, layers=1, width=4, heads=2, lora_rank=1, lora_targets=("query",))
>>> shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param))
>>> params = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype)), shapes)
>>> merged, plain = merge_lora(params, config)
>>> export_hf(folder.name, merged, plain)
>>> gpt_config_from_hf(folder.name).heads, hf_names(plain) == llama_names(plain)
(2, True)
>>> small = GPTConfig(8, 4, layers=1, width=4, heads=2, positions="learned", activation="gelu", norm="layer", bias=True)
>>> list(gpt2_names(small).tensors)[:2]
['transformer.wte.weight', 'transformer.wpe.weight']
>>> folder.cleanup()
"""

from jdp.checkpoint.safetensors.config import gpt_config_from_hf
from jdp.checkpoint.safetensors.names import Names, Part, Tensor, gpt2_names, hf_names, llama_names
from jdp.checkpoint.safetensors.transfer import export_hf, export_safetensors, import_safetensors, merge_lora

__all__ = [
    "Names",
    "Part",
    "Tensor",
    "export_hf",
    "export_safetensors",
    "gpt2_names",
    "gpt_config_from_hf",
    "hf_names",
    "import_safetensors",
    "llama_names",
    "merge_lora",
]
