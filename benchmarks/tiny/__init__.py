"""spark-tiny, the model that comes with the project: corpus, tokenizer, training, evaluation."""
