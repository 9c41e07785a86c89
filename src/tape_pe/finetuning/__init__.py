"""Fine-tuning of pretrained models to longer texts: the methods, their options, and the run."""
