"""Weights to and from safetensors files, under jdp's names or another library's.

`files` is the files and their index; `names` says which tensor of a file holds which parameter; `hugging_face` has the
names that Hugging Face's GPT-2 and Llama go by, `hugging_face_config` reads which model the weights beside it are of;
`transfer` moves the weights, tensor by tensor.
"""

from jdp.checkpoint.safetensors.hugging_face import gpt2_names, llama_names
from jdp.checkpoint.safetensors.hugging_face_config import gpt_config_from_hf
from jdp.checkpoint.safetensors.names import Names, Part, Tensor
from jdp.checkpoint.safetensors.transfer import export_safetensors, import_safetensors

__all__ = [
    "Names",
    "Part",
    "Tensor",
    "export_safetensors",
    "gpt2_names",
    "gpt_config_from_hf",
    "import_safetensors",
    "llama_names",
]
