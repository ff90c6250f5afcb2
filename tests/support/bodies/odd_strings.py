"""Strings that tokenizers disagree on, drawn by a seed."""

from __future__ import annotations

import random

WORDS = (
    *("the", "The", "tokens", "HTTPServer", "it's", "I'LL", "naïve", "straße", "Łódź"),
    *("e\u0301te\u0301", "x" * 37, "ab" * 9),
)
SCRIPTS = (
    *("中文字符", "日本語です", "한국어", "Привет", "שלום", "مرحبا", "नमस्ते", "สวัสดี", "ქართული"),
    *("𐍈𐌰", "ﬁ", "Ⅷ", "ǅ"),
)
SPACES = (" ", "  ", "   ", " " * 7, " " * 16, "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r", "\v", "\f", "\x85")
MORE_SPACES = ("\u00a0", "\u2003", "\u3000", "\u200b", "\u2028", "\ufeff", "\u202e", "\u200d")
EMOJI = ("🦜", "🦜🦜", "👩‍👩‍👧‍👦", "🇵🇱", "👍🏽", "❤️", "1️⃣")
MARKS = ("\u0301", "\u0301\u0323\u0308", "\u0e31", "\u064b", "\ufe0f", "a\u0315\u0300")
NUMBERS = ("0", "12", "1984", "3.1415", "1,000,000", "٣٤٥", "½", "²", "1e-9", "0x1F")
SIGNS = (
    *("!", "?!", "...", "—", "=>", "/*", "*/", "//", "\\", "'", '"', "“", "$", "€"),
    *("~~~", "()", "{}[]", "#", "@", "'s"),
)
CONTROL = ("\0", "\x01", "\x1b[0m", "\x7f", "\u0080", "\ue000", "\uffff", "\U0010ffff", "\U000e0041")
LOOK_ALIKES = (
    *("<s>", "</s>", "<unk>", "<pad>", "<|im_end|>", "<|im_start|>", "[INST]", "[/INST]", "<end_of_turn>", "<tag>"),
    *("<0x41>", "<0xE2>", "▁", "▁▁", "▁the", "Ġthe", "Ċ", "<|", "|>", "<s", "s>", "< s>", "<S>", "</s", "<｜end｜>"),
)
GROUPS = (WORDS, SCRIPTS, SPACES, MORE_SPACES, EMOJI, MARKS, NUMBERS, SIGNS, CONTROL, LOOK_ALIKES)


def odd_strings(count: int, seed: int) -> list[str]:
    """Return strings of parts from all groups, some with any characters at all. The first ones are the parts alone."""
    draw = random.Random(seed)
    alone = ["", *(part for group in GROUPS for part in group)]
    return [*alone, *(_drawn(draw) for _ in range(count - len(alone)))]


def _drawn(draw: random.Random) -> str:
    if draw.random() < 0.15:
        return "".join(_any_char(draw) for _ in range(draw.randrange(1, 40)))
    groups = draw.sample(GROUPS, draw.randrange(1, len(GROUPS)))
    return "".join(draw.choice(draw.choice(groups)) for _ in range(draw.randrange(1, 25)))


def _any_char(draw: random.Random) -> str:
    """Any character but a surrogate."""
    char = draw.choice((draw.randrange(0x250), draw.randrange(0x10000), draw.randrange(0x110000)))
    return chr(char) if not 0xD800 <= char < 0xE000 else "\ufffd"
