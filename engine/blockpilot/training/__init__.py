"""Making policies: training prompts, labels, the predictor's training and its held-out report; data for drafters."""
