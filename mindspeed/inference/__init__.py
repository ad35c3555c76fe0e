"""Text generation and scoring with trained models, under tensor and pipeline parallelism.

load                  a checkpoint or a Hugging Face directory -> this rank's model stage
text_generator        model + tokenizer + process groups: texts in, texts out
gpt_model             the same with the interface of transformers (hf_generate)
generate, decoder     the decoding loop; forward passes with a KV cache, through all stages
sampling, beam_search next tokens from logits
text_stream           tokens -> text, incrementally, with stop strings
continuous_batching   requests that enter and leave a running batch
loglikelihood         log-probabilities of given continuations
answers               prompts of conversations; reasoning, content and calls of the answers
chat, conversation    chat on a terminal
messages              answers to a file of conversations
server                OpenAI-compatible HTTP server
parallel_groups       communication between the ranks
"""
