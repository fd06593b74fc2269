"""Weights to and from safetensors files, under jdp's names or another library's.

transfer       export and import, tensor by tensor; adds LoRA's updates to their kernels
files, names   the files and their index; the map from tensors to parameters, and Hugging Face's names
config         Hugging Face's configuration beside the weights, and the table of its model types
"""
