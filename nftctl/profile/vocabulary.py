"""Words of a prompt that a tokenizer of a word a token does not know: which they are, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence

from nftctl.profile.diagnose import shown

_MOST_WORDS = 8
_MOST_KNOWN = 60


def lacking(text: str, words: Sequence[str]) -> list[str]:
    """The words of `text` that are not among `words`, each once, in their order."""
    return list(dict.fromkeys(word for word in text.split() if word not in words))


def no_words(unknown: Sequence[str]) -> str:
    """A sentence. Example: `"purple" is no word that the base's tokenizer knows`."""
    shown_ones = ", ".join(map(shown, unknown[:_MOST_WORDS])) + (", ..." if len(unknown) > _MOST_WORDS else "")
    verb = "is no word" if len(unknown) == 1 else "are no words"
    return f"{shown_ones} {verb} that the base's tokenizer knows"


def known(words: Sequence[str]) -> str:
    """What there is instead."""
    more = f" and {len(words) - _MOST_KNOWN} more" if len(words) > _MOST_KNOWN else ""
    return f"its words are {', '.join(words[:_MOST_KNOWN])}{more}"
