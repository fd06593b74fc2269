"""Weights to and from safetensors files: the public face of `jdp.checkpoint.safetensors`."""

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
