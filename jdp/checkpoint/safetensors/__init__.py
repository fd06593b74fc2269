"""Weights to and from safetensors files, under jdp's names or another library's.

files, names          the files and their index; which tensor of a file holds which parameter
transfer              export and import, tensor by tensor
hugging_face          Hugging Face's names; `families` the table of its model types
hugging_face_config   the configuration beside their weights; `config_table` has JSON files and their keys by type
lora                  adds LoRA's updates to their kernels
"""
