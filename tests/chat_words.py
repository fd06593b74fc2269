"""A chat of ten words, small enough to write its tokens by hand."""

import json

WORDS = ["<s>", "<u>", "<a>", "<e>", "hi", "there", "bye", "why", "so", "?"]
ID = {word: number for number, word in enumerate(WORDS)}
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ '<a>' if m.role == 'assistant' else '<u>' }}{{ m.content }}<e>\n"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}<e>"
    "{% endgeneration %}{% else %}<u>{{ m.content }}<e>{% endif %}\n{% endfor %}"
)


def said(role, content):
    return {"role": role, "content": content}


HI = [said("user", "hi"), said("assistant", "there bye")]
LONG = [said("user", "so"), said("assistant", "there"), said("user", "why why"), said("assistant", "bye")]
"""As `PLAIN` writes them:  <s> <u> hi <e> <a> there bye <e>  and
<s> <u> so <e> <a> there <e> <u> why why <e> <a> bye <e>: line breaks are no tokens here."""


def write_words(path):
    """Write a tokenizer of ten words, with `PLAIN` in its tokenizer_config.json, and return its folder."""
    import tokenizers  # late: every test run reads this file

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ID, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(WORDS[:4])
    path.mkdir()
    words.save(str(path / "tokenizer.json"))
    write_template(path, PLAIN)
    return path


def write_template(folder, template):
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "<e>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def marked(text):
    """Return "<s> hi* <e>*" as tokens, each with whether it has a star."""
    return [(word.rstrip("*"), word.endswith("*")) for word in text.split()]
