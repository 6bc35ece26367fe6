"""Text in, text out: tokenizers, chat templates, incremental detokenisation."""

from blockpilot.text.chat import ChatTemplate
from blockpilot.text.detokenizer import Detokenizer
from blockpilot.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Tokenizer", "load_tokenizer"]
