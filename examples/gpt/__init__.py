"""gpt: the parts of `train_gpt.py`: options, data, model, steps, report."""
