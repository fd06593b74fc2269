"""Chats as rows of token ids and weights, by the tokenizer's own template: pip install '.[hf,chat]'

    python experiments/prepare/chats_to_ids.py llama 'chats/*.jsonl' chats.parquet
    jdp train experiments/sft_chat.toml --data.source hf:parquet:chats.parquet

A row of JSON or parquet has "messages", each {"role", "content"}, and may have "tools". The assistant's tokens have
weight 1: the tokens in {% generation %}; or, if the template has no such block, the tokens that follow the earlier
messages and the generation prompt. An answer with "weight": 0 or "train": false has weight 0.
"""

import sys

import datasets
import transformers


def row_of(tokenizer, row):
    """Return the ids and weights of a conversation."""
    messages = [{key: value for key, value in each.items() if value is not None} for each in row["messages"]]
    said = [{key: value for key, value in each.items() if key not in ("weight", "train")} for each in messages]

    def made(end, **options):
        options |= {"tools": row.get("tools") or None, "return_dict": True}
        return tokenizer.apply_chat_template(said[:end], **options)

    is_marked = "generation %}" in tokenizer.get_chat_template()
    whole = made(len(said), return_assistant_tokens_mask=is_marked)
    ids = whole["input_ids"]
    weights = list(whole["assistant_masks"]) if is_marked else [0] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = made(number, add_generation_prompt=True)["input_ids"], made(number + 1)["input_ids"]
            if ids[: len(start)] != start or ids[: len(end)] != end:
                sys.exit(f"the template writes this otherwise where more follows: mark answers in it; {message}")
            counts = message.get("weight", 1) and message.get("train", True)
            for at in range(len(start), len(end)):
                weights[at] = int(bool(counts and (weights[at] or not is_marked)))
    return {"input_ids": ids, "loss_mask": weights}


if __name__ == "__main__":
    name, source, target = sys.argv[1:]
    rows = datasets.load_dataset("parquet" if source.endswith(".parquet") else "json", data_files=source, split="train")
    if "messages" not in rows.column_names:
        sys.exit(f'{source} must have a column "messages"; given {", ".join(rows.column_names)}: rename it')
    if others := set(rows.column_names) - {"messages", "tools"}:
        print(f"{source}: {', '.join(sorted(others))} not used", file=sys.stderr)
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    rows.map(lambda row: row_of(tokenizer, row), remove_columns=rows.column_names).to_parquet(target)
