"""The word-level tokenizer of the embedded bases, in the form that Cosmos3's pipeline expects.

Owns the vocabulary and the chat template. There is no token for the unknown: the template itself refuses, by name, a
word that the base was never shown, a system message and thereby the resolution sentence, since an untrained embedding
would draw something in silence. The empty prompt is the unconditional one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from nftctl.model.tiny.data import WORDS

SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>")


def vocabulary(words: Sequence[str]) -> dict[str, int]:
    """Token -> id: the special ones first, then the words in their order."""
    return {token: n for n, token in enumerate((*SPECIAL, *words))}


VOCABULARY = vocabulary(WORDS)

TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] != 'user' -%}
{{- raise_exception('the tiny base knows no ' + message['role'] + ' message: set model.system_prompt = false') -}}
{%- endif -%}
{%- for word in message['content'].split() -%}
{%- if word not in WORDS -%}
{{- raise_exception('the tiny base does not know the word "' + word + '" (set model.resolution_template = false; '
    ~ 'its words are: ' + WORDS | join(', ') + ')') -}}
{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>' + message['content'] -}}
{%- endfor -%}
"""


def build_tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """A tokenizer of the words: "a red seven" becomes `<|im_start|> a red seven`; the pipeline adds two more."""
    by_word = Tokenizer(WordLevel(vocabulary(words)))
    by_word.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=by_word,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|vision_start|>"],
        model_max_length=64,
    )
    tokenizer.chat_template = "{%- set WORDS = " + json.dumps(words) + " -%}\n" + TEMPLATE
    return tokenizer


def prompt_tokens(text: str) -> list[int]:
    """Token ids of one prompt as the pipeline makes them from the template: start, words, end, start of image."""
    return [VOCABULARY[token] for token in ("<|im_start|>", *text.split(), "<|im_end|>", "<|vision_start|>")]
