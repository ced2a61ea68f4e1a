"""Small tokenizers of the kinds that model families have, and strings to try them on."""

import random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from palestra.models.chat.prompts import prepare

CORPUS = [
    "the red lamp costs twelve euros and the blue one costs nine",
    "how much are three green mugs and two white chairs together?",
    "She said: it's not here, we'll look again; they've moved it (twice).",
    "def add(a, b):\n    return a + b  # 42 lines, 1234 words",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "ça coûte 15,50 € — très cher! naïve café, señor, où est-ce?",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Look up the price of one item.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    },
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does a red lamp cost, and what is 1 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": "price", "arguments": {"item": "red lamp"}}},
            {"id": "call00002", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
        ],
    },
    {"role": "tool", "content": "12", "tool_call_id": "call00001"},
    {"role": "tool", "content": "3", "tool_call_id": "call00002"},
    {"role": "assistant", "content": "12 and 3."},
    {"role": "user", "content": "Thanks!"},
]
MARKS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": ("[INST]", "[/INST]"),
    "phi3": ("<|assistant|>", "<|end|>"),
}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def make_byte_level(
    regex: str | None = QWEN2,
    *,
    digits: bool = False,
    ignore_merges: bool = False,
    bos: bool = False,
    marks: tuple[str, str] = ("<|im_start|>", "<|im_end|>"),
) -> Any:
    """A byte-level BPE tokenizer, trained on the corpus, with a family's marks of turns; no regex is GPT-2's own."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps: list[Any] = [pre_tokenizers.Split(Regex(regex), "isolated")] if regex else []
    steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<|endoftext|>", *marks, "<s>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=480, special_tokens=special, initial_alphabet=alphabet)
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=marks[1],
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )


def make_for_family(family: str) -> Any:
    """A tokenizer that is known as the family's by its marks, with the template that training would give it."""
    tokenizer = make_byte_level(marks=MARKS[family])
    tokenizer.chat_template = None
    prepare(tokenizer)
    return tokenizer


def make_sentencepiece(*, space_prefix: bool = True, phi: bool = False) -> Any:
    """A BPE tokenizer as SentencePiece's become in transformers: blanks as ▁, bytes as a fallback, every merge."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        [word for line in CORPUS * 3 for word in line.split()], trainers.BpeTrainer(vocab_size=200)
    )
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    words = [f"▁{word}" for word in ("the", "lamp", "red", "costs", "and", "is")]
    starts = [word[:end] for word in words for end in range(1, len(word) + 1)]
    special = ["<unk>", "<s>", "<|endoftext|>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + list(dict.fromkeys(pieces + starts + ["▁▁"]))
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for token in tokens[len(special) + 256 :]
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    strips = {text: phi and i > 2 for i, text in enumerate(special)}  # Phi-3's swallow the white space behind them
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, rstrip=strip) for text, strip in strips.items()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )


def unicode_strings(count: int, seed: int = 0) -> list[str]:
    """Random strings: words, digits, blanks, punctuation and code points of every plane that has letters."""
    draw = random.Random(seed)
    ranges = [(0x20, 0x7F), (0xA1, 0x250), (0x370, 0x530), (0x5D0, 0x6FF), (0x900, 0xDFF), (0x3041, 0x30FF)]
    ranges += [(0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x2000, 0x2BFF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF)]

    def piece() -> str:
        match draw.randrange(5):
            case 0:
                return draw.choice(" ".join(CORPUS).split())
            case 1:
                return str(draw.randrange(10 ** draw.randrange(1, 8)))
            case 2:
                return draw.choice([" ", "  ", "\n", "\n\n", "\t", " \n ", "'s", "'LL", "...", '{"', '": "', "}}"])
            case 3:
                return "".join(chr(draw.randrange(0x20, 0x7F)) for _ in range(draw.randrange(1, 6)))
        low, high = draw.choice(ranges)
        return "".join(chr(draw.randrange(low, high)) for _ in range(draw.randrange(1, 5)))

    return ["".join(piece() for _ in range(draw.randrange(1, 12))) for _ in range(count)]
