"""Data preparation: text corpora, tokenizers and Megatron's indexed datasets."""
