"""Folders that the blocks of a guide start from: `<!-- setup: NAME -->` above a block."""

import json

import pytest

CHAT_TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
"""ChatML."""
TEXTS = [f"In chapter {number} of the tale, told at length: " * 6 for number in range(60)]


@pytest.fixture
def llama(tmp_path):
    """`llama/`, a small Llama as Hugging Face's hub has it, and `texts.jsonl`."""
    write_llama(tmp_path / "llama", ["<|end_of_text|>"], TEXTS)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(rows, encoding="utf-8")
    return {}


def write_chat_llama(folder):
    """Write a small Llama with random weights, and a tokenizer with `CHAT_TEMPLATE`."""
    write_llama(folder, ["<|im_start|>", "<|im_end|>"], ["one more than is assistant user"])
    settings = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_llama(folder, special, texts):
    """Write a small Llama with random weights, and a tokenizer of 300 tokens with these special ones."""
    import jax  # late: every test run reads this file
    import optax
    from flax import nnx

    import jdp
    from jdp.models import GPT, GPTConfig

    config = GPTConfig(vocab_size=300, context=64, layers=2, width=32, heads=4, kv_heads=2)
    plan = jdp.Plan(jdp.make_mesh(), "ddp")
    state = jdp.init_state(lambda rng: GPT(config, rngs=nnx.Rngs(rng)), optax.sgd(0.1), plan, rng=jax.random.key(0))
    jdp.export.export_hf(folder, state, config)
    trained_tokenizer(special, texts).save(str(folder / "tokenizer.json"))


def trained_tokenizer(special, texts):
    """Return a byte-level BPE of 300 tokens, the last of which are these special ones."""
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    size = 300 - len(special)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    bpe.add_special_tokens(special)
    return bpe


@pytest.fixture
def first_run(tmp_path):
    """`runs/first/`, with the metrics of a run."""
    (tmp_path / "runs" / "first").mkdir(parents=True)
    rows = ({"step": 10, "time": 1.0, "loss": 2.5}, {"step": 10, "time": 1.5, "eval_loss": 2.75})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "runs" / "first" / "metrics.jsonl").write_text(text, encoding="utf-8")
    return {}
