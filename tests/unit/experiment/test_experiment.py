"""An experiment file means exactly one thing, or is refused with one clear message that lists every problem."""

import dataclasses

import pytest
from pydantic import BaseModel
from tiny_experiment import SMALL

from jdp.base.errors import UserError
from jdp.core.sharding.strategy import STRATEGIES
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError, check_for_devices, describe, from_table, load, to_toml
from jdp.models import GPTConfig
from jdp.models.configs import SIZES


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def experiment(**tables):
    base: dict[str, object] = {
        "name": "x",
        "model": {"name": "gpt-nano"},
        "data": {"length": 32},
        "train": {"steps": 50, "batch_size": 16},
    }
    for key, value in tables.items():
        old = base.get(key)
        base[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return from_table(base)


def refusal(path, **overrides):
    with pytest.raises(ExperimentError) as caught:
        load(path, {key.replace("__", "."): value for key, value in overrides.items()})
    return str(caught.value)


def in_model(text):
    return SMALL.replace("[data]", f"{text}\n[data]")


def in_data(text):
    return SMALL.replace("[train]", f"{text}\n[train]")


def pictures(model, data):
    return SMALL.replace("gpt-nano", model).replace("length = 32", data)


WRONG_FILES = [
    ('stratgy = "ddp"\n' + SMALL, "stratgy is not a key of the top level; did you mean strategy?"),
    (in_model("widht = 64"), "model.widht is not a key of [model]; did you mean model.width?"),
    ("lr = 1.0\n" + SMALL, "lr is not a key of the top level; did you mean optimizer.lr?"),
    ('strategy = "fsdp"\n' + SMALL, 'zero3; given "fsdp"; here that is zero3'),
    (SMALL.replace("gpt-nano", "gpt-nanu"), 'given "gpt-nanu"; did you mean gpt-nano?'),
    (SMALL.replace("= 50", '= "50"'), 'a whole number; given "50", which is text: write steps = 50, without quotes'),
    ("seed = true\n" + SMALL, "seed must be a whole number; given true"),
    (SMALL.replace("= 16", "= 16.0"), "given 16.0: write batch_size = 16"),
    (in_data('shuffle = "False"'), 'must be true or false; given "False", which is text: write shuffle = false'),
    (in_model("scan = 3"), 'model.scan must be true, false, or "auto", which leaves it to jdp; given 3'),
    (SMALL + "[optimizer]\nlr = inf", "optimizer.lr: it should be a finite number; given inf"),
    (SMALL.replace("= 50", "= 0"), "train.steps must be 1 or more; given 0"),
    (SMALL + "[optimizer]\nlr = 0.0", "optimizer.lr must be more than 0.0; given 0.0"),
    (SMALL.replace('"small"', '".."'), "because it names the run's folder; given"),
    (SMALL.replace("steps = 50\n", ""), "train.steps is missing: add steps = … to [train]"),
    (SMALL.split("[train]")[0], "add the table [train] with steps = … and batch_size = …"),
    (SMALL.replace('[model]\nname = "gpt-nano"\n', ""), "model is missing: add the table [model] with name = …"),
    (SMALL.replace('name = "gpt-nano"', "widht = 3"), "model.name is missing: add name = …"),
    ("train = 3\n" + SMALL.split("[train]")[0], "train must be a table; given 3"),
    (SMALL + "[mesh]\ndata = 0", "mesh: Mesh axes are positive sizes, and one may be -1 (the rest); given data=0"),
    (in_model("width = 63"), "model: heads must divide width; given"),
    (SMALL.replace('"gpt-nano"', '"mlp"\nhidden = [4, "5"]'), 'model.hidden[1] must be a whole number; given "5"'),
    (SMALL + "wrt = [3]", 'train.wrt must be a path pattern, such as "*/lora_*"'),
    (in_data("source = 3"), 'data.source must be "stdlib", a path or glob'),
    (SMALL.replace("= 32", "= 1000"), "data.length = 1000 must be at most model.context = 256"),
    (SMALL + "[optimizer]\nwarmup_steps = 51", "warmup_steps = 51 must be at most train.steps = 50"),
    (SMALL + '[rules]\n"*" = "model"', "an array with a mesh axis for each dimension"),
    (SMALL + 'keep_best = "eval_x_loss"\n[eval.y]\nsource = "a"', "'eval_x_loss' must be a metric of evaluations, "),
    (SMALL + "stop_after = 3", "train.stop_after = 3 counts evaluations during training: set train.eval_every"),
    (SMALL + 'eval_batches = "most"', 'train.eval_batches must be 1 or more, or "all"'),
    (SMALL + "[eval.'a b']\nsource = 'x'", "eval has a data set named 'a b': a name is letters"),
    (in_data('source = "a"\nmixture = {a = {source = "b"}}'), "data.source and [data.mixture.NAME] exclude each other"),
    (pictures("resnet-18", 'source = "stdlib"'), "'stdlib', and a ResNet or ViT learns images: write source"),
    (SMALL.replace("length = 32", 'source = "digits"'), "given 'digits', and a GPT learns text: write"),
    (SMALL + '[eval.a]\nsource = "digits"', "eval.a.source must fit model.name = 'gpt-nano'; given 'digits', and a "),
    (
        SMALL + 'eval_metrics = "bits_per_byte"\n[eval.a]\nsource = "a.npz"',
        "bits_per_byte needs text; eval.a.source is token ids: remove the metric",
    ),
    (SMALL + 'eval_metrics = ["bits_per_bite"]', "did you mean bits_per_byte?"),
    (SMALL + 'eval_metrics = ["top0_accuracy"]', "train.eval_metrics must be an array of"),
    (SMALL + 'eval_metrics = ["perplexity", "perplexity"]', "must name each metric once"),
    (SMALL + '[sample]\nprompt = ["a", ""]', "sample.prompt must be text of one character at least"),
    (in_data('ids = "a"') + "[sample]\nlength = 3", "[sample] is for a GPT and text with a known data.tokenizer"),
    (
        pictures("mlp", 'source = "digits"') + 'eval_metrics = "top257_accuracy"',
        '"top257_accuracy", but the model has 10 outputs: lower the number',
    ),
    (SMALL + 'eval_metrics = "top5_accuracy"', '"top5_accuracy", which is for classes, and model.name = '),
    (SMALL + '[rules]\n"*" = ["model"]', """rules."*" must name axes of [mesh] other than replica: data; given 'm"""),
    (SMALL + '[rules]\n"*" = [["replica"]]\n[mesh]\nreplica = 2', "data; given 'replica'"),
    (SMALL + "[mesh]\nmodel = 2", "mesh.model must be an axis of [rules], else its devices repeat each other's work; "),
    (SMALL + "[mesh]\ndat = 2", "given dat = 2: name it in a rule, or leave these devices to data; did you mean data?"),
    (pictures("vit-digits", 'length = 32\nsource = "digits"'), "data.length is for text, and model.name = 'vit-dig"),
    ('wire = "int8"\npartitioning = "auto"\n' + SMALL, 'wire is for partitioning = "manual", where jdp sends; given'),
    (in_data('label = "x"'), "data.label is for images and features, and model.name = 'gpt-nano' learns text; given"),
    (in_data('heldout = "x.npz"'), "data.heldout is for images and features, and model.name = 'gpt-nano' learns text"),
    (in_data('ids = "a"\nfield = "b"'), 'data.field is for text and arrays, not data.ids; given "b"'),
    (
        pictures("vit-digits", 'heldout = "x.npz"\nmixture = {a = {source = "digits"}}'),
        "data.heldout is for one source, not [data.mixture.NAME]; given",
    ),
    (pictures("mlp", 'mixture = {a = {source = "digits"}}'), "[data.mixture] is for text and images, and model.nam"),
    *(
        (pictures("mlp", f'source = "digits"\n{key} = "documents"'), f"data.{key} is for text, and model.name = 'mlp'")
        for key in ("ids", "weights", "labels", "attention_mask", "tokenizer", "packing")
    ),
    (
        pictures("mlp", 'source = "digits"') + 'eval_metrics = "perplexity"',
        "train.eval_metrics has \"perplexity\", which is for text, and model.name = 'mlp' learns features: remove it",
    ),
    (SMALL + '[loss]\nmetrics = ["margin"]', "loss.metrics is for loss.make; given"),
    (pictures("mlp", 'source = "digits"') + 'export = "hf"', 'train.export is for a GPT; given "hf": remove it'),
    (SMALL + 'export_dtype = "bf16"', 'train.export_dtype is for train.export; given "bf16"'),
    (pictures("vit-digits", 'source = "digits"\naugment = "flip"'), "data.augment must be one of crop, resized_crop"),
    (pictures("mlp", 'source = "digits"\naugment = "crop"'), "data.augment is for images, and model.name = 'mlp' le"),
    (SMALL + "[optimizer]\nfinal_lr_fraction = 0.1", "is for the schedules cosine and linear; given 0.1"),
    (SMALL + "x = = 3", "is not valid TOML: Invalid value (at line 10, column 5)"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG_FILES, ids=[expected for _, expected in WRONG_FILES])
def test_a_wrong_file_is_refused_in_one_line(tmp_path, text, expected):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    message = refusal(path)
    assert expected in message
    assert message.startswith(str(path)) and "\n" not in message
    assert not any(jargon in message for jargon in ("pydantic", "http", "Input", "Value error", "validation", "[type"))


WRONG_OVERRIDES = {
    "unknown key": ("train.stepz", "5", "--train.stepz is not a key of [train]; did you mean --train.steps?"),
    "unknown table": ("trian.steps", "5", "--trian is not a key of the top level; did you mean --train?"),
    "fraction": ("train.steps", "1.5", "--train.steps must be a whole number; given 1.5"),
    "word": ("strategy", "zero9", '--strategy must be one of ddp, zero1, zero2, zero3; given "zero9"; did you mean'),
    "the only word": ("offload", "params", '--offload must be optimizer, the only choice; given "params"'),
    "inside a number": ("seed.x", "1", "--seed must be a whole number; given {x = 1}"),
    "more than a value": ("train.steps", "1\nname = 'y'", "--train.steps must be a whole number; given"),
    "unknown builder": (
        "data.source",
        "hf:foo:a/b.x",
        'one of the builders json, parquet, csv, arrow, imagefolder, webdataset, as in "hf:json:a/b.x"',
    ),
    "none where it may not be": ("train.steps", "none", '--train.steps must be a whole number; given "none"'),
}


@pytest.mark.parametrize(("key", "text", "expected"), WRONG_OVERRIDES.values(), ids=WRONG_OVERRIDES)
def test_a_wrong_override_is_named_as_typed(file, key, text, expected):
    message = refusal(file, **{key: text})
    assert expected in message and "\n" not in message


def test_all_problems_are_listed_one_per_line(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text('strategy = "zero4"\nseed = true\n' + SMALL.replace("= 50", '= "50"') + "stepz = 1\n")
    header, *lines = refusal(path, train__log_every="x").splitlines()
    assert header == f"{path}: 5 problems"
    named = ["--train.log_every", "seed", "strategy", "train.steps", "train.stepz"]
    assert sorted(line.split()[0] for line in lines) == named


def test_an_unreadable_file_is_refused_with_nearby_files(file):
    folder = file.parent
    missing = refusal(folder / "smal.toml")
    assert missing == f"{folder / 'smal.toml'}: there is no such file; did you mean {file}?"
    assert "is a folder" in refusal(folder) and str(file) in refusal(folder)
    assert f"nor a folder {folder / 'none'}" in refusal(folder / "none" / "a.toml")
    (folder / "binary.toml").write_bytes(b"\xff\xfe")
    assert "is not text in UTF-8" in refusal(folder / "binary.toml")


def test_overrides_are_toml_values_or_text(file):
    overrides = {"name": "2024", "mesh.data": "-1", "mesh.replica": "2", "train.steps": "7", "optimizer.lr": "1"}
    overrides |= {"optimizer.clip_norm": "0.5", "model.width": "64", "data.shuffle": "false", "sample.prompt": "true"}
    changed = load(file, overrides)
    assert (changed.name, changed.train.steps, changed.data.shuffle) == ("2024", 7, False)
    assert changed.mesh == {"data": -1, "replica": 2}
    assert (changed.optimizer.lr, type(changed.optimizer.lr)) == (1.0, float)
    assert changed.optimizer.clip_norm == 0.5 and changed.model.config.width == 64
    assert changed.sample is not None and changed.sample.prompt == "true"
    assert changed.train.batch_size == 16, "what was not overridden stays"
    file.write_text(SMALL + "[optimizer]\nclip_norm = 1.0\n")
    assert load(file).optimizer.clip_norm == 1.0
    assert load(file, {"optimizer.clip_norm": "none"}).optimizer.clip_norm is None


def test_numbers_may_be_written_as_python_writes_them(file):
    for text, value in {".001": 0.001, "1.": 1.0, "1.e-3": 0.001, "+.5": 0.5, "5E-1": 0.5}.items():
        assert load(file, {"optimizer.lr": text}).optimizer.lr == value
    assert load(file, {"name": "1.", "sample.prompt": ".5"}).name == "1."
    assert load(file, {"sample.prompt": ".5"}).sample.prompt == ".5"
    with pytest.raises(ExperimentError, match=r"optimizer.lr must be a number; given \"1..\""):
        load(file, {"optimizer.lr": "1.."})


def test_a_word_is_not_replaced_by_a_key(file):
    """Not one that stands for an empty table; and a whole table replaces a word, as it says so."""
    one = {"compiler__xla_gpu_x": "true"}
    said = 'compiler.xla_gpu_x is a key of a table; given compiler = "overlap", which it would replace: remove one'
    assert said in refusal(file, compiler="overlap", **one)
    for word, expected in (("overlap", said), ("default", None)):
        file.write_text(f'compiler = "{word}"\n{SMALL}')
        assert load(file, {"compiler": "{ xla_gpu_x = true }"}).compiler == {"xla_gpu_x": True}
        if expected:
            assert expected in refusal(file, **one)
        else:
            assert load(file, {"compiler.xla_gpu_x": "true"}).compiler == {"xla_gpu_x": True}


def test_cudnn_attention_is_refused_without_gpus():
    cudnn = Assembly.on_devices(experiment(model={"attention": "cudnn"}))
    with pytest.raises(ExperimentError, match=r'model\.attention = "cudnn" runs on NVIDIA GPUs; given cpu devices'):
        _ = cudnn.training.config


TRICKY = {"prompt": 'quote " backslash \\ newline \n tab \t delete \x7f null \0 é ☃ 😀'}


@pytest.mark.parametrize("size", SIZES)
def test_to_toml_writes_keys_that_read_back_equal(tmp_path, size):
    written = experiment(
        model={"name": size, **({} if size.startswith("resnet") else {"dropout": 0.25})},
        mesh={"replica": 2, "data": -1},
        rules={"*/query/kernel": ["", "", "data"], 'a "b".c/*': [["data"]]},
        data={"source": ["/a/*.txt", '/b "c"\\d.txt'], "length": 0},
        eval={"wiki-2": {"source": "/w.txt"}, "own": {"source": ["/a", "/b"], "field": "body"}},
        train={"wrt": ["*/kernel", "*/bias"], "init_from": "/w.safetensors", "eval_batches": "all", "keep_best": True},
        optimizer={"lr": 1e-5, "schedule": "cosine", "final_lr_fraction": 1e-7},
        **({"sample": TRICKY} if isinstance(SIZES[size], GPTConfig) else {}),
    )
    path = tmp_path / "again.toml"
    path.write_text(to_toml(written), encoding="utf-8")
    again = load(path)
    assert again == written
    changed = {} if size.startswith("resnet") else {"dropout": 0.25}
    assert again.model.config == dataclasses.replace(SIZES[size], **changed)
    assert to_toml(again) == to_toml(written)
    for key in leaf_keys(written):
        assert f"\n{key} = " in f"\n{to_toml(written)}", key


def leaf_keys(model):
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from leaf_keys(value)
        elif not isinstance(value, dict) and not (name == "sample" and value is None):
            yield name


def test_the_length_left_out_is_the_models_context():
    assert experiment(data={"length": 0}).data.length == 256
    assert experiment(data={"length": 0}, model={"context": 64}).data.length == 64


def meshed(**mesh):
    return experiment(mesh=mesh, rules={"*": ["model"]} if "model" in mesh else {})


def test_the_data_axis_is_outside_the_models_axes():
    assert experiment().mesh == {"data": -1}
    assert list(meshed(model=2).mesh.items()) == [("data", -1), ("model", 2)]
    assert list(meshed(replica=2, model=2).mesh.items()) == [("replica", 2), ("data", -1), ("model", 2)]
    assert meshed(model=-1).mesh == {"data": 1, "model": -1}
    assert list(meshed(model=2, data=4).mesh) == ["model", "data"], "written by hand: kept"
    assert experiment(mesh={"data": 4, "model": 1}).mesh == {"data": 4, "model": 1}, "and one device needs no rule"


def test_paths_start_at_file_or_working_directory(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "small.toml"
    path.write_text(in_data('source = ["a.txt", "/b.txt"]'))
    assert load(path).data.source == (str(tmp_path / "a.txt"), "/b.txt")
    assert load("../small.toml").data.source[1] == "/b.txt"
    path.write_text(in_data('source = ["bytes", "stdlib"]\ntokenizer = "digits"'))
    words = load(path).data
    assert (words.source, words.tokenizer) == ((str(tmp_path / "bytes"), "stdlib"), str(tmp_path / "digits"))
    here = {name: str(tmp_path / "here" / name) for name in ("a.txt", "2024")}
    hub = {"hf:owner/name": "hf:owner/name", "hf:./name": f"hf:{tmp_path / 'here' / 'name'}"}
    for given, found in (here | hub | {"stdlib": "stdlib"}).items():
        assert load(path, {"data.source": given}).data.source == found
    path.write_text(
        SMALL.replace("[train]", 'tokenizer = "t.json"\nmixture.a.source = ["a"]\n[train]\ninit_from = "runs/b"')
        + '[eval.wiki]\nsource = "w.txt"\n'
    )
    changed = load(path, {"eval.own.source": "o.txt"})
    assert changed.data.tokenizer == str(tmp_path / "t.json")
    assert changed.data.mixture["a"].source == (str(tmp_path / "a"),)
    assert changed.train.init_from == str(tmp_path / "runs" / "b")
    assert changed.eval["wiki"].source == str(tmp_path / "w.txt")
    assert changed.eval["own"].source == str(tmp_path / "here" / "o.txt")


def test_a_mesh_must_fit_the_devices():
    assert check_for_devices(experiment(), 8) == {"data": 8}
    assert check_for_devices(meshed(replica=2, model=2), 8) == {"replica": 2, "data": 2, "model": 2}
    of_model = experiment(mesh={"model": 8}, rules={"*": ["model"]}, train={"batch_size": 3})
    assert check_for_devices(of_model, 8)["data"] == 1
    with pytest.raises(ExperimentError, match=r"\[mesh\]: The mesh must multiply to .*of devices: data=4 × model=2"):
        check_for_devices(meshed(data=4, model=2), 6)
    with pytest.raises(UserError, match="given 3: the nearest that fit: 8"):
        check_for_devices(experiment(train={"batch_size": 3, "accumulate": 2}), 4)


def test_describe_lists_every_key():
    keys = {key.name: key for _, group in describe() for key in group}
    for table in ("data", "loss", "optimizer", "train", "guard", "sample"):
        fields = type(getattr(experiment(sample={}), table)).model_fields
        assert {f"{table}.{field}" for field in fields} - {"data.mixture"} <= keys.keys()
    named = {"mesh.AXIS", "rules.PATTERN", "eval.NAME.field", "data.mixture.NAME.weight", "model.learns"}
    assert named <= keys.keys()
    for size in SIZES.values():
        assert {f"model.{field.name}" for field in dataclasses.fields(size)} <= set(keys)
    assert all(key.description and key.type and key.default for key in keys.values())
    assert keys["train.steps"].default == "required" and keys["train.steps"].type == "int >= 1"
    assert keys["strategy"].type == "|".join(STRATEGIES) and keys["strategy"].default == '"ddp"'
    assert keys["optimizer.clip_norm"].type == "float > 0|none"
    assert keys["optimizer.b1"].description == "Decay of the first moment. For adamw, adam, lion, muon."
