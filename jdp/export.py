"""Weights to and from safetensors files: the public face of `jdp.checkpoint.safetensors`."""

from jdp.checkpoint.safetensors import Names as Names
from jdp.checkpoint.safetensors import Part as Part
from jdp.checkpoint.safetensors import Tensor as Tensor
from jdp.checkpoint.safetensors import export_safetensors as export_safetensors
from jdp.checkpoint.safetensors import gpt2_names as gpt2_names
from jdp.checkpoint.safetensors import gpt_config_from_hf as gpt_config_from_hf
from jdp.checkpoint.safetensors import import_safetensors as import_safetensors
from jdp.checkpoint.safetensors import llama_names as llama_names
