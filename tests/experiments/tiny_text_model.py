"""A tiny random model with a tokenizer of one token for each byte."""

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

import models

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> models.Tokenizer:
    """Ids 0 to 255 are bytes in some order; two more open and end a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return models.Tokenizer(core, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)


_load = models.load


def load_tiny_text_model(source="random:tiny", *, dtype=None, seed=0):
    """Stands in for ``models.load``."""
    loaded = _load("random:tiny", dtype=dtype, seed=seed)
    return models.LoadedModel(
        loaded.model, loaded.config, byte_tokenizer(), loaded.name, loaded.checkpoint
    )
