"""The tokenizer of palestra/tiny: byte-level BPE, digits one by one, JSON scaffold in few tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = (
    "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
).split()

# The scaffold of a tool call comes first, so that its parts can become single tokens: a call then costs
# about a dozen tokens, and is spelled exactly like the tool's line in the system message. A space is a token
# of its own, so that a word has the same tokens in a sentence and in an argument and can be copied as it is.
PIECES = (
    r"""\n?\{"name": "|", "arguments": \{\}\}\n?|", "arguments": \{"|": "?|"?\}\}\n?|"?, "|"""
    r"""\d|\p{L}+|[^\s\p{L}\d]+|\s+"""
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, template: str) -> PreTrainedTokenizerFast:
    """A tokenizer made from these texts, with the chat template in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), behavior="isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = template
    return fast
