"""The guides tell the truth: `jdp/**/*.md`, each package's `README.md` and the pages beside it.

What a page may hold, and how it is checked:

- ```python runs, with the names of the blocks before it on the page. A ```text block right after it is what it prints
  (`...` stands for any text). `<!-- setup: name -->` before a block adds the names that the fixture `name` returns.
- ```bash and ```console name commands, options, keys and files that exist, those of a `setup` included; in ```console
  lines with `$ ` are commands.
- ```toml has keys of an experiment file, or is a target (`like = ...`).
- A table whose first heading is "message" quotes messages of jdp: `…` stands for a value.
- All pages have at most 18,000 words, code and tables included. Sentences are short and words plain, as in docstrings.
"""

import ast
import dataclasses
import doctest
import functools
import importlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from parsed_modules import MODULES, ORDER
from paths import EXPERIMENTS, ROOT
from test_docstrings import private_words, too_long

from jdp.cli.main import COMMANDS
from jdp.cli.options import flags_of, parse, split_overrides
from jdp.cli.programs import is_program
from jdp.experiment.file import describe, load

GUIDES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("jdp/**/*.md"))}
INDEX = "jdp/README.md"
MOST_WORDS = 18_000
LANGUAGES = ("python", "bash", "console", "toml", "text", "yaml", "diff", "")
FENCE = re.compile(r"^(?:<!-- setup: ([\w, ]+) -->\n+)?```([^\n]*)\n(.*?)^```$", flags=re.S | re.M)
COMMENT = re.compile(r"<!--.*?-->", flags=re.S)
PROGRAMS = ("cd", "docker", "dmesg", "git", "kubectl", "mkdir", "mpirun", "printf", "pytest", "sbatch", "scancel")
PROGRAMS += ("srun", "tail", "export", "source", ".", "apt-get", "mkdocs", "ls", "cp", "rm", "nvidia-smi", "squeue")
PROGRAMS += ("lm_eval",)
VIRTUAL = 'jax.config.update("jax_num_cpu_devices", 8)'
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

DEFAULT = [f"jdp/{name}/*" for name in ("data", "foresight", "guard", "run", "cli", "launch", "experiment", "report")]
DEFAULT += ["jdp/README.md", "jdp/core/README.md", "jdp/core/m*", "jdp/checkpoint/[mi]*", "jdp/outside.md"]
"""Pages whose Python the default tests run."""

every_guide = pytest.mark.parametrize("guide", GUIDES)


@dataclasses.dataclass(frozen=True)
class Block:
    setup: tuple[str, ...]
    language: str
    text: str
    line: int  # its first, from 1
    follows: bool  # nothing but blank lines between the block before and this one


def blocks(text):
    """Return the fenced blocks of a page, in order."""
    found, end = [], 0
    for match in FENCE.finditer(text):
        setup = tuple(re.findall(r"\w+", match[1] or ""))
        line = text.count("\n", 0, match.start(3)) + 1
        follows = bool(found) and not text[end : match.start()].strip()
        found.append(Block(setup, match[2], match[3], line, follows))
        end = match.end()
    return found


def without_code(text):
    return COMMENT.sub("", FENCE.sub("\n", text))


def prose(text):
    """Return a page's text without code, tables and comments; a link is its words, an item of a list a paragraph."""
    lines = [line for line in without_code(text).splitlines() if not line.startswith("|")]
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))
    return re.sub(r"^ *(?:[-*]|\d+\.) ", "\n", plain, flags=re.M)


def rows(text):
    """Return the rows of a page's tables, each a list of cells; headings and lines of dashes too."""
    found = [line for line in without_code(text).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in found]


def test_guides_are_short():
    """All pages together, because a page may be as long as its subject needs."""
    assert sum(len(text.split()) for text in GUIDES.values()) <= MOST_WORDS


@every_guide
def test_a_page_is_plain(guide):
    text = GUIDES[guide]
    cells = [cell for row in rows(text) for cell in row]
    assert too_long([re.sub(r"^#.*$", "", prose(text), flags=re.M), *cells]) == []
    assert private_words([re.sub(r"`[^`]*`", "code", without_code(text))]) == []
    assert {block.language.partition(" ")[0] for block in blocks(text)} <= {*LANGUAGES}


@every_guide
@pytest.mark.default_ids(*DEFAULT)
def test_its_python_runs(guide, request, capsys, monkeypatch, tmp_path):
    """As it stands, in an empty folder with a link to `experiments`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(EXPERIMENTS)
    names, found = {}, blocks(GUIDES[guide])
    for number, block in enumerate(found):
        for setup in block.setup:
            names |= request.getfixturevalue(setup)
        if block.language != "python":
            continue
        capsys.readouterr()
        text = block.text.replace(VIRTUAL, "assert jax.device_count() == 8")  # here they have started
        code = "\n" * (block.line - 1) + text  # so that errors name the line of the page
        exec(compile(code, str(ROOT / guide), "exec"), names)
        following = found[number + 1] if found[number + 1 :] else None
        if following and following.language == "text" and following.follows:
            printed = re.sub(r" +$", "", capsys.readouterr().out, flags=re.M)
            shown = doctest.OutputChecker().check_output(following.text, printed, doctest.ELLIPSIS)
            assert shown, f"the page says that this is printed:\n{following.text}\nand this is:\n{printed}"


def commands(block):
    """Return the commands of a block, each a list of words; assignments before a command are left out."""
    lines = re.sub(r"\\\n", " ", block.text).splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found = []
    for line in lines:
        words = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        words.whitespace_split = True
        command = []
        for word in words:
            if set(word) <= set(";&|<>"):
                found.append(command)
                command = ["cat"] if set(word) <= set("<>") else []  # a file follows, no command
            elif command or not re.match(r"\w+=", word):
                command.append(word)
        found.append(command)
    return [command for command in found if command and command[0] != "cat"]


def check_command(words):
    """Fail for a command that does not exist; wrappers such as `srun` run what comes after them."""
    program, *arguments = words
    if program in ("srun", "mpirun"):
        inner = [at for at, word in enumerate(words) if word in ("jdp", "python")]
        return check_command(words[inner[0] :]) if inner else None
    if program == "jdp":
        return check_jdp(arguments)
    if program == "python":
        if arguments[:2] == ["-m", "jdp"]:
            return check_jdp(arguments[2:])
        files = [word for word in arguments if "/" in word and word.endswith(".py")]
        return [exists(file) for file in files]
    if program == "pip":
        extras = re.findall(r"\[([\w,]+)\]", " ".join(arguments))
        assert {extra for group in extras for extra in group.split(",")} <= EXTRAS.keys()
        return None
    assert program in PROGRAMS, f"{program}: a program that tests/docs/test_guides.py does not know"
    return None


def exists(path):
    assert Path(path).exists() or (ROOT / path).exists(), path


def check_jdp(words):
    """Fail for what `jdp` would refuse before it does anything: command, options, values, keys of the experiment."""
    name, *arguments = [str(EXPERIMENTS / "quickstart.toml") if word == "FILE" else word for word in words]
    if name in ("--help", "--version"):
        return
    assert name in COMMANDS, f"jdp {name}"
    arguments = [word for word in arguments if word not in ("...", "…")]
    if "--" in arguments:
        after = arguments[arguments.index("--") + 1 :]
        arguments = arguments[: arguments.index("--")]
        check_command(["jdp", "train", *after] if after[0].endswith(".toml") else ["python", *after])
    if {"--help", "--help-all"} & {*arguments}:
        return
    options = importlib.import_module(f"jdp.cli.{name}").Options
    takes_keys = "file" in {field.name for field in dataclasses.fields(options)}
    own, overrides = split_overrides(arguments, flags_of(options)) if takes_keys else (arguments, {})
    parsed = parse(options, name, own)  # exits for an option that is not there
    if takes_keys and parsed.file and is_program(parsed.file):
        file, _, function = str(parsed.file).rpartition(":")
        text = next(path.read_text() for path in (Path(file), ROOT / file) if path.exists())
        assert f"\ndef {function}(" in text and overrides == {}
    elif takes_keys and parsed.file:
        exists(parsed.file)
        if "plugin" in overrides or overrides.get("model.name", "").startswith("hf:"):  # what they name is not here
            assert [key for key in overrides if not is_key(key)] == []
        else:
            load(ROOT / parsed.file, overrides)


@functools.cache
def experiment_keys():
    """Return a pattern for each key of an experiment file: `mesh.AXIS` is any axis."""
    keys = (key.name for _, table in describe() for key in table)
    return [re.compile(re.sub(r"\b[A-Z]+\b", r"[^.]+", re.escape(key)) + r"(?:\.[^.]+)?") for key in keys]


def is_key(name):
    return any(pattern.fullmatch(name) for pattern in experiment_keys())


def flattened(table, prefix=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key.replace(".", "_")


@every_guide
def test_its_commands_options_and_keys_exist(guide, request, monkeypatch, tmp_path):
    """A `setup` makes the files that commands name: they are looked for in its folder, then in the repository."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(GUIDES[guide]):
        for setup in block.setup:
            request.getfixturevalue(setup)
        if block.language in ("bash", "console"):
            for command in commands(block):
                check_command(command)
        elif block.language == "toml":
            table = tomllib.loads(block.text)
            unknown = [key for key in flattened(table) if not is_key(key)]
            assert "like" in table or unknown == []


@every_guide
def test_files_that_it_names_exist(guide):
    """Its links are checked where the site is built (`test_site.py`)."""
    for path in re.findall(r"`((?:tests|experiments|jdp)/[\w/.]+)`", FENCE.sub("", GUIDES[guide])):
        exists(path)


def templates():
    """Return every text in jdp's code, with `…` for a value."""
    found = []
    for module in MODULES.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(" ".join(text.split()) for text in found)


def quoted_messages(text):
    """Return the messages in tables whose first heading is "message"."""
    found, heading = [], None
    for line in without_code(text).splitlines():
        if not line.startswith("|"):
            heading = None
            continue
        first = rows(line)[0][0]
        heading = heading or first
        if heading == "message" and re.fullmatch(r"`.*`", first):
            found.append(first[1:-1])
    return found


def test_messages_of_jdp_are_quoted_as_they_are():
    written, quoted = templates(), [message for text in GUIDES.values() for message in quoted_messages(text)]
    assert len(quoted) > 10
    for message in quoted:
        assert re.search(".*".join(map(re.escape, message.split("…"))), written), message


def test_the_index_leads_to_every_page():
    """Itself, or by the guide of the page's folder."""
    for guide in map(Path, GUIDES):
        of_folder = guide.parent / "README.md"
        by = INDEX if guide == of_folder else str(of_folder)
        found = [f"]({guide.relative_to(Path(page).parent)})" in GUIDES.get(page, "") for page in {by, INDEX}]
        assert str(guide) == INDEX or any(found), guide


def test_the_map_has_the_packages_in_order():
    """Contributors' map: a row's text is the first line of the package's docstring."""
    page = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = {row[0].strip("`/"): row[-1] for row in rows(page) if re.fullmatch(r"`\w+/`", row[0])}
    assert [*table] == [*ORDER]
    assert table == {name: ast.get_docstring(MODULES[f"jdp.{name}"].tree).partition("\n")[0] for name in ORDER}


def test_every_loop_has_a_row():
    """Those that train: `story.py` and what reads files are parts of the others."""
    loops = [file.name for file in ROOT.glob("experiments/loops/*.py") if "def train(" in file.read_text("utf-8")]
    listed = re.findall(r"experiments/loops/(\w+\.py)\) \|", GUIDES["jdp/core/own_loop.md"])
    assert sorted(listed) == sorted(loops)
