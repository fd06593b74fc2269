"""Folders that the blocks of a guide start from: `<!-- setup: NAME -->` above a block."""

import json
import shutil
from pathlib import Path

import pytest

TEXTS = [f"In chapter {number} of the tale, told at length: " * 6 for number in range(60)]


@pytest.fixture
def llama(tmp_path):
    """`llama/`, a small Llama as Hugging Face's hub has it, and `texts.jsonl`."""
    import jax  # late: every test run reads this file
    import optax
    import tokenizers
    from flax import nnx

    import jdp
    from jdp.models import GPT, GPTConfig

    config = GPTConfig(vocab_size=300, context=64, layers=2, width=32, heads=4, kv_heads=2)
    plan = jdp.Plan(jdp.make_mesh(), "ddp")
    state = jdp.init_state(lambda rng: GPT(config, rngs=nnx.Rngs(rng)), optax.sgd(0.1), plan, rng=jax.random.key(0))
    jdp.export.export_hf(tmp_path / "llama", state, config)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=299, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.add_special_tokens(["<|end_of_text|>"])
    bpe.save(str(tmp_path / "llama" / "tokenizer.json"))
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(rows, encoding="utf-8")
    return {}


@pytest.fixture
def first_run(tmp_path):
    """`runs/first/`, a run that ended: the one that the tests of old runs keep."""
    shutil.copytree(Path(__file__).parent / "run" / "kept_run" / "points", tmp_path / "runs" / "first")
    return {}
