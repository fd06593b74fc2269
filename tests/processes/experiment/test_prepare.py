"""The scripts of `experiments/prepare/`: text and chats become rows of ids and weights, which jdp learns from."""

import importlib.util
import json
import re

import numpy as np
import pytest
from guide_folders import CHAT_TEMPLATE, TEXTS, write_chat_llama, write_llama
from own_process import python
from paths import EXPERIMENTS
from tiny_runs import rows

from jdp.cli.main import main
from jdp.data import open_tokenizer, text_data

transformers = pytest.importorskip("transformers")
PREPARE = EXPERIMENTS / "prepare"
MARKED = CHAT_TEMPLATE.replace(
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}",
    "{{- '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{- message['content'] | trim + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{- message['content'] | trim + '<|im_end|>' }}{% endif %}{{- '\n' }}",
)


def exchange(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


CHAT = [*exchange("one?", "It is 1."), *exchange("more?", "It is 2.")]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "llama"
    write_chat_llama(folder)
    return folder


@pytest.fixture(scope="module")
def row_of():
    spec = importlib.util.spec_from_file_location("chats_to_ids", PREPARE / "chats_to_ids.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.row_of


def learnt(row_of, llama, messages, template=CHAT_TEMPLATE, **more):
    """The text of each stretch of tokens with weight 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = template
    row = row_of(tokenizer, {"messages": messages, **more})
    ids, weights = np.array(row["input_ids"]), np.array(row["loss_mask"])
    assert len(ids) == len(weights) and {*weights.tolist()} <= {0, 1}
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], weights, [0]])))
    return [tokenizer.decode(ids[start:end]) for start, end in bounds.reshape(-1, 2)]


@pytest.mark.parametrize(("template", "end"), [(CHAT_TEMPLATE, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
def test_the_answers_alone_have_weight(row_of, llama, template, end):
    """By {% generation %}; in a template without it, what the messages before with the prompt do not have."""
    assert learnt(row_of, llama, CHAT, template) == [f"It is 1.{end}", f"It is 2.{end}"]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED])
@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}])
def test_an_answer_without_weight_is_not_learnt(row_of, llama, template, key):
    first = [CHAT[0], CHAT[1] | key, *CHAT[2:]]
    [only] = learnt(row_of, llama, first, template)
    assert only.startswith("It is 2.")
    assert learnt(row_of, llama, [CHAT[0], CHAT[1] | key], template) == []
    kept = dict.fromkeys(key, 1)  # as Arrow has the key in every message
    assert len(learnt(row_of, llama, [each | (key if each is CHAT[1] else kept) for each in CHAT], template)) == 1


def test_a_template_that_changes_earlier_answers_is_refused(row_of, llama):
    """As Qwen3's leaves out what was thought before the last question."""
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] if loop.last else '-' }}{% endfor %}"
    with pytest.raises(SystemExit, match="the template writes this otherwise where more follows: mark answers in it"):
        learnt(row_of, llama, CHAT, template)


TOY = {"model.context": 64, "data.length": 64, "train.batch_size": 16, "optimizer.warmup_steps": 2}
TOY |= {"train.eval_every": 0, "train.checkpoint_every": 0, "train.log_every": 1, "train.eval_batches": 1}
TOY |= {"data.heldout_fraction": 0.2, "optimizer.lr": 1e-2, "strategy": "zero1", "precision": "fp32"}


def trained(name, folder, **given):
    model = {"model.name": f"hf:{folder}/llama", "train.init_from": f"{folder}/llama"}
    flags = [word for key, value in (TOY | model | given).items() for word in (f"--{key}", str(value))]
    assert main(["train", name, *flags, "--run-dir", str(folder / "runs")]) == 0
    [run] = (folder / "runs").glob(f"{name.replace('_', '-')}*")
    return run


@pytest.mark.rest
def test_a_chat_is_learnt_from_its_answers(llama, capsys):
    """The commands of the recipe's note: the loss falls, and the export, as the base in bf16 and with its context,
    answers a question and ends where the template ends an answer."""
    folder = llama.parent
    base = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(base | {"torch_dtype": "bfloat16", "max_position_embeddings": 512}))
    (llama / "generation_config.json").write_text('{"eos_token_id": 0, "top_p": 0.9}')
    chats = (exchange(f"What is one more than {number}?", f"It is {number + 1}.") for number in range(120))
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    done = python(PREPARE / "chats_to_ids.py", "llama", "chats.jsonl", "chats.parquet", cwd=folder)
    assert done.returncode == 0, done.stderr
    given = {"data.source": f"hf:parquet:{folder}/chats.parquet", "train.steps": 40, "train.export": "hf"}
    run = trained("sft_chat", folder, **given, **{"train.accumulate": 1})
    losses, out = rows(run, "loss"), capsys.readouterr().out
    assert losses[1] > 5 and losses[40] < 1.5
    assert re.search(r"1\d\d documents, .* \d+ % of its tokens count", out)
    asked = "<|im_start|>user\nWhat can you do?<|im_end|>\n<|im_start|>assistant\n"
    assert main(["generate", str(run / "export"), "--prompt", asked, "--temperature", "0", "--length", "20"]) == 0
    out, error = capsys.readouterr()
    assert "assistant\nIt is " in out and "ended by the model" in error
    keys, ends = (json.loads((run / "export" / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    answer_ends = open_tokenizer(str(run / "export")).separator
    assert keys["eos_token_id"] == ends["eos_token_id"] == [answer_ends, 0] and ends["top_p"] == 0.9
    assert (keys["torch_dtype"], keys["max_position_embeddings"]) == ("bfloat16", 512)


@pytest.mark.rest
def test_text_is_learnt_from_its_ids(tmp_path):
    """The ids are those that jdp's own reader makes of the text, each row opened and closed by the tokenizer's."""
    write_llama(tmp_path / "llama", ["<|begin_of_text|>", "<|end_of_text|>"], TEXTS)
    settings = {"eos_token": "<|end_of_text|>"}
    (tmp_path / "llama/tokenizer_config.json").write_text(json.dumps(settings))
    table = json.loads((tmp_path / "llama/tokenizer.json").read_text())
    bos = {"id": "<|begin_of_text|>", "ids": [table["added_tokens"][0]["id"]], "tokens": ["<|begin_of_text|>"]}
    table["post_processor"] = {"type": "TemplateProcessing", "special_tokens": {bos["id"]: bos}} | {
        kind: [
            {"SpecialToken": {"id": bos["id"], "type_id": 0}},
            *({"Sequence": {"id": each, "type_id": 0}} for each in ids),
        ]
        for kind, ids in (("single", "A"), ("pair", "AB"))
    }
    (tmp_path / "llama/tokenizer.json").write_text(json.dumps(table))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, ""]))
    done = python(PREPARE / "text_to_ids.py", "llama", "texts.jsonl", "ids.parquet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    options = {"length": 16, "heldout_fraction": 0.2}
    own = text_data(f"hf:json:{tmp_path}/texts.jsonl", tokenizer=f"{tmp_path}/llama", **options)
    made = text_data(f"hf:parquet:{tmp_path}/ids.parquet", ids="input_ids", **options)
    assert own.documents == made.documents == len(TEXTS)
    both = [np.concatenate([data.train.ids, data.heldout.ids]) for data in (own, made)]
    assert np.array_equal(*(np.sort(tokens) for tokens in both))
    given = {"data.source": f"hf:parquet:{tmp_path}/ids.parquet", "data.ids": "input_ids", "train.steps": 20}
    losses = rows(trained("finetune_hf_llama", tmp_path, **given), "loss")
    assert losses[20] < losses[1] - 1
    done = python(PREPARE / "text_to_ids.py", "llama", "texts.jsonl", "ids.parquet", "body", cwd=tmp_path)
    assert done.returncode == 1 and 'there is no column "body" in texts.jsonl, which has text' in done.stderr
