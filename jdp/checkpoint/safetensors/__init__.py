"""Weights to and from safetensors files, under jdp's names or another library's.

files, names          the files and their index; which tensor of a file holds which parameter
transfer              export and import, tensor by tensor
hugging_face          Hugging Face's names; `families` the table of its model types
hugging_face_config   the configuration beside their weights; `config_table` reads its keys by type
peft                  LoRA's updates
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
