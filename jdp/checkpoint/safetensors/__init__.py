"""Weights to and from safetensors files, under jdp's names or another library's.

`files` reads and writes the files and their index; `names` maps the tensors of a file to parameters; `hugging_face` has
Hugging Face's names, `families` the table of its model types, `hugging_face_config` reads and writes the configuration
beside their weights (`config_table` its keys by type), `peft` LoRA's updates; `transfer` exports and imports, tensor by
tensor.
"""

from jdp.checkpoint.safetensors.hugging_face import gpt2_names, hf_names, llama_names
from jdp.checkpoint.safetensors.hugging_face_config import gpt_config_from_hf
from jdp.checkpoint.safetensors.names import Names, Part, Tensor
from jdp.checkpoint.safetensors.peft import export_peft, import_peft, lora_from_peft, merge_lora
from jdp.checkpoint.safetensors.transfer import export_hf, export_safetensors, import_safetensors

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
