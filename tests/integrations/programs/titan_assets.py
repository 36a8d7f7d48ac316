"""Make a tokenizer and a corpus where torchtitan's debug model expects them: `titan_assets.py DIR`.

Both come from Python's own sources, which are present everywhere.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2000
FILES = 40


def main(folder: Path) -> None:
    """Write `tests/assets/tokenizer` and `tests/assets/c4_test` below a folder."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FILES]
    texts = [path.read_text(encoding="utf8", errors="replace") for path in sources]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assets = folder / "tests" / "assets"
    (assets / "tokenizer").mkdir(parents=True)
    (assets / "c4_test").mkdir()
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    config = {"bos_token": special[0], "eos_token": special[1]}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (assets / "c4_test" / "data.json").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
