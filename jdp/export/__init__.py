"""Weights to and from safetensors files, under jdp's names or another library's.

`files` is the file format; `names` says which tensor of a file holds which parameter; `gpt` has the names that Hugging
Face's GPT-2 and Llama go by; `transfer` moves the weights, tensor by tensor.
"""

from jdp.export.gpt import gpt2_names, llama_names
from jdp.export.names import Names, Part, Tensor
from jdp.export.transfer import export_safetensors, import_safetensors

__all__ = ["Names", "Part", "Tensor", "export_safetensors", "gpt2_names", "import_safetensors", "llama_names"]
