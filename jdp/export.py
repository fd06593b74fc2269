"""Weights to and from safetensors files: the public face of `jdp.checkpoint.safetensors`."""

from jdp.checkpoint.safetensors import (
    Names,
    Part,
    Tensor,
    export_hf,
    export_safetensors,
    gpt2_names,
    gpt_config_from_hf,
    hf_names,
    import_safetensors,
    llama_names,
)

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
]
