"""Text as rows of token ids, by any tokenizer that `transformers` opens: pip install '.[hf,chat]'

    python experiments/prepare/text_to_ids.py llama 'texts/*.jsonl' ids.parquet
    jdp train FILE.toml --data.source hf:parquet:ids.parquet --data.ids input_ids

Rows are of JSON, parquet or CSV files, with the text in the column "text" (or a fourth argument); a .txt file is one
row. The tokenizer adds its own special tokens, and a row ends with its eos_token.
"""

import sys
from pathlib import Path

import datasets
import transformers

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def main(tokenizer: str, source: str, target: str, column: str = "text") -> None:
    """Write `target`, a parquet file with the column input_ids."""
    made_by = transformers.AutoTokenizer.from_pretrained(tokenizer)
    builder = BUILDERS.get(Path(source).suffix)
    if builder is None or made_by.eos_token_id is None:
        sys.exit(f"{source} must end with one of {', '.join(BUILDERS)}, and {tokenizer} must have an eos_token")
    documents = {"sample_by": "document"} if builder == "text" else {}
    rows = datasets.load_dataset(builder, data_files=source, split="train", **documents)
    if column not in rows.column_names:
        sys.exit(f'there is no column "{column}" in {source}, which has {", ".join(rows.column_names)}: name one')

    def ids_of(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        end, found = made_by.eos_token_id, made_by([text for text in batch[column] if text])["input_ids"]
        return {"input_ids": [ids if ids[-1:] == [end] else [*ids, end] for ids in found]}

    rows.map(ids_of, batched=True, remove_columns=rows.column_names).to_parquet(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
