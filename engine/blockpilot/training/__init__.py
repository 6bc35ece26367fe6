"""Making policies and drafters: prompts, answers, labels, training, held-out reports."""
