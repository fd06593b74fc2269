"""Weights to and from safetensors files, under jdp's names or another library's.

files, names          the files and their index; the map from tensors to parameters
transfer              export and import, tensor by tensor
hugging_face          Hugging Face's names; `families` the table of its model types
hugging_face_config   the configuration beside the weights; `config_table` reads JSON files and their keys by type
lora                  adds LoRA's updates to their kernels
"""
