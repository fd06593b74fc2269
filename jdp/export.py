"""Weights to and from safetensors files: the public face of `jdp.checkpoint.safetensors`.

A tree of parameters, by default under its own paths, or under names of another layout:

>>> import pathlib, tempfile
>>> import jax, jax.numpy as jnp, numpy as np
>>> folder = tempfile.TemporaryDirectory()
>>> file = pathlib.Path(folder.name, "linear.safetensors")
>>> export_safetensors(file, {"linear": {"kernel": jnp.eye(2)}}, names={"weight": "linear/kernel"})
>>> zeros = {"linear": {"kernel": jnp.zeros((2, 2))}}
>>> import_safetensors(file, zeros, names={"weight": "linear/kernel"})["linear"]["kernel"].tolist()
[[1.0, 0.0], [0.0, 1.0]]

A GPT as `transformers` reads it:

>>> from flax import nnx
>>> from jdp.models import GPT, GPTConfig
>>> config = GPTConfig(vocab_size=8, context=4, layers=1, width=4, heads=2, lora_rank=1)
>>> shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param))
>>> params = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype)), shapes)
>>> export_peft(pathlib.Path(folder.name, "adapter"), params, config)
>>> lora_from_peft(pathlib.Path(folder.name, "adapter"))["lora_rank"]
1
>>> merged, plain = merge_lora(params, config)
>>> export_hf(folder.name, merged, plain)
>>> gpt_config_from_hf(folder.name).heads, hf_names(plain) == llama_names(plain)
(2, True)
>>> folder.cleanup()
"""

from jdp.checkpoint.safetensors import (
    Names,
    Part,
    Tensor,
    export_hf,
    export_peft,
    export_safetensors,
    gpt2_names,
    gpt_config_from_hf,
    hf_names,
    import_peft,
    import_safetensors,
    llama_names,
    lora_from_peft,
    merge_lora,
)

__all__ = [
    "Names",
    "Part",
    "Tensor",
    "export_hf",
    "export_peft",
    "export_safetensors",
    "gpt2_names",
    "gpt_config_from_hf",
    "hf_names",
    "import_peft",
    "import_safetensors",
    "llama_names",
    "lora_from_peft",
    "merge_lora",
]
