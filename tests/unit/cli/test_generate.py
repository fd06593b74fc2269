"""`jdp generate` on a run and on an export, and the export at the end of a run (`train.export`)."""

import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experiment import points_text, tables, write_points, write_tiny
from tiny_runs import refused, saved_steps, train

import jdp
from jdp.cli.main import main
from jdp.data.text.tokenizers import byte_tokenizer, open_tokenizer
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError, load
from jdp.run.weights import check_export

TABLES = tables(
    optimizer={"name": "adamw", "lr": 2.0, "ema_decay": 0.1},  # so large a rate that the first evaluation is the best
    train={"steps": 4, "batch_size": 16, "eval_every": 1, "eval_batches": 1, "checkpoint_every": 1}
    | {"keep_best": True, "export": "hf"},
    sample={"prompt": "de", "length": 6},
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The file of a finished run with averaged weights, its folder, and what it printed."""
    file = write_tiny(tmp_path_factory.mktemp("generate"), TABLES)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.stdout", printed := io.StringIO())
        code, folder = train(file)
    assert code == 0
    return file, folder, printed.getvalue()


def exported_step(folder):
    return json.loads((folder / "export/jdp.json").read_text())["step"]


def likeliest(file, checkpoint, prompt, length):
    """The text of the largest logits of whole forward passes, by a checkpoint's averaged weights."""
    assembly = Assembly.on_devices(load(file))
    model = assembly.training.averaged(jdp.restore(checkpoint, assembly.training.abstract_state)).model
    tokens, forward = [*prompt.encode()], jax.jit(lambda model, tokens: model(tokens))
    for _ in range(length):
        padded = jnp.asarray([[*tokens, *[0] * (8 - len(tokens))]])
        tokens.append(int(np.asarray(forward(model, padded))[0, len(tokens) - 1].argmax()))
    return bytes(tokens).decode(errors="replace")


def written(capsys, *words):
    """Run `jdp generate`; return its stdout."""
    capsys.readouterr()
    code = main(["generate", *map(str, words)])
    out, error = capsys.readouterr()
    assert code == 0, error
    return out


def test_greedy_text_is_the_argmax_of_forward_passes(trained, capsys):
    file, folder, _ = trained
    given = ["tiny", "--run-dir", folder.parent, "--prompt", "data", "--prompt", "p", "--length", 4, "--temperature", 0]
    assert written(capsys, *given) == "".join(f"{likeliest(file, folder, text, 4)}\n" for text in ("data", "p"))
    step = folder / "checkpoints" / "3"
    assert written(capsys, *given[:5], *given[7:], "--step", 3) == f"{likeliest(file, step, 'data', 4)}\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_gets_no_control_characters(trained, monkeypatch, terminal):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", stream := io.TextIOWrapper(raw, "ascii"))
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    assert main(["generate", str(trained[1]), "--prompt", "é\x1b[1m", "--length", "1"]) == 0
    assert raw.getvalue().startswith(b"\\xe9\\x1b[1m" if terminal else b"\\xe9\x1b[1m")


def test_a_tokenizer_that_was_moved_is_named(trained, capsys, tmp_path):
    """As that of a base model whose folder was moved after the run."""
    _, folder, _ = trained
    shutil.copytree(folder, run := tmp_path / "run")
    toml = (run / "experiment.toml").read_text()
    (run / "experiment.toml").write_text(toml.replace('tokenizer = "bytes"', f'tokenizer = "{tmp_path}/gone"'))
    given = ["--prompt", "data", "--length", 4, "--temperature", 0]
    assert f"given {tmp_path}/gone" in (said := refused(capsys, "generate", run, *given))
    assert said.endswith("if it was moved, give its folder (--tokenizer FOLDER)\n")
    assert written(capsys, run, *given, "--tokenizer", run / "export") == written(capsys, folder, *given)
    (run / "export" / "tokenizer.json").unlink()
    assert "has no tokenizer.json: copy it there" in refused(capsys, "generate", run / "export", *given)
    exported = written(capsys, run / "export", *given, "--tokenizer", folder / "export")
    assert exported == written(capsys, folder / "export", *given)
    (run / "checkpoints" / "4" / "checkpoint.json").write_text("{}")
    said = written(capsys, run, *given, "--tokenizer", "bytes", "--json")
    assert json.loads(said)["model"] == f"{run}, step {saved_steps(folder)[-2]}", "the step that is read"


def test_an_export_is_the_best_checkpoint(trained, capsys):
    file, folder, printed = trained
    best = exported_step(folder)
    assert best in saved_steps(folder)[:-1]
    assert f"exported the model of step {best}, the best by eval_loss, to {folder / 'export'}\n" in printed
    config = json.loads((folder / "export" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["torch_dtype"]) == (0, None, "float32")
    given = ["--prompt", "mesh", "--length", 4, "--temperature", 0]
    texts = {written(capsys, folder / "export", *given), written(capsys, folder, *given, "--step", "best")}
    assert texts == {f"{likeliest(file, folder / 'checkpoints' / str(best), 'mesh', 4)}\n"}


def test_a_seed_fixes_the_text_on_stdout(trained, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a")))
    given = [trained[1], "--prompt", "-", "--json", "--temperature", 9]
    first = json.loads(written(capsys, *given))
    (text,) = first["texts"]
    assert (text["prompt"], text["tokens"]) == ("a", 7) or text["ended"]  # as the context of 8 leaves
    again = [json.loads(written(capsys, *given[:1], *given[3:], "--prompt", "a", "--seed", seed)) for seed in (0, 1)]
    assert again[0] == first != again[1]


def test_the_token_that_closes_documents_ends_the_text(trained, capsys, tmp_path):
    shutil.copytree(trained[1] / "export", tmp_path / "export")
    given = [tmp_path / "export", "--prompt", "data", "--temperature", 0, "--json"]
    (text,) = json.loads(written(capsys, *given))["texts"]
    assert text["text"] and not text["ended"]
    first, settings = text["text"][0], (tmp_path / "export" / "tokenizer_config.json").read_text()
    for named in ({"eos_token": first}, json.loads(settings)):
        (tmp_path / "export" / "tokenizer_config.json").write_text(json.dumps(named))
        (ended,) = json.loads(written(capsys, *given))["texts"]
        assert ended == {"prompt": "data", "text": "", "tokens": 0, "ended": True}
        (tmp_path / "export" / "generation_config.json").write_text(json.dumps({"eos_token_id": ord(first)}))


RULE = "text is written by a GPT that learned text; "
BAD = {
    "beyond the context": (["--prompt", "abc", "--length", "6"], "context of 8 tokens; given a prompt of 3"),
    "stdin twice": (["--prompt", "-", "--prompt", "-"], "reads stdin, which can be read once"),
    "top_k": (["--top-k", "257"], r"top_k is between 1 and vocab_size(256); given 257"),
    "step": (["--step", "7"], 'or "best"; given 7'),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_refused_before_weights_are_read(case, trained, capsys, monkeypatch):
    monkeypatch.setattr("jdp.cli.text_model.restore", None)
    arguments, error = BAD[case]
    assert error in refused(capsys, "generate", trained[1], *arguments)


def test_what_writes_no_text_is_named(trained, capsys, tmp_path):
    _, folder, _ = trained
    assert "an export has one model" in refused(capsys, "generate", folder / "export", "--step", "1")
    text = (folder / "experiment.toml").read_text()
    changes = {
        "made": ('[model]\nmake = "none"', '[model]\nmake = "rings:wave"', "/made has model.make = 'rings:wave'"),
        "ids": ('ids = "none"', 'ids = "input_ids"', "learned token ids, and names none: give the folder"),
        "unkept": ("keep_best = true", "keep_best = false", "has none yet"),
    }
    for name, (old, new, error) in changes.items():
        (tmp_path / name).mkdir()
        sample = text.partition("[sample]")
        kept = (sample[0] if name == "ids" else text).replace(old, new)
        (tmp_path / name / "experiment.toml").write_text(kept.replace('export = "hf"', 'export = "none"'))
        assert error in refused(capsys, "generate", tmp_path / name)
    assert "has none yet" in refused(capsys, "generate", tmp_path / "ids", "--tokenizer", "bytes")
    (tmp_path / "unkept" / "checkpoints").mkdir()
    shutil.copytree(folder / "checkpoints" / "4", tmp_path / "unkept" / "checkpoints" / "4")
    error = refused(capsys, "generate", tmp_path / "unkept", "--step", "best")
    assert "has no train.keep_best: name a step, 4" in error
    write_points(tmp_path, points_text(tables(train={"steps": 1, "batch_size": 8})))
    (tmp_path / "points").mkdir()
    (tmp_path / "points.toml").rename(tmp_path / "points" / "experiment.toml")
    assert f"{RULE}{tmp_path}/points has model.name = 'mlp'" in refused(capsys, "generate", tmp_path / "points")


# The export at the end of a run.


def test_a_run_exports_once_until_it_continues(trained, capsys):
    file, folder, _ = trained
    shutil.copytree(folder.parent, file.parent / "copy")
    folder = file.parent / "copy" / "tiny"
    weights = folder / "export" / "model.safetensors"
    before, best = weights.stat(), exported_step(folder)
    assert train(file, runs="copy")[0] == 0
    assert f"{folder / 'export'} has the model of step {best}" in capsys.readouterr().out
    assert weights.stat() == before
    assert train(file, "--train.steps", "5", "--train.keep_best", "false", runs="copy")[0] == 0
    assert exported_step(folder) == 5
    as_bf16 = ("--train.steps", "5", "--train.keep_best", "false", "--train.export_dtype", "bf16")
    assert train(file, *as_bf16, runs="copy")[0] == 0
    exported = weights.read_bytes()
    shutil.rmtree(folder / "checkpoints" / "5")
    assert train(file, *as_bf16, "--train.batch_size", "8", runs="copy")[0] == 0
    assert exported_step(folder) == 5 and weights.read_bytes() != exported, "the same step, trained again"
    assert json.loads((folder / "export" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert weights.stat().st_size < 0.6 * before.st_size
    assert sorted(path.name for path in folder.glob(".export*")) == []


def test_a_folder_of_another_hand_is_left_alone(trained, capsys):
    file, folder, _ = trained
    shutil.copytree(folder.parent, file.parent / "foreign")
    (file.parent / "foreign" / "tiny" / "export" / "jdp.json").unlink()
    error = refused(capsys, "train", file, "--run-dir", file.parent / "foreign")
    assert "train.export replaces only a folder that it made" in error


@pytest.mark.parametrize("key", [{"model.bias": "true"}, {"model.positions": "learned"}])
def test_a_model_without_an_export_is_refused(key, tmp_path):
    file = write_tiny(tmp_path, TABLES)
    load(file, {"model.lora_rank": "2"})  # its updates are added
    with pytest.raises(ExperimentError, match="models that transformers has: remove the key"):
        check_export(tmp_path, load(file, key).model.config)


def test_the_byte_tokenizer_equals_its_file(tmp_path):
    for name, table in byte_tokenizer().items():
        (tmp_path / name).write_text(json.dumps(table))
    ours, theirs = open_tokenizer("bytes"), open_tokenizer(str(tmp_path))
    text = "".join(map(chr, range(1, 300))) + " \r\n\t\U0001f600"
    np.testing.assert_array_equal(ours.encode(text), theirs.encode(text))
    assert theirs.decode(np.arange(1, 128)) == ours.decode(np.arange(1, 128))
    assert theirs.decode(ours.encode(text)) == text
    assert (theirs.vocab_size, theirs.separator) == (ours.vocab_size, ours.separator)
