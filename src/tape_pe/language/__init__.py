"""Language models, pretrained ones included: loading, texts, generation, perplexity, lm-evaluation-harness."""
