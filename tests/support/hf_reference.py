"""Logits that Hugging Face's own models give for small random weights, kept in checkpoint/hf_logits.json.

    python tests/support/hf_reference.py            # writes the file again: needs `pip install torch transformers`
    python tests/support/hf_reference.py --check    # computes them again and holds them against the file
    python tests/support/hf_reference.py --loads FOLDER ...    # prints what transformers says of exported models

Made with transformers 5.23.0 and torch 2.13.0 (CPU, float32, eager attention). Weights are not kept: each tensor's are
drawn from its name, so that a test without torch draws the same ones.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("hf_logits.json")
VOCABULARY, LENGTH = 40, 32
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (1, LENGTH))
POSITIONS = (1, LENGTH // 2, LENGTH - 1)
"""Of which the logits are kept."""

# One head is 16 wide, so there are 8 frequencies; with this base and these 32 tokens of the context before, they turn
# from 5 times to 0.02 times in it: above, between and below the two factors.
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "rope_theta": 500.0,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
HEADS = {"GPT2": "LMHeadModel"}
LLAMA_LIKE = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}

CASES = {
    "llama": ("Llama", LLAMA),
    "llama 3.1": ("Llama", {**LLAMA, "rope_scaling": LLAMA31}),
    "llama 3.2": ("Llama", {**LLAMA, "rope_scaling": {**LLAMA31, "factor": 32.0}, "tie_word_embeddings": True}),
    "llama theta": ("Llama", {**LLAMA, "rope_theta": 10_000.0}),
    "llama eps": ("Llama", {**LLAMA, "rms_norm_eps": 0.1}),
    "llama heads": ("Llama", {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama tied": ("Llama", {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", GPT2),
    "gpt2 gelu": ("GPT2", {**GPT2, "activation_function": "gelu"}),
    "gpt2 eps": ("GPT2", {**GPT2, "layer_norm_epsilon": 0.1}),
    "gpt2 untied": ("GPT2", {**GPT2, "tie_word_embeddings": False, "n_inner": 48}),
    "mistral": ("Mistral", {**LLAMA_LIKE, "sliding_window": 8}),
    "mistral plain": ("Mistral", {**LLAMA_LIKE, "sliding_window": None}),
    "qwen2": ("Qwen2", LLAMA_LIKE),
    "qwen3": ("Qwen3", {**LLAMA_LIKE, "head_dim": 8}),
}
"""name -> the family, and what its configuration is made with."""


def weights(shapes):
    """Values for tensors by name: around 1 for the scales of norms, around 0 for all else."""
    drawn = {}
    for name, shape in shapes.items():
        scale = len(shape) == 1 and name.endswith("weight")
        values = np.random.default_rng(zlib.crc32(name.encode())).normal(float(scale), 0.2, shape)
        drawn[name] = values.astype(np.float32)
    return drawn


def made_by_transformers(case):
    """The model of a case, with its weights drawn."""
    import torch
    import transformers

    family, settings = CASES[case]
    config = getattr(transformers, f"{family}Config")(**settings, attn_implementation="eager")
    model = getattr(transformers, family + HEADS.get(family, "ForCausalLM"))(config).eval()
    parameters = dict(model.named_parameters())  # a tied head is none of its own
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, values in weights(shapes).items():
            parameters[name].copy_(torch.from_numpy(values))
    return model, shapes


def logits_of(model):
    import torch

    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS)).logits[0, list(POSITIONS)].numpy().astype(float)


def loss_of(model):
    """The mean cross-entropy of the 31 next tokens."""
    import torch

    tokens = torch.from_numpy(TOKENS)
    with torch.no_grad():
        return float(model.eval()(tokens, labels=tokens).loss)


def computed(case):
    """The config.json, the shapes, the loss and the logits of a case, by transformers."""
    model, shapes = made_by_transformers(case)
    # As the library writes it beside weights: what is not its default, less what it says of itself.
    written = json.loads(model.config.to_json_string())
    kept = {key: value for key, value in written.items() if key not in ("transformers_version", "_name_or_path")}
    loss, logits = round(loss_of(model), 6), np.round(logits_of(model), 6).tolist()
    return {"config": kept, "shapes": shapes, "loss": loss, "logits": logits}


def loaded(folder):
    """What `transformers` says of an exported model, and its logits."""
    import torch
    import transformers

    options = {"output_loading_info": True, "attn_implementation": "eager", "dtype": torch.float32}
    model, said = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    left = {kind: sorted(map(str, said[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    return {**left, "type": type(model).__name__, "logits": logits_of(model).tolist()}


def main():
    if "--loads" in sys.argv:
        print(json.dumps({folder: loaded(folder) for folder in sys.argv[2:]}))
        return
    made = {case: computed(case) for case in CASES}
    if "--check" not in sys.argv:
        FILE.parent.mkdir(exist_ok=True)
        lines = (f"{json.dumps(case)}: {json.dumps(found)}" for case, found in made.items())
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    assert stored.keys() == made.keys()
    for case, found in made.items():
        assert stored[case]["shapes"] == found["shapes"], case
        np.testing.assert_allclose(stored[case]["logits"], found["logits"], atol=1e-4, err_msg=case)
        assert abs(stored[case].get("loss", 0) - found.get("loss", 0)) < 1e-5, case


if __name__ == "__main__":
    main()
