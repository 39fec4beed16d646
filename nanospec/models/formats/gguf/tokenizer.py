"""Build the tokenizer that the metadata of a GGUF file describes."""

from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ....text.validation import shown
from .file import Fields

# Pre-tokenizers by the value of `tokenizer.ggml.pre`; they split text before byte-pair merging.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "smollm": pre_tokenizers.Digits(individual_digits=True),
    "qwen2": pre_tokenizers.Split(tokenizers.Regex(rf"{WORDS}|\p{{N}}|{OTHERS}"), "isolated"),
    "llama-bpe": pre_tokenizers.Split(tokenizers.Regex(rf"{WORDS}|\p{{N}}{{1,3}}|{OTHERS}"), "isolated"),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # `tokenizer.ggml.token_type`
LONGEST = 1000  # characters before the last merge of a token, to bound the time for corrupt files
# A GGUF file names a single end token; as in llama.cpp, control tokens with these names also end a text.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")


def token_id(fields: Fields, name: str) -> int | None:
    """Return the id of the special token `name`, such as "bos"."""
    return fields.get(f"tokenizer.ggml.{name}_token_id")


def vocabulary(fields: Fields) -> list[tuple[str, int]]:
    """Return (token, type) for each id."""
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    return list(zip(tokens, types, strict=True))


def end_ids(fields: Fields) -> list[int]:
    """Return the ids of end-of-sequence tokens, starting with the one that the file declares."""
    ids = {token: i for i, (token, kind) in enumerate(vocabulary(fields)) if kind == CONTROL}
    ends = [*(token_id(fields, name) for name in ("eos", "eot", "eom")), *map(ids.get, END_TOKENS)]
    return list(dict.fromkeys(i for i in ends if i is not None))


def build_tokenizer(fields: Fields) -> tokenizers.Tokenizer:
    """Build the tokenizer described by the metadata, byte-level BPE or SentencePiece BPE."""
    kind, pre = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "default")
    if kind != "llama" and (kind != "gpt2" or pre not in PRE_TOKENIZERS):
        raise ValueError(
            f"tokenizer {shown(kind)} with pre-tokenizer {shown(pre)} is not supported; available: 'llama' "
            f"(SentencePiece BPE), 'gpt2' (byte-level BPE) with {', '.join(PRE_TOKENIZERS)}."
        )
    tokens = vocabulary(fields)
    vocab = {token: i for i, (token, kind) in enumerate(tokens) if kind != UNUSED}
    tokenizer = sentencepiece(fields, vocab) if kind == "llama" else byte_level(fields, vocab, pre)
    bos_id, starts = token_id(fields, "bos"), kind == "llama" or pre == "llama-bpe"
    if bos_id is not None and fields.get("tokenizer.ggml.add_bos_token", starts):
        bos = tokens[bos_id][0]
        begins = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
        tokenizer.post_processor = begins
    # Added tokens are already in `vocab`, so they keep their ids.
    for token, kind in tokens:
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            special = kind != USER_DEFINED
            tokenizer.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False)])
    return tokenizer


def byte_level(fields: Fields, vocab: dict[str, int], pre: str) -> tokenizers.Tokenizer:
    """Return a tokenizer as in GPT-2, which merges UTF-8 bytes."""
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([PRE_TOKENIZERS[pre], to_bytes])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(fields: Fields, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    """Return a tokenizer as in Llama 2, which merges characters, and the bytes of those without a token. Two
    tokens merge if their concatenation is a token; the one with the highest score is formed first."""
    scores, space = fields["tokenizer.ggml.scores"], "\u2581"
    unknown = fields["tokenizer.ggml.tokens"][token_id(fields, "unknown") or 0]
    merges = sorted(
        (-scores[i], token[:at], token[at:])
        for token, i in vocab.items()
        for at in range(1, min(len(token), LONGEST))
        if token[:at] in vocab and token[at:] in vocab
    )
    pairs, fallback = [merge[1:] for merge in merges], {"byte_fallback": True, "fuse_unk": True}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, pairs, unk_token=unknown, **fallback))
    begin = bool(fields.get("tokenizer.ggml.add_space_prefix", True))  # adds a space before a text
    prefix = [normalizers.Prepend(space)] * begin
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", space)])
    steps = decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", begin, 0)])
    return tokenizer


def tokenizer_config(fields: Fields) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`."""
    tokens = fields["tokenizer.ggml.tokens"]
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {f"{name}_token": token_id(fields, key) for name, key in special.items()}
    named = {name: tokens[i] for name, i in ids.items() if i is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {**config, "model_max_length": fields.hparam("context_length"), **named}
