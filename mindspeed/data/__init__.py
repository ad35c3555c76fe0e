"""Data preparation: corpora, tokenizers, chat templates and Megatron's indexed data sets.

preprocess            files of records -> indexed data sets (preprocess_options)
  sources             input files, folders and Hugging Face data sets
  file_formats        one file -> blocks of records
  handlers            columns of a record -> texts or conversations
  record_encoders     texts and conversations -> token ids and labels
  loss_mask           which tokens of a conversation are trained
  sentence_splitting  texts -> sentences
  indexed_writer      token ids -> .bin and .idx, resumable
instruction_dataset   tokenized conversations as training samples (packing)
megatron              in order, with last tokens, or by weighted fractions
templates             chat templates as data; hf_template: those of Hugging Face tokenizers
tokenizer             tokenizers from Megatron's flags
quickstart_corpus     training data from the documentation of this Python
"""
